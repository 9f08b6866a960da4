// Tile kernels of the host CPU: one function computes one scalar operation over a tile of at most a few thousand
// elements. Compiled once for each instruction set; SelectKernels picks the best that the machine runs.
#ifndef FLAGOS_NATIVE_CPU_KERNELS_H_
#define FLAGOS_NATIVE_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "flagos/native_tables.h"

namespace flagos::cpu {

inline constexpr int kNumTypes = 17;  // one past the greatest

inline constexpr int kNumOps = static_cast<int>(Op::kCount);
inline constexpr int kNumCombines = static_cast<int>(Combine::kCount);
inline constexpr int kNumPartOps = static_cast<int>(PartOp::kCount);

// result[i] = op(a[i], b[i], c[i]); unused operands are ignored. result may be exactly one of the operands.
using TileFunction = void (*)(void* result, const void* a, const void* b, const void* c, int64_t n);
// *accumulator = *accumulator op x[0] op ... op x[n - 1], the accumulator in AccumulatorType.
using ReduceFunction = void (*)(void* accumulator, const void* x, int64_t n);
// *accumulator = *accumulator + x[0] y[0] + ... + x[n - 1] y[n - 1], the accumulator in AccumulatorType.
using ReduceProductsFunction = void (*)(void* accumulator, const void* x, const void* y, int64_t n);

// Rows of no more elements are computed in blocks: alone, each would cost a call for every operation.
inline constexpr int64_t kMaxBlockRow = 128;
// Of each of `rows` rows of n, from 1 to kMaxBlockRow: accumulators[row] = accumulators[row] op x[0] op ... op x[n - 1], in AccumulatorType.
using ReduceEachFunction = void (*)(void* accumulators, const void* x, int64_t rows, int64_t n);
// accumulator[i] = accumulator[i] op x[i] op x[i + stride] ... for each of `rows` rows of n, in AccumulatorType.
using ReduceRowsFunction = void (*)(void* accumulator, const void* x, int64_t rows, int64_t stride, int64_t n);

// *result = a[0] b[0] + ... + a[n - 1] b[n - 1].
using DotFunction = void (*)(void* result, const void* a, const void* b, int64_t n);

// The position of the greatest (or least) of n elements: of a NaN if there is one, of equal ones the first.
using ArgMinMaxInRowFunction = int64_t (*)(const void* x, int64_t n);
// The same in each of n columns of `rows` elements that are `stride` elements apart.
using ArgMinMaxInColumnsFunction = void (*)(int64_t* at, const void* x, int64_t rows, int64_t stride, int64_t n);
inline constexpr int64_t kArgMinMaxColumns = 256;  // no more than these
// Elements in rows and columns, and how far apart they stand, in elements, where they go and where they are.
struct Plane {
  int64_t rows, columns, to_row, to_column, from_row, from_column;
};
// to[r * to_row + c * to_column] = from[r * from_row + c * from_column]. What is written is not read, unless it stands
// where it goes.
using MoveFunction = void (*)(char* to, const char* from, const Plane& plane);
// n numbers of indices, `stride` apart: how far each moves a window. Negative ones are first raised by `wrap`.
struct Starts {
  const void* numbers;
  int64_t stride, limit, scale, wrap;
};
// offsets[i] += number i * scale. One outside 0 ... limit is clamped (a gather's), or makes the offset negative for good
// (a scatter's).
using StartFunction = void (*)(int64_t* offsets, const Starts& starts, int64_t n);
// The same modulo 2^32, clamped.
using ShortStartFunction = void (*)(uint32_t* offsets, const Starts& starts, int64_t n);
// to[i] = from[offsets[i]] for i < n.
using TakeFunction = void (*)(char* to, const char* from, const uint32_t* offsets, int64_t n);
// target[offsets[i] + k] op= updates[i * stride + k] for k < run, one i after the other; without negative offsets.
using ScatterFunction = void (*)(void* target, const int64_t* offsets, const void* updates, int64_t stride, int64_t run,
                                 int64_t n);

struct Pairs;  // cpu/pairs.h

// nullptr: that combination does not exist.
struct Kernels {
  const char* name;
  const Pairs* pairs;
  TileFunction apply[kNumOps][kNumTypes];
  // apply where a (1) or b (2) is the same everywhere, of which only the first element is read.
  TileFunction with_numbers[kNumOps][kNumTypes][4];
  TileFunction point[kNumOps][kNumTypes];          // apply of one element
  TileFunction divide_by_one[kNumTypes];           // apply[kDivide] of integers where all b[i] are the same
  TileFunction remainder_by_one[kNumTypes];        // apply[kRemainder] where all b[i] are the same
  TileFunction one_by[kNumTypes];                  // and where all a[i] are 1: F32
  TileFunction select_numbers[kNumTypes];          // apply[kSelect] where all b[i], and all c[i], are the same
  TileFunction convert[kNumTypes][kNumTypes];      // [from][to]
  ReduceFunction reduce[kNumCombines][kNumTypes];  // [Combine][type of x]
  ReduceEachFunction reduce_each[kNumCombines][kNumTypes];
  ReduceRowsFunction reduce_rows[kNumCombines][kNumTypes];
  ArgMinMaxInRowFunction argminmax_in_row[2][kNumTypes];  // [whether the greatest counts]
  ArgMinMaxInColumnsFunction argminmax_in_columns[2][kNumTypes];
  ReduceProductsFunction reduce_products[kNumTypes];  // F32
  DotFunction dot[kNumTypes];                         // F32, F64
  TileFunction complex128[static_cast<int>(ComplexOp::kCount)];
  TileFunction part[kNumPartOps];  // of kC64 and kF32
  TileFunction iota[kNumTypes];    // result[i] = *a (int64) + i * *b (int64)
  MoveFunction move[4];            // by the logarithm of an element's width in bytes
  // Writes around the caches, where the processor can; others see it after `flush` by the same thread.
  void (*stream)(char* to, const char* from, int64_t bytes);
  void (*flush)();
  StartFunction clamped_start[kNumTypes], kept_start[kNumTypes];  // integers
  ShortStartFunction short_start[kNumTypes];
  TakeFunction take[4];  // by the logarithm of an element's width in bytes
  // result[i] = b[a[i]], for *c (int64) less than the elements of b; indices outside 0 ... *c are clamped. By the same,
  // and whether indices are int64 rather than int32.
  TileFunction take_at[4][2];
  ScatterFunction scatter[kNumCombines][kNumTypes];
};

const Kernels& BaselineKernels();
#if defined(__x86_64__)
const Kernels& Avx2Kernels();
const Kernels& Avx512Kernels();
#endif
const Kernels& SelectKernels();

// 0 for a number that is no type.
inline int64_t TypeBytes(Type type) {
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
    case Type::kC64:
      return 8;
  }
  return 0;
}

// Sums and products of floats are reduced in double, of 16-bit floats in float; everything else in its own type.
Type AccumulatorType(Combine combine, Type type);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_KERNELS_H_
