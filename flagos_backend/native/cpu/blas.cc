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

#if defined(__x86_64__)
bool IsIntels() {
  unsigned int leaves, maker[3];
  return __get_cpuid(0, &leaves, &maker[0], &maker[2], &maker[1]) && std::memcmp(maker, "GenuineIntel", 12) == 0;
}
#endif

enum class Products { kBest, kMkl, kOneDnn, kOwn };

// What FLAGOS_CPU_PRODUCTS asks for.
Products Wanted() {
  const char* text = std::getenv("FLAGOS_CPU_PRODUCTS");
  const std::string_view wanted = text == nullptr ? "" : text;
  if (wanted == "mkl") return Products::kMkl;
  if (wanted == "onednn") return Products::kOneDnn;
  if (wanted == "flagos") return Products::kOwn;
  if (!wanted.empty()) {
    Log(FLAGOS_LOG_WARNING, "FLAGOS_CPU_PRODUCTS is %s, neither mkl nor onednn nor flagos: not followed", text);
  }
  return Products::kBest;
}

// On processors of another vendor MKL's products are slower than oneDNN's: on an AMD EPYC (Zen 4) by an eighth for
// large matrices, and twice as slow for a few rows.
bool PrefersBlocks(Products wanted) {
#if defined(__x86_64__)
  if (&SelectKernels() != &Avx512Kernels()) return false;
  return wanted == Products::kOneDnn || (wanted == Products::kBest && !IsIntels());
#else
  return false;
#endif
}

}  // namespace

const Blas& FindBlas() {
  static const Blas blas = [] {
    Blas found;
    const Products wanted = Wanted();
    void* torch = wanted == Products::kOwn ? nullptr : dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return found;
    Find(torch, "sgemm_", &found.f32.gemm);
    Find(torch, "dgemm_", &found.f64.gemm);
    Find(torch, "cgemm_", &found.c64.gemm);
    Find(torch, "zgemm_", &found.c128.gemm);
    // at::native::cpublas::brgemm, which the code that Inductor generates calls as well.
    if (PrefersBlocks(wanted)) Find(torch, "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb", &found.block);
    Find(torch, "MKL_Set_Num_Threads_Local", &found.set_threads);
    return found;
  }();
  return blas;
}

}  // namespace flagos::cpu
