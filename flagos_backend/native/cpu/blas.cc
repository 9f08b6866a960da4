#include "cpu/blas.h"

#include <dlfcn.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "cpu/kernels.h"
#include "log.h"

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
  Find(library, prefix + "geqrf_", &found->geqrf);
  Find(library, prefix + orthogonal, &found->orgqr);
}

#if defined(__x86_64__)
bool IsIntels() {
  unsigned int leaves, maker[3];
  return __get_cpuid(0, &leaves, &maker[0], &maker[2], &maker[1]) && std::memcmp(maker, "GenuineIntel", 12) == 0;
}
#endif

// On processors of another vendor MKL's products are slower than oneDNN's: on an AMD EPYC (Zen 4) by an eighth for
// large matrices, and twice as slow for a few rows. FLAGOS_CPU_PRODUCTS decides otherwise.
bool PrefersBlocks() {
#if defined(__x86_64__)
  const char* text = std::getenv("FLAGOS_CPU_PRODUCTS");
  const std::string_view wanted = text == nullptr ? "" : text;
  const bool known = wanted.empty() || wanted == "mkl" || wanted == "onednn";
  if (!known) Log(FLAGOS_LOG_WARNING, "FLAGOS_CPU_PRODUCTS is %s, neither mkl nor onednn: not followed", text);
  if (&SelectKernels() != &Avx512Kernels()) return false;
  return known && !wanted.empty() ? wanted == "onednn" : !IsIntels();
#else
  return false;
#endif
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
    // at::native::cpublas::brgemm, which the code that Inductor generates calls as well.
    if (PrefersBlocks()) Find(torch, "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb", &found.block);
    Find(torch, "MKL_Set_Num_Threads_Local", &found.set_threads);
    return found;
  }();
  return blas;
}

}  // namespace flagos::cpu
