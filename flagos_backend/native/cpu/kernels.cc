#include "cpu/kernels.h"

#include "cpu/fourier_kernels.h"
#include "cpu/integer_kernels.h"
#include "cpu/packed_kernels.h"
#include "cpu/skinny_kernels.h"
#include "cpu/small_matrices.h"

#if defined(__x86_64__)
#include <sys/platform/x86.h>
#endif

namespace flagos::cpu {

#if defined(__x86_64__)
namespace {

// The levels that the kernels are compiled for, x86-64-v3 and -v4: what processor and system both have switched on. glibc
// is asked, because the compiler's own __builtin_cpu_supports brings a static initializer, which the loader refuses.
bool HasLevel3() {
  return CPU_FEATURE_ACTIVE(AVX2) && CPU_FEATURE_ACTIVE(BMI1) && CPU_FEATURE_ACTIVE(BMI2) && CPU_FEATURE_ACTIVE(F16C) &&
         CPU_FEATURE_ACTIVE(FMA) && CPU_FEATURE_ACTIVE(LZCNT) && CPU_FEATURE_ACTIVE(MOVBE);
}

bool HasLevel4() {
  return HasLevel3() && CPU_FEATURE_ACTIVE(AVX512F) && CPU_FEATURE_ACTIVE(AVX512BW) && CPU_FEATURE_ACTIVE(AVX512CD) &&
         CPU_FEATURE_ACTIVE(AVX512DQ) && CPU_FEATURE_ACTIVE(AVX512VL);
}

}  // namespace
#endif

const Kernels& SelectKernels() {
#if defined(__x86_64__)
  if (HasLevel4()) return Avx512Kernels();
  if (HasLevel3()) return Avx2Kernels();
#endif
  return BaselineKernels();
}

const IntegerKernels& SelectIntegerKernels() {
#if defined(__x86_64__)
  if (HasLevel4()) return CPU_FEATURE_ACTIVE(AVX512_VNNI) ? avx512_vnni::kIntegerKernels : avx512::kIntegerKernels;
  if (HasLevel3()) return avx2::kIntegerKernels;
#endif
  return baseline::kIntegerKernels;
}

const SmallMatrixKernels& SelectSmallMatrixKernels() {
#if defined(__x86_64__)
  if (HasLevel4()) return avx512::kSmallMatrixKernels;
  if (HasLevel3()) return avx2::kSmallMatrixKernels;
#endif
  return baseline::kSmallMatrixKernels;
}

const SkinnyKernels& SelectSkinnyKernels() {
#if defined(__x86_64__)
  if (HasLevel4()) return avx512::kSkinnyKernels;
  if (HasLevel3()) return avx2::kSkinnyKernels;
#endif
  return baseline::kSkinnyKernels;
}

const FourierKernels& SelectFourierKernels() {
#if defined(__x86_64__)
  if (HasLevel4()) return avx512::kFourierKernels;
  if (HasLevel3()) return avx2::kFourierKernels;
#endif
  return baseline::kFourierKernels;
}

const PackedKernels& SelectPackedKernels() {
#if defined(__x86_64__)
  if (HasLevel4()) return avx512::kPackedKernels;
  if (HasLevel3()) return avx2::kPackedKernels;
#endif
  return baseline::kPackedKernels;
}

Type AccumulatorType(Combine combine, Type type) {
  const bool rounds = combine == Combine::kAdd || combine == Combine::kMultiply;
  if (rounds && type == Type::kF32) return Type::kF64;
  if (type == Type::kF16 || type == Type::kBF16) return rounds ? Type::kF64 : Type::kF32;
  return type;
}

}  // namespace flagos::cpu
