// Fourier transforms of several lines side by side, a line in each lane of vectors. Compiled once for each instruction
// set.
#ifndef FLAGOS_NATIVE_CPU_FOURIER_KERNELS_H_
#define FLAGOS_NATIVE_CPU_FOURIER_KERNELS_H_

#include <complex>
#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

namespace flagos::cpu {

// A transform of one length as stages of small ones (Stockham's form, decimation in frequency): each stage divides the
// length by its radix and leaves the results in order.
template <class T>
struct Stages {
  int64_t length = 0;
  std::vector<int64_t> radices;
  std::vector<std::complex<T>> twiddles;  // stage after stage, [rest, radix - 1]
  std::vector<std::complex<T>> roots;     // stage after stage, `radix` of each
};

// Where lines stand, in complex numbers.
struct LineStrides {
  int64_t element, line;
};

template <class T>
struct LanesJob {
  const Stages<T>* stages;
  const std::complex<T>* from;
  std::complex<T>* to;
  LineStrides read, written;
  int64_t lines;
  // An inverse transform is a forward one between exchanges of real and imaginary parts.
  bool exchange_read, exchange_written;
  T scale;
  const std::complex<T>* factors;  // of results, [length, lines], or null
  char* scratch;                   // of ScratchOfLanes bytes, aligned to 64
};

// The largest vectors' lanes of two parts, twice: a stage reads one half and writes the other.
template <class T>
constexpr int64_t ScratchOfLanes(int64_t length) {
  return length * 2 * 64 * 2;
}

template <class T>
struct FourierKernelsOf {
  void (*lanes)(const LanesJob<T>& job);
  // The transform of 2 n real numbers in place, of n + 1 complex numbers, from that of n complex ones which they were
  // read as; roots: exp(-2 pi i k / 2n), k <= n / 2.
  void (*to_real)(std::complex<T>* line, int64_t n, const std::complex<T>* roots);
  // Back: n complex numbers whose inverse transform without scale is that of 2 n real ones.
  void (*from_real)(const std::complex<T>* from, std::complex<T>* to, int64_t n, const std::complex<T>* roots);
};
struct FourierKernels {
  int64_t vector_bytes;
  FourierKernelsOf<float> f32;
  FourierKernelsOf<double> f64;

  const FourierKernelsOf<float>& Of(float) const { return f32; }
  const FourierKernelsOf<double>& Of(double) const { return f64; }
};

namespace baseline {
extern const FourierKernels kFourierKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const FourierKernels kFourierKernels;
}
namespace avx512 {
extern const FourierKernels kFourierKernels;
}
#endif
const FourierKernels& SelectFourierKernels();

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_FOURIER_KERNELS_H_
