// LAPACK's routines, as Python finds them for the process: those behind SciPy's `cython_lapack`, with 32-bit integers.
#ifndef FLAGOS_NATIVE_CPU_LAPACK_H_
#define FLAGOS_NATIVE_CPU_LAPACK_H_

#include <complex>
#include <cstdint>
#include <vector>

#include "flagos/native_tables.h"

namespace flagos::cpu {

// The routines of one element type, with Fortran's conventions: matrices stand column by column, each argument is an
// address, and no lengths of strings follow. Real and complex routines of a name differ in their arguments.
template <class T>
class Lapack {
 public:
  explicit Lapack(const int64_t* addresses) : addresses_(addresses) {}

  // A call of `routine` with these arguments.
  template <class... Arguments>
  void operator()(LapackRoutine routine, Arguments*... arguments) const {
    const int64_t address = addresses_[static_cast<int64_t>(routine)];
    reinterpret_cast<void (*)(Arguments*...)>(address)(arguments...);
  }

 private:
  const int64_t* addresses_;
};

// Whether the process has the routines.
bool HaveLapack();

// The first call decides, for as long as the process lives. `addresses`: for each of f32, f64, c64, c128 those of all
// routines in their order. Another number of them leaves the process without.
void SetLapack(const std::vector<int64_t>& addresses);

// Only where the process has them. `element_type` as LinearAlgebra has it.
const int64_t* LapackAddresses(int64_t element_type);

template <class T>
Lapack<T> FindLapack() {
  constexpr bool is_complex = !std::is_floating_point_v<T>;
  constexpr bool is_double = sizeof(T) == (is_complex ? 16 : 8);
  return Lapack<T>(LapackAddresses((is_complex ? 2 : 0) + (is_double ? 1 : 0)));
}

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_LAPACK_H_
