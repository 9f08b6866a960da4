#include "cpu/kernels.h"

namespace flagos::cpu {

const Kernels& SelectKernels() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Avx512Kernels();
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Avx2Kernels();
#endif
  return BaselineKernels();
}

int64_t TypeBytes(Type type) {
  switch (type) {
    case Type::kPred:
    case Type::kS8:
    case Type::kU8:
      return 1;
    case Type::kS16:
    case Type::kU16:
    case Type::kF16:
    case Type::kBF16:
      return 2;
    case Type::kS32:
    case Type::kU32:
    case Type::kF32:
      return 4;
    case Type::kS64:
    case Type::kU64:
    case Type::kF64:
      return 8;
  }
  return 0;
}

Type AccumulatorType(Combine combine, Type type) {
  const bool rounds = combine == Combine::kAdd || combine == Combine::kMultiply;
  if (rounds && type == Type::kF32) return Type::kF64;
  if (type == Type::kF16 || type == Type::kBF16) return rounds ? Type::kF64 : Type::kF32;
  return type;
}

}  // namespace flagos::cpu
