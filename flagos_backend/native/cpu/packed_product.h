// Products of matrices by our own kernels, for processes without a BLAS.
#ifndef FLAGOS_NATIVE_CPU_PACKED_PRODUCT_H_
#define FLAGOS_NATIVE_CPU_PACKED_PRODUCT_H_

#include <cstdint>

#include "cpu/packed_kernels.h"

namespace flagos::cpu {

// Element (r, c) is at[r * row + c * column], of complex numbers its conjugate if so wanted. One of the steps is 1, unless
// there is one row or column only.
template <class T>
struct StridedMatrix {
  T* at;
  int64_t row, column;
  bool conjugated = false;

  operator StridedMatrix<const T>() const { return {at, row, column, conjugated}; }
  StridedMatrix Transposed() const { return {at, column, row, conjugated}; }
  StridedMatrix From(int64_t r, int64_t c) const { return {at + r * row + c * column, row, column, conjugated}; }
};

// c[m, n] = a[m, k] b[k, n], or c += or -= that, on the calling thread. T: float, double, or complex numbers of them.
// Each element is summed in one order, which neither the sizes of the others nor strides change.
template <class T>
void MultiplyPacked(int64_t m, int64_t n, int64_t k, const StridedMatrix<const T>& a, const StridedMatrix<const T>& b,
                    const StridedMatrix<T>& c, Store store);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_PACKED_PRODUCT_H_
