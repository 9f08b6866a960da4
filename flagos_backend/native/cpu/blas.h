// The BLAS inside libtorch_cpu (MKL or OpenBLAS, 32-bit integers), if that is among the libraries already loaded when the
// first product is asked for; packed_product.h has what multiplies otherwise, for as long as the process lives.
#ifndef FLAGOS_NATIVE_CPU_BLAS_H_
#define FLAGOS_NATIVE_CPU_BLAS_H_

#include <complex>

namespace flagos::cpu {

// The routine for one element type, with the conventions of Fortran: matrices stand column by column. Null: not there.
template <class T>
struct Routines {
  using Gemm = void (*)(const char* transpose_a, const char* transpose_b, const int* m, const int* n, const int* k,
                        const T* alpha, const T* a, const int* lda, const T* b, const int* ldb, const T* beta, T* c,
                        const int* ldc);
  Gemm gemm = nullptr;
};

// c = a b, or c += a b, of matrices whose rows stand `lda`, `ldb`, `ldc` elements apart.
using BlockKernel = void (*)(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                             const float* a, const float* b, float* c, bool packed_for_dot_products);

struct Blas {
  Routines<float> f32;
  Routines<double> f64;
  Routines<std::complex<float>> c64;
  Routines<std::complex<double>> c128;
  BlockKernel block = nullptr;        // oneDNN's, where it is the faster one
  int (*set_threads)(int) = nullptr;  // of the calling thread; returns the former number. Only MKL has it.

  // Whether our threads may share products: a BLAS that cannot be held to one thread has threads of its own.
  bool IsShared() const { return f32.gemm == nullptr || set_threads != nullptr; }

  const Routines<float>& Of(float) const { return f32; }
  const Routines<double>& Of(double) const { return f64; }
  const Routines<std::complex<float>>& Of(std::complex<float>) const { return c64; }
  const Routines<std::complex<double>>& Of(std::complex<double>) const { return c128; }
};

const Blas& FindBlas();

// One thread each: our own pool shares the work, because the threads of a BLAS spin while they wait for each other and
// starve everything else that wants the processors.
class OneThread {
 public:
  OneThread() : before_(FindBlas().set_threads == nullptr ? 0 : FindBlas().set_threads(1)) {}
  ~OneThread() {
    if (FindBlas().set_threads != nullptr) FindBlas().set_threads(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  const int before_;
};

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_BLAS_H_
