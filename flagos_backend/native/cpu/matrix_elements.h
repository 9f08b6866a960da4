// What factorisations ask of the elements of their matrices: real numbers, or complex ones.
#ifndef FLAGOS_NATIVE_CPU_MATRIX_ELEMENTS_H_
#define FLAGOS_NATIVE_CPU_MATRIX_ELEMENTS_H_

#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "cpu/tiles.h"

namespace flagos::cpu {

template <class T>
constexpr bool kIsComplex = !std::is_floating_point_v<T>;

// What LAPACK calls the size of a pivot.
template <class T>
auto Magnitude(T x) {
  if constexpr (kIsComplex<T>) {
    return std::abs(x.real()) + std::abs(x.imag());
  } else {
    return std::abs(x);
  }
}

template <class T>
T Conjugate(T x) {
  if constexpr (kIsComplex<T>) {
    return std::conj(x);
  } else {
    return x;
  }
}

// Of complex numbers without the special values of C99's Annex G, which would be asked for at each product.
template <class T>
T Product(T a, T b) {
  if constexpr (kIsComplex<T>) {
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  } else {
    return a * b;
  }
}

template <class T>
T Nan() {
  return T(std::numeric_limits<decltype(Magnitude(T{}))>::quiet_NaN());
}

template <class T>
bool AllFinite(const T* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(Magnitude(x[i]))) return false;
  }
  return true;
}

// to[j, i] = from[i, j].
template <class T>
void TransposeInto(T* to, int64_t to_leading, const T* from, int64_t from_leading, int64_t rows, int64_t columns) {
  if constexpr (sizeof(T) <= 8) {
    MoveElements(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from),
                 {columns, rows, to_leading, 1, 1, from_leading}, sizeof(T));
  } else {
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = 0; i < rows; ++i) to[j * to_leading + i] = from[i * from_leading + j];
    }
  }
}

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_MATRIX_ELEMENTS_H_
