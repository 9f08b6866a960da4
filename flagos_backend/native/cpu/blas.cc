#include "cpu/blas.h"

#include <dlfcn.h>

#include <string>

namespace flagos::cpu {
namespace {

template <class F>
void Find(void* library, const std::string& name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name.c_str()));
}

template <class T>
void FindRoutines(void* library, const std::string& prefix, const char* orthogonal, Routines<T>* found) {
  Find(library, prefix + "gemm_", &found->gemm);
  Find(library, prefix + "trsm_", &found->trsm);
  Find(library, prefix + "getrf_", &found->getrf);
  Find(library, prefix + "potrf_", &found->potrf);
  Find(library, prefix + "geqrf_", &found->geqrf);
  Find(library, prefix + orthogonal, &found->orgqr);
}

}  // namespace

const Blas& FindBlas() {
  static const Blas blas = [] {
    Blas found;
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return found;
    FindRoutines(torch, "s", "orgqr_", &found.f32);
    FindRoutines(torch, "d", "orgqr_", &found.f64);
    FindRoutines(torch, "c", "ungqr_", &found.c64);
    FindRoutines(torch, "z", "ungqr_", &found.c128);
    Find(torch, "MKL_Set_Num_Threads_Local", &found.set_threads);
    return found;
  }();
  return blas;
}

}  // namespace flagos::cpu
