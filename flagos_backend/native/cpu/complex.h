// Products and quotients of complex numbers as tile kernels, and the quotients that are none for vectors.
#ifndef FLAGOS_NATIVE_CPU_COMPLEX_H_
#define FLAGOS_NATIVE_CPU_COMPLEX_H_

#include <cstdint>

namespace flagos::cpu {

// result[i] = a[i] op b[i] for n complex numbers, real parts first; the last operand is not read.
#define FLAGOS_CPU_COMPLEX_KERNELS(NAMESPACE)                                                  \
  namespace NAMESPACE {                                                                        \
  void MultiplyComplex64(void* result, const void* a, const void* b, const void*, int64_t n);  \
  void MultiplyComplex128(void* result, const void* a, const void* b, const void*, int64_t n); \
  void DivideComplex64(void* result, const void* a, const void* b, const void*, int64_t n);    \
  void DivideComplex128(void* result, const void* a, const void* b, const void*, int64_t n);   \
  }
FLAGOS_CPU_COMPLEX_KERNELS(baseline)
FLAGOS_CPU_COMPLEX_KERNELS(avx2)
FLAGOS_CPU_COMPLEX_KERNELS(avx512)
#undef FLAGOS_CPU_COMPLEX_KERNELS

// One quotient of any numbers, with the special values of C99's Annex G. quotient may be one of the operands.
void DivideAny(double* quotient, const double* divided, const double* divisor);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_COMPLEX_H_
