// Discrete Fourier transforms of the last dimensions of an array, by MKL's functions where PyTorch was imported before the
// process's first one and has them, else by our own.
#ifndef FLAGOS_NATIVE_CPU_FOURIER_H_
#define FLAGOS_NATIVE_CPU_FOURIER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/fourier_lines.h"

namespace flagos::cpu {

// One dimension is transformed in each pass: an inverse divides by all lengths in its last pass.
struct Fourier {
  // As HLO numbers them. Real ones have n / 2 + 1 complex numbers for n real ones along the last dimension.
  enum class Kind : int64_t { kComplex, kComplexInverse, kReal, kRealInverse };
  static constexpr int64_t kNumKinds = 4;
  static constexpr int64_t kMaxRank = 3;

  // Lines of one length, `outer` times `lines`, which are cut into blocks by shape alone.
  struct Pass {
    std::shared_ptr<void> block, rest;     // committed descriptors of MKL: of a block, and of what is left of `lines`
    std::shared_ptr<const LinesPlan> own;  // without MKL, for any number of lines
    LineStrides read, written;             // of our own
    bool forward;
    int64_t outer, lines, block_lines;
    int64_t from, to;              // slots
    int64_t from_outer, to_outer;  // bytes from one of `outer` to the next
    int64_t from_line, to_line;    // bytes from one line to the next
    int64_t work;                  // operations on elements

    int64_t blocks() const { return (lines + block_lines - 1) / block_lines; }
  };

  Kind kind;
  bool is_double;
  int64_t batch;
  std::vector<int64_t> lengths;     // of the dimensions, as real numbers have them
  int64_t source, target, scratch;  // slots; scratch: -1 where no pass needs it
  std::vector<Pass> passes;

  bool is_inverse() const { return kind == Kind::kComplexInverse || kind == Kind::kRealInverse; }
  bool is_real() const { return kind == Kind::kReal || kind == Kind::kRealInverse; }
  // Whether leading dimensions are transformed before the last one, in scratch of the source's size.
  bool needs_scratch() const { return kind == Kind::kRealInverse && lengths.size() > 1; }
};

// Decides on the passes of a step that has everything else. False: the library refuses one.
bool PlanFourier(Fourier* step);

// Operations on elements, to decide on threads.
int64_t WorkOf(const Fourier& step);

void RunFourier(const Fourier& step, char* const* slots);

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_FOURIER_H_
