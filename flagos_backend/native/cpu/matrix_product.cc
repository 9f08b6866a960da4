#include <dlfcn.h>

#include <cstring>

#include "cpu/run_loop.h"

namespace flagos::cpu {
namespace {

using Gemm32 = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                        const int*, const float*, const int*, const float*, float*, const int*);
using Gemm64 = void (*)(const char*, const char*, const int*, const int*, const int*, const double*, const double*,
                        const int*, const double*, const int*, const double*, double*, const int*);

struct Blas {
  Gemm32 sgemm = nullptr;
  Gemm64 dgemm = nullptr;
};

// The BLAS inside libtorch_cpu (MKL or OpenBLAS, 32-bit integers), found among the libraries already loaded.
const Blas& FindBlas() {
  static const Blas blas = [] {
    Blas found;
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (torch == nullptr) return found;
    found.sgemm = reinterpret_cast<Gemm32>(dlsym(torch, "sgemm_"));
    found.dgemm = reinterpret_cast<Gemm64>(dlsym(torch, "dgemm_"));
    return found;
  }();
  return blas;
}

// Row-major C[m, n] = A[m, k] B[k, n] is column-major C' = B' A', which is what BLAS computes.
template <class T, class F>
void Multiply(F gemm, const MatrixProduct& p, char* const* slots) {
  const T one = 1, zero = 0;
  const int m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
  const int lda = static_cast<int>(p.a.leading), ldb = static_cast<int>(p.b.leading),
            ldc = static_cast<int>(p.c.leading);
  const auto base = [&](const MatrixProduct::Operand& operand, int64_t i) {
    return reinterpret_cast<T*>(slots[operand.slot]) + operand.offset + i * operand.batch_stride;
  };
  for (int64_t i = 0; i < p.batch; ++i) {
    gemm(p.b.transposed ? "T" : "N", p.a.transposed ? "T" : "N", &n, &m, &k, &one, base(p.b, i), &ldb, base(p.a, i),
         &lda, &zero, base(p.c, i), &ldc);
  }
}

}  // namespace

bool HaveMatrixProducts() { return FindBlas().sgemm != nullptr && FindBlas().dgemm != nullptr; }

void RunMatrixProduct(const MatrixProduct& product, char* const* slots) {
  if (product.type == Type::kF32) {
    Multiply<float>(FindBlas().sgemm, product, slots);
  } else {
    Multiply<double>(FindBlas().dgemm, product, slots);
  }
}

}  // namespace flagos::cpu
