// Arithmetic of complex numbers as tile kernels, and the quotients that are none for vectors.
//
// A number of two floats lies in a tile as it does in memory. One of two doubles is no element of tiles: its products and
// quotients are steps of their own.
#ifndef FLAGOS_NATIVE_CPU_COMPLEX_H_
#define FLAGOS_NATIVE_CPU_COMPLEX_H_

#include <cstdint>

namespace flagos::cpu {

// Tile functions: see TileFunction of kernels.h. Of complex numbers the real part comes first.
#define FLAGOS_CPU_COMPLEX_KERNELS(NAMESPACE)                                                    \
  namespace NAMESPACE {                                                                          \
  void MultiplyComplex64(void* result, const void* a, const void* b, const void*, int64_t n);    \
  void MultiplyComplex128(void* result, const void* a, const void* b, const void*, int64_t n);   \
  void DivideComplex64(void* result, const void* a, const void* b, const void*, int64_t n);      \
  void DivideComplex128(void* result, const void* a, const void* b, const void*, int64_t n);     \
  void AddComplex64(void* result, const void* a, const void* b, const void*, int64_t n);         \
  void SubtractComplex64(void* result, const void* a, const void* b, const void*, int64_t n);    \
  void NegateComplex64(void* result, const void* a, const void* b, const void*, int64_t n);      \
  void EqComplex64(void* result, const void* a, const void* b, const void*, int64_t n);          \
  void NeComplex64(void* result, const void* a, const void* b, const void*, int64_t n);          \
  void WidenToComplex64(void* result, const void* a, const void* b, const void*, int64_t n);     \
  void RealOfComplex64(void* result, const void* a, const void* b, const void*, int64_t n);      \
  void ImaginaryOfComplex64(void* result, const void* a, const void* b, const void*, int64_t n); \
  void AbsOfComplex64(void* result, const void* a, const void* b, const void*, int64_t n);       \
  void JoinComplex64(void* result, const void* a, const void* b, const void*, int64_t n);        \
  }
FLAGOS_CPU_COMPLEX_KERNELS(baseline)
FLAGOS_CPU_COMPLEX_KERNELS(avx2)
FLAGOS_CPU_COMPLEX_KERNELS(avx512)
#undef FLAGOS_CPU_COMPLEX_KERNELS

// One quotient of any numbers, with the special values of C99's Annex G. quotient may be one of the operands.
void DivideAny(double* quotient, const double* divided, const double* divisor);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_COMPLEX_H_
