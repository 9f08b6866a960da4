// The calls of an iteration, with the places of their operands found.
#include "cpu/iteration.h"

namespace flagos::cpu {

Iteration::Iteration(const IterationPlan& plan, char* const* slots, char* cells, const OtherSteps& others) {
  const auto find = [&](const IterationPlan::Place& place) {
    return (place.slot == IterationPlan::kCells ? cells : slots[place.slot]) + place.offset;
  };
  calls_.reserve(plan.calls.size());
  for (const IterationPlan::Call& call : plan.calls) {
    if (call.function == nullptr) {
      calls_.push_back({others.run, others.runner, others.runner, nullptr, nullptr, call.step});
    } else {
      calls_.push_back({call.function, find(call.result), find(call.a), find(call.b), find(call.c), call.n});
    }
  }
}

}  // namespace flagos::cpu
