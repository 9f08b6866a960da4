// Products of a few vectors with a matrix, which take as long as reading it. Compiled once for each instruction set.
#ifndef FLAGOS_NATIVE_CPU_SKINNY_KERNELS_H_
#define FLAGOS_NATIVE_CPU_SKINNY_KERNELS_H_

#include "cpu/kernels.h"

namespace flagos::cpu {

inline constexpr int kMaxVectors = 4;

// Vector v begins at `vectors` + v * step; row r of the matrix at `matrix` + r * leading; in elements. Both are
// contiguous. The vectors are of the type that is computed in, the matrix may be of a narrower one.
struct SkinnyOperands {
  const void* vectors;
  int64_t step;
  const void* matrix;
  int64_t leading;
};
// c[v * vector_step + r * row_step] = the product of vector v and row r, both of `depth` elements.
struct SkinnyResult {
  void* c;
  int64_t vector_step, row_step;
};
using DotsFunction = void (*)(const SkinnyResult& result, const SkinnyOperands& operands, int64_t rows, int64_t depth);
// sums[v * columns + i] += the sum of element r of vector v times element i of row r, over the rows.
using SumsFunction = void (*)(void* sums, const SkinnyOperands& operands, int64_t rows, int64_t columns);

// By one less than the number of vectors.
struct SkinnyKernelsOf {
  DotsFunction dots[kMaxVectors];
  SumsFunction sums[kMaxVectors];
};
struct SkinnyKernels {
  SkinnyKernelsOf f32, f64, f16, bf16;  // by the matrix's type; 16-bit floats are computed in floats
};

namespace baseline {
extern const SkinnyKernels kSkinnyKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const SkinnyKernels kSkinnyKernels;
}
namespace avx512 {
extern const SkinnyKernels kSkinnyKernels;
}
#endif
const SkinnyKernels& SelectSkinnyKernels();

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_SKINNY_KERNELS_H_
