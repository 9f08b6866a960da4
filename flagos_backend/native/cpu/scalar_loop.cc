// A loop over a single point: what the scalars of a program and the counters of its loops are computed with. Everything
// is resolved when the program is parsed, so that a run costs little more than its operations.
#include <algorithm>
#include <cstring>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

constexpr size_t kFewCells = 64;

}  // namespace

bool IsScalar(const Loop& loop) {
  return loop.mode == LoopMode::kMap && loop.arrays.empty() && loop.registers.size() <= kFewCells &&
         std::all_of(loop.dims.begin(), loop.dims.end(), [](int64_t size) { return size == 1; });
}

ScalarLoop MakeScalarLoop(const Loop& loop) {
  const auto move = [&](int64_t slot, int64_t reg, int64_t offset) {
    const int64_t bytes = TypeBytes(loop.registers[static_cast<size_t>(reg)]);
    return ScalarLoop::Move{slot, offset * bytes, reg, bytes};
  };
  ScalarLoop scalar;
  scalar.cells.assign(loop.registers.size(), 0);
  for (const Loop::Constant& constant : loop.constants) scalar.cells[static_cast<size_t>(constant.reg)] = constant.bits;
  for (const Loop::Iota& iota : loop.iotas) {
    const int64_t step = 0;
    iota.function(&scalar.cells[static_cast<size_t>(iota.reg)], &iota.offset, &step, nullptr, 1);
  }
  for (const Loop::Input& input : loop.inputs) scalar.loads.push_back(move(input.slot, input.reg, input.offset));
  for (const Loop::Output& output : loop.outputs) scalar.stores.push_back(move(output.slot, output.reg, output.offset));
  scalar.steps = loop.steps;
  return scalar;
}

void RunScalarLoop(const ScalarLoop& loop, char* const* slots) {
  int64_t cells[kFewCells];
  std::copy(loop.cells.begin(), loop.cells.end(), cells);
  for (const ScalarLoop::Move& load : loop.loads) {
    CopyElement(reinterpret_cast<char*>(&cells[load.cell]), slots[load.slot] + load.byte_offset, load.bytes);
  }
  for (const Loop::Step& step : loop.steps) {
    step.point(&cells[step.result], &cells[step.a], &cells[step.b], &cells[step.c], 1);
  }
  for (const ScalarLoop::Move& store : loop.stores) {
    CopyElement(slots[store.slot] + store.byte_offset, reinterpret_cast<const char*>(&cells[store.cell]), store.bytes);
  }
}

}  // namespace flagos::cpu
