// Tile kernels of two operations at once, the first of which only the second one reads: what lies between them never goes
// through memory. Which there are is codegen/cpu/bytecode.py's to say. Compiled once for each instruction set.
#ifndef FLAGOS_NATIVE_CPU_PAIRS_H_
#define FLAGOS_NATIVE_CPU_PAIRS_H_

#include "cpu/kernels.h"

namespace flagos::cpu {

#define FLAGOS_CPU_COUNT(first, second) +1
inline constexpr int kNumFloatPairs = 0 FLAGOS_CPU_FLOAT_PAIRS(FLAGOS_CPU_COUNT);
inline constexpr int kNumIntegerPairs = 0 FLAGOS_CPU_INTEGER_PAIRS(FLAGOS_CPU_COUNT);
#undef FLAGOS_CPU_COUNT

// By the numbers of the pairs, those of integers of unsigned ones, and by the bits of the operands that are the same
// everywhere, of which only the first elements are read: 1 for a, 2 for b, 4 for c. Last, of a single element.
inline constexpr int kNumberSets = 7, kPoint = kNumberSets;
struct Pairs {
  TileFunction f32[kNumFloatPairs][kNumberSets + 1], f64[kNumFloatPairs][kNumberSets + 1];
  TileFunction u32[kNumIntegerPairs][kNumberSets + 1], u64[kNumIntegerPairs][kNumberSets + 1];
};

namespace baseline {
extern const Pairs kPairs;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Pairs kPairs;
}
namespace avx512 {
extern const Pairs kPairs;
}
#endif

// nullptr: there is no such pair. which: a set of numbers or kPoint.
inline TileFunction FindPair(const Pairs& pairs, int64_t number, Type type, int which) {
  const bool is_float = type == Type::kF32 || type == Type::kF64;
  if (number < 0 || number >= (is_float ? kNumFloatPairs : kNumIntegerPairs)) return nullptr;
  switch (type) {
    case Type::kF32:
      return pairs.f32[number][which];
    case Type::kF64:
      return pairs.f64[number][which];
    case Type::kU32:
      return pairs.u32[number][which];
    case Type::kU64:
      return pairs.u64[number][which];
    default:
      return nullptr;
  }
}

// nullptr: there is no such pair with such numbers.
inline TileFunction PairFunction(const Pairs& pairs, int64_t number, Type type, int numbers) {
  return numbers < kNumberSets ? FindPair(pairs, number, type, numbers) : nullptr;
}

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_PAIRS_H_
