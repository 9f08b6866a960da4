// A program that runs again and again over the same memory, as the body of a loop does: the calls of kernels that its steps
// come to. Where their operands are is found once before the first trip, so that a trip costs little more than they do.
#ifndef FLAGOS_NATIVE_CPU_TRIP_H_
#define FLAGOS_NATIVE_CPU_TRIP_H_

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

namespace flagos::cpu {

// What all trips of a program have in common.
struct TripPlan {
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
class Trip {
 public:
  // What runs the steps that are none for kernels: run(runner, ..., number of the step).
  struct OtherSteps {
    TileFunction run;
    void* runner;
  };
  Trip(const TripPlan& plan, char* const* slots, char* cells, const OtherSteps& others);

  void Run() const {
    for (const Call& call : calls_) call.function(call.result, call.a, call.b, call.c, call.n);
  }

 private:
  struct Call {
    TileFunction function;
    void* result;
    const void *a, *b, *c;
    int64_t n;
  };
  std::vector<Call> calls_;
};

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_TRIP_H_
