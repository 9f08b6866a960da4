// A program that runs again and again over the same memory, as the body of a loop does: the calls of kernels that its steps
// come to. Where their operands are is found once before the first iteration, so that an iteration costs little more
// than they do.
#ifndef FLAGOS_NATIVE_CPU_ITERATION_H_
#define FLAGOS_NATIVE_CPU_ITERATION_H_

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

namespace flagos::cpu {

// What all iterations of a program have in common.
struct IterationPlan {
  struct Place {
    int64_t slot = kCells, offset = 0;  // in bytes
  };
  static constexpr int64_t kCells = -1;  // memory of the plan's own
  struct Call {
    TileFunction function;  // nullptr: the step is none for kernels, and runs as it does elsewhere
    Place result, a, b, c;
    int64_t n;
    int64_t step;
  };
  std::vector<Call> calls;
  std::vector<char> cells;  // what they hold in the beginning
};

// The calls of a plan over certain memory, which has to stay where it is.
class Iteration {
 public:
  // What runs the steps that are none for kernels: run(runner, ..., number of the step).
  struct OtherSteps {
    TileFunction run;
    void* runner;
  };
  Iteration(const IterationPlan& plan, char* const* slots, char* cells, const OtherSteps& others);

  void Run() const {
    const Call* call = calls_.data();
    const Call* const end = call + calls_.size();
    // Apart in the code, because a processor predicts best what always goes to one place.
    for (; end - call >= 16; call += 16) MakeAll<16>(call);
    if (end - call >= 8) MakeAll<8>(call), call += 8;
    if (end - call >= 4) MakeAll<4>(call), call += 4;
    if (end - call >= 2) MakeAll<2>(call), call += 2;
    if (call != end) MakeAll<1>(call);
  }

 private:
  struct Call {
    TileFunction function;
    void* result;
    const void *a, *b, *c;
    int64_t n;
  };
  template <int kCalls>
  static void MakeAll(const Call* call) {
#pragma GCC unroll 16
    for (int i = 0; i < kCalls; ++i) call[i].function(call[i].result, call[i].a, call[i].b, call[i].c, call[i].n);
  }

  std::vector<Call> calls_;
};

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_ITERATION_H_
