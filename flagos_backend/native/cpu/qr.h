// QR factorisations, and the products of their reflectors.
#ifndef FLAGOS_NATIVE_CPU_QR_H_
#define FLAGOS_NATIVE_CPU_QR_H_

#include "cpu/linear_algebra.h"

namespace flagos::cpu {

// Of matrix `number` of the batch. T: float, double, or complex numbers of them.
template <class T>
void QrOne(const LinearAlgebra& step, char* const* slots, int64_t number);
template <class T>
void ReflectorsOne(const LinearAlgebra& step, char* const* slots, int64_t number);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_QR_H_
