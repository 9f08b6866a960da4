// How loops that reduce columns are cut, and what of them is computed once.
#include <algorithm>

#include "cpu/run_loop.h"

namespace flagos::cpu {
namespace {

// Columns that only reductions read need no tile: rows of any length and distance are reduced where they stand.
void ReduceInPlace(Loop& loop) {
  const auto is_read = [&](int64_t reg) {
    const auto reads = [reg](const LoopBase::Step& step) { return step.a == reg || step.b == reg || step.c == reg; };
    return std::any_of(loop.steps.begin(), loop.steps.end(), reads) ||
           std::any_of(loop.fixed_steps.begin(), loop.fixed_steps.end(), reads);
  };
  for (size_t i = 0; i < loop.inputs.size(); ++i) {
    LoopBase::Input& input = loop.inputs[i];
    input.reduced_in_place = !input.fixed && input.strides.back() == 1 && !is_read(input.reg);
    for (LoopBase::Reduction& reduction : loop.reductions) {
      if (input.reduced_in_place && reduction.reg == input.reg) reduction.input = static_cast<int64_t>(i);
    }
  }
}

// Takes the steps that compute the same in all rows out of the others.
void FixSteps(Loop& loop) {
  std::vector<bool> fixed(loop.registers.size());
  std::vector<int> writers(loop.registers.size());
  for (const LoopBase::Constant& constant : loop.constants) fixed[static_cast<size_t>(constant.reg)] = true;
  for (const LoopBase::Array& array : loop.arrays) fixed[static_cast<size_t>(array.reg)] = true;
  for (LoopBase::Input& input : loop.inputs) {
    const auto last = input.strides.end() - 1;
    input.fixed = std::all_of(last - loop.num_reduced, last, [](int64_t stride) { return stride == 0; });
    if (input.fixed) fixed[static_cast<size_t>(input.reg)] = true;
  }
  for (const LoopBase::Step& step : loop.steps) ++writers[static_cast<size_t>(step.result)];
  std::vector<LoopBase::Step> varying;
  for (const LoopBase::Step& step : loop.steps) {
    const auto is_fixed = [&](int64_t reg) { return fixed[static_cast<size_t>(reg)]; };
    const bool is =
        writers[static_cast<size_t>(step.result)] == 1 && is_fixed(step.a) && is_fixed(step.b) && is_fixed(step.c);
    if (is) fixed[static_cast<size_t>(step.result)] = true;
    (is ? loop.fixed_steps : varying).push_back(step);
  }
  loop.steps = std::move(varying);
}

// What the accumulators of a tile of columns take stays in the first-level cache, and a run of columns is long enough.
constexpr int64_t kMaxColumns = 512, kMaxComputedColumns = 1024, kFewestColumns = 64;
// Rows that are reduced where they stand, in one block.
constexpr int64_t kBlockRows = 64;
// So many tasks are enough for threads, if each has this many points.
constexpr int64_t kEnoughTasks = 8, kTaskPoints = 1 << 14;

}  // namespace

void PlanColumns(Loop& loop, int64_t points) {
  const size_t rank = loop.dims.size();
  const int64_t inner = loop.dims.back(), rows = loop.dims[rank - 2], at_least_one = std::max<int64_t>(rows, 1);
  FixSteps(loop);
  ReduceInPlace(loop);
  loop.columns =
      std::max<int64_t>(1, std::min({inner, loop.tile, loop.steps.empty() ? kMaxColumns : kMaxComputedColumns}));
  // Few rows are reduced in one block: their accumulators then never leave the registers.
  if (!loop.steps.empty() && at_least_one * kFewestColumns <= loop.tile) {
    loop.columns = std::min(loop.columns, loop.tile / at_least_one / kFewestColumns * kFewestColumns);
  }
  loop.rows = loop.tile / loop.columns;
  const bool in_place = loop.steps.empty() && loop.iotas.empty() &&
                        std::all_of(loop.inputs.begin(), loop.inputs.end(),
                                    [](const LoopBase::Input& input) { return input.fixed || input.reduced_in_place; });
  const bool reduces_constants = std::any_of(loop.reductions.begin(), loop.reductions.end(),
                                             [](const LoopBase::Reduction& reduction) { return reduction.input < 0; });
  if (in_place && !reduces_constants) loop.rows = std::max(loop.rows, kBlockRows);
  loop.rows = std::max<int64_t>(1, std::min(loop.rows, rows));
  int64_t tiles = (inner + loop.columns - 1) / loop.columns, blocks = (rows + loop.rows - 1) / loop.rows;
  for (size_t d = 0; d < rank - 2; ++d) {
    (d + 1 < rank - static_cast<size_t>(loop.num_reduced) ? tiles : blocks) *= loop.dims[d];
  }
  if (tiles == 0 || blocks == 0) return;
  const int64_t wanted = std::min((kEnoughTasks + tiles - 1) / tiles, points / kTaskPoints);
  loop.segments = std::clamp<int64_t>(wanted, 1, blocks);
}

}  // namespace flagos::cpu
