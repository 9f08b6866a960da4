// Tile kernels of two operations at once, the first of which only the second one reads: what lies between them never goes
// through memory. Compiled once for each instruction set.
#ifndef FLAGOS_NATIVE_CPU_PAIRS_H_
#define FLAGOS_NATIVE_CPU_PAIRS_H_

#include "cpu/kernels.h"

namespace flagos::cpu {

// X(first, second): second(first(a, b), c), but for SubtractFrom, which is c - first(a, b). The numbers are part of the
// program format that flagos_backend/codegen/cpu/transforms/fuse_op_pairs.py writes.
// clang-format off
#define FLAGOS_CPU_FLOAT_PAIRS(X)                                                                             \
  X(Add, Add) X(Add, Subtract) X(Add, SubtractFrom) X(Add, Multiply)                                          \
  X(Subtract, Add) X(Subtract, Subtract) X(Subtract, SubtractFrom) X(Subtract, Multiply)                      \
  X(Multiply, Add) X(Multiply, Subtract) X(Multiply, SubtractFrom) X(Multiply, Multiply)
#define FLAGOS_CPU_INTEGER_PAIRS(X)                                                                           \
  X(Add, Add) X(Add, And) X(Add, Or) X(Add, Xor)                                                              \
  X(And, Add) X(And, And) X(And, Or) X(And, Xor)                                                              \
  X(Or, Add) X(Or, And) X(Or, Or) X(Or, Xor)                                                                  \
  X(Xor, Add) X(Xor, And) X(Xor, Or) X(Xor, Xor)                                                              \
  X(ShiftLeft, Add) X(ShiftLeft, And) X(ShiftLeft, Or) X(ShiftLeft, Xor)                                      \
  X(ShiftRightLogical, Add) X(ShiftRightLogical, And) X(ShiftRightLogical, Or) X(ShiftRightLogical, Xor)      \
  X(RotateLeft, Add) X(RotateLeft, And) X(RotateLeft, Or) X(RotateLeft, Xor)
// clang-format on

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
