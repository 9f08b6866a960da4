// Our own Fourier transforms of lines, for processes that have not loaded MKL: of any length, on one thread.
#ifndef FLAGOS_NATIVE_CPU_FOURIER_LINES_H_
#define FLAGOS_NATIVE_CPU_FOURIER_LINES_H_

#include <complex>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/fourier_kernels.h"

namespace flagos::cpu {

struct LinesOperands {
  const void* from;
  void* to;
  LineStrides read, written;
  int64_t lines;
};

// A transform of complex numbers, of one length, without scale. Either its stages are run, or with few lines it is one
// of the rows and columns of a matrix, or, where a prime factor is large, a convolution by longer transforms.
template <class T>
class LineTransform {
 public:
  explicit LineTransform(int64_t length);

  // Bytes that `Run` computes in.
  int64_t ScratchBytes() const;
  // From and to may be the same. `scratch`: aligned to 64.
  void Run(const LinesOperands& operands, bool inverse, T scale, char* scratch) const;

 private:
  void RunAsMatrix(const LinesOperands& operands, bool inverse, T scale, char* scratch) const;
  void RunConvolved(const LinesOperands& operands, bool inverse, T scale, char* scratch) const;

  const int64_t length_;
  Stages<T> stages_;
  // Of length rows * columns: transforms of columns, factors, transforms of rows.
  Stages<T> rows_, columns_;
  std::vector<std::complex<T>> factors_;
  // A convolution with a chirp (Bluestein).
  std::unique_ptr<LineTransform> padded_;
  std::vector<std::complex<T>> chirp_, filter_;
};

// Of one kind: complex numbers, or real ones along lines of `length`, which are contiguous.
class LinesPlan {
 public:
  virtual ~LinesPlan() = default;
  virtual int64_t ScratchBytes() const = 0;
  virtual void Run(const LinesOperands& operands, char* scratch) const = 0;
};

struct LinesKind {
  bool is_double, is_real, inverse;
  int64_t length;
  double scale;
};
std::unique_ptr<LinesPlan> PlanLines(const LinesKind& kind);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_FOURIER_LINES_H_
