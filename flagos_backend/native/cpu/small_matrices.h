// Forward substitution with small triangles, and LU of narrow panels: what larger matrices are divided into. Compiled
// once for each instruction set.
#ifndef FLAGOS_NATIVE_CPU_SMALL_MATRICES_H_
#define FLAGOS_NATIVE_CPU_SMALL_MATRICES_H_

#include <complex>
#include <cstdint>

namespace flagos::cpu {

inline constexpr int64_t kSmall = 16;  // the greatest order of a triangle, or columns of a panel

template <class T>
struct SmallMatrixKernelsOf {
  // Forward substitution, in place: l x = b for `count` columns of b, whose rows are `leading` elements apart; those of
  // l are kSmall apart, and where it is unit triangular its diagonal is not read.
  void (*substitute)(const T* l, int64_t order, bool unit_diagonal, T* x, int64_t leading, int64_t count);
  // LU with partial pivoting, in place, of n columns that are `leading` elements apart, each contiguous and followed by
  // memory up to a multiple of kSmall elements; rows >= n. Pivots count from the first row.
  void (*lu)(T* columns, int64_t leading, int64_t rows, int64_t n, int32_t* pivots);
};

struct SmallMatrixKernels {
  SmallMatrixKernelsOf<float> f32;
  SmallMatrixKernelsOf<double> f64;
  SmallMatrixKernelsOf<std::complex<float>> c64;
  SmallMatrixKernelsOf<std::complex<double>> c128;

  const SmallMatrixKernelsOf<float>& Of(float) const { return f32; }
  const SmallMatrixKernelsOf<double>& Of(double) const { return f64; }
  const SmallMatrixKernelsOf<std::complex<float>>& Of(std::complex<float>) const { return c64; }
  const SmallMatrixKernelsOf<std::complex<double>>& Of(std::complex<double>) const { return c128; }
};

namespace baseline {
extern const SmallMatrixKernels kSmallMatrixKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const SmallMatrixKernels kSmallMatrixKernels;
}
namespace avx512 {
extern const SmallMatrixKernels kSmallMatrixKernels;
}
#endif
const SmallMatrixKernels& SelectSmallMatrixKernels();

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_SMALL_MATRICES_H_
