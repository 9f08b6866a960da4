// Products of matrices in registers: the innermost loops of packed_product.cc. Compiled once for each instruction set.
#ifndef FLAGOS_NATIVE_CPU_PACKED_KERNELS_H_
#define FLAGOS_NATIVE_CPU_PACKED_KERNELS_H_

#include <cstdint>

namespace flagos::cpu {

inline constexpr int kMaxTileRows = 12, kMaxTileVectors = 2;
inline constexpr int kMaxTileColumns = 32;  // of floats, in kMaxTileVectors of the widest vectors

enum class Store { kWrite, kAdd, kSubtract };

// c = a b, c += a b or c -= a b for so many rows of c and whole vectors of columns, summed in order over `depth`.
// Element (r, d) of a is at a[r * a_row + d * a_depth]. Rows of b are contiguous, and b_depth elements apart; those of c
// are contiguous, and c_row elements apart.
template <class T>
using ProductTile = void (*)(int64_t depth, const T* a, int64_t a_row, int64_t a_depth, const T* b, int64_t b_depth,
                             T* c, int64_t c_row, Store store);

// c of complex numbers in two planes, `c_plane` elements apart: the real parts first. So are those of a and b.
struct Planes {
  int64_t a, b, c;
};
template <class T>
using ComplexProductTile = void (*)(int64_t depth, const T* a, int64_t a_depth, const T* b, int64_t b_depth, T* c,
                                    int64_t c_row, const Planes& planes);

// to[d * width + i] = element i of row d, for `count` elements of each of `depth` rows, with zeros up to the width, which
// is that of a tile's factors or of one or two vectors. Rows are `leading` elements apart, each contiguous; or columns are.
template <class T>
using PackPanel = void (*)(T* to, const T* from, int64_t leading, int64_t count, int64_t depth);
template <class T>
struct PackFunctions {
  PackPanel<T> of_rows, of_columns;
};

// By one less than the number of rows, and of vectors in a row.
template <class T>
struct PackedKernelsOf {
  int lanes;  // of a vector
  int rows;   // of the tallest tile
  ProductTile<T> tiles[kMaxTileRows][kMaxTileVectors];
  PackFunctions<T> pack_factors, pack_vectors[kMaxTileVectors];
  int complex_rows;
  ComplexProductTile<T> complex_tile;  // of complex_rows rows and one vector
};
struct PackedKernels {
  PackedKernelsOf<float> f32;
  PackedKernelsOf<double> f64;

  const PackedKernelsOf<float>& Of(float) const { return f32; }
  const PackedKernelsOf<double>& Of(double) const { return f64; }
};

namespace baseline {
extern const PackedKernels kPackedKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const PackedKernels kPackedKernels;
}
namespace avx512 {
extern const PackedKernels kPackedKernels;
}
#endif
const PackedKernels& SelectPackedKernels();

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_PACKED_KERNELS_H_
