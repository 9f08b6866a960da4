// Reads loops: what the parser checks here is why running them needs no checks.
#include <algorithm>

#include "cpu/parse.h"
#include "cpu/run_loop.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kMaxTile = 1024, kMinTile = 64;
constexpr int64_t kMaxBlock = 4096;  // of a tile that is a block of short rows, each of which costs more
// The registers of one lane that change from tile to tile, and all of them: they should stay in the first-level cache.
constexpr int64_t kVaryingBytes = 24 << 10, kAllBytes = 48 << 10;
// Whether the register holds the same everywhere, from before the first point on.
bool IsInvariant(const LoopBase& loop, int64_t reg) {
  return std::any_of(loop.inputs.begin(), loop.inputs.end(),
                     [&](const LoopBase::Input& input) { return input.reg == reg && input.invariant; }) ||
         std::any_of(loop.constants.begin(), loop.constants.end(),
                     [&](const LoopBase::Constant& constant) { return constant.reg == reg; }) ||
         std::any_of(loop.arrays.begin(), loop.arrays.end(),
                     [&](const LoopBase::Array& array) { return array.reg == reg; });
}

// How long the tiles of the registers that have one may be. A number is no tile.
int64_t GreatestTile(const LoopBase& loop, const std::vector<bool>& has_tile, int64_t most = kMaxTile) {
  int64_t bytes = 1, varying_bytes = 1;
  for (size_t i = 0; i < loop.registers.size(); ++i) {
    if (!has_tile[i]) continue;
    bytes += TypeBytes(loop.registers[i]);
    if (!loop.uniform[i]) varying_bytes += TypeBytes(loop.registers[i]);
  }
  const int64_t fitting = std::min(kVaryingBytes / varying_bytes, kAllBytes / bytes);
  return std::clamp(fitting / 64 * 64, kMinTile, most);
}

// A tile never crosses what it runs along, and what is longer than that is filled for nothing.
int64_t Within(int64_t tile, int64_t most) { return std::min(tile, std::max<int64_t>(most, 1)); }

// Marks the registers of which whole tiles are read.
void MarkTiles(const std::vector<LoopBase::Step>& steps, const std::vector<LoopBase::Output>& outputs,
               const std::vector<LoopBase::Reduction>& reductions, std::vector<bool>& read) {
  for (const LoopBase::Step& step : steps) {
    if ((step.numbers & 1) == 0) read[static_cast<size_t>(step.a)] = true;
    if ((step.numbers & 2) == 0) read[static_cast<size_t>(step.b)] = true;
    if ((step.numbers & 4) == 0) read[static_cast<size_t>(step.c)] = true;
  }
  for (const LoopBase::Output& output : outputs) read[static_cast<size_t>(output.reg)] = true;
  for (const LoopBase::Reduction& reduction : reductions) read[static_cast<size_t>(reduction.reg)] = true;
}

// The registers of which whole tiles are read or computed.
std::vector<bool> TilesOf(const Loop& loop) {
  std::vector<bool> has_tile(loop.registers.size());
  for (size_t i = 0; i < has_tile.size(); ++i) has_tile[i] = !loop.uniform[i];
  MarkTiles(loop.steps, loop.outputs, loop.reductions, has_tile);
  return has_tile;
}

// Sums of products that nothing else reads take the factors instead, if they are still there when the phase ends. Others
// that read them may be in later phases, of what is kept of a whole row, and may be products that are summed up themselves.
void ReduceProducts(const RowLoop& loop, RowLoop::Phase& phase) {
  const Kernels& kernels = SelectKernels();
  phase.unfolded_steps = phase.steps;
  for (Loop::Reduction& reduction : phase.reductions) {
    const size_t type = static_cast<size_t>(reduction.type);
    const ReduceProductsFunction reduce = kernels.reduce_products[type];
    if (reduction.combine != Combine::kAdd || reduce == nullptr) continue;
    if (loop.extents[static_cast<size_t>(reduction.reg)] != RowLoop::Extent::kTile) continue;
    const auto computes = [&](const Loop::Step& step) { return step.result == reduction.reg; };
    const auto step = std::find_if(phase.steps.begin(), phase.steps.end(), computes);
    if (step == phase.steps.end() || step->function != kernels.apply[static_cast<size_t>(Op::kMultiply)][type])
      continue;
    const auto is_taken = [&](const auto& other) { return other.reg == reduction.reg; };
    const auto disturbs = [&](const Loop::Step& other) {
      const int64_t reg = reduction.reg;
      return other.a == reg || other.b == reg || other.c == reg || other.result == reg || other.result == step->a ||
             other.result == step->b;
    };
    if (std::any_of(step + 1, phase.steps.end(), disturbs) || step->a == reduction.reg || step->b == reduction.reg ||
        std::any_of(phase.outputs.begin(), phase.outputs.end(), is_taken) ||
        std::count_if(phase.reductions.begin(), phase.reductions.end(), is_taken) != 1) {
      continue;
    }
    reduction.reduce_products = reduce;
    reduction.a = step->a;
    reduction.b = step->b;
    phase.unfolded_steps.erase(std::find_if(phase.unfolded_steps.begin(), phase.unfolded_steps.end(), computes));
  }
}

// A step may write its result straight to memory when it alone computes the register, one output takes it, that output
// is contiguous along the tile, and no later step reads what stood there.
bool IsInPlace(const LoopBase& loop, const std::vector<LoopBase::Step>& steps,
               const std::vector<LoopBase::Output>& outputs, const LoopBase::Output& output) {
  if (output.strides.empty() || output.strides.back() != 1) return false;
  const auto computes = [&](const LoopBase::Step& step) { return step.result == output.reg; };
  const auto stored = std::count_if(outputs.begin(), outputs.end(),
                                    [&](const LoopBase::Output& other) { return other.reg == output.reg; });
  if (std::count_if(steps.begin(), steps.end(), computes) != 1 || stored != 1) return false;
  const auto stands = [&](const auto& source, int64_t reg) { return source.reg == reg && source.slot == output.slot; };
  const auto overwritten = [&](int64_t reg) {
    return std::any_of(loop.inputs.begin(), loop.inputs.end(),
                       [&](const LoopBase::Input& input) { return stands(input, reg); }) ||
           std::any_of(loop.arrays.begin(), loop.arrays.end(),
                       [&](const LoopBase::Array& array) { return stands(array, reg); });
  };
  return std::none_of(
      std::find_if(steps.begin(), steps.end(), computes) + 1, steps.end(),
      [&](const LoopBase::Step& step) { return overwritten(step.a) || overwritten(step.b) || overwritten(step.c); });
}

// Arrays from here on are read again only after the second-level caches have lost them: then the lines that a store would
// bring from memory first, and push out later, cost more than they save.
constexpr int64_t kStreamedBytes = 8 << 20;
// A run that begins and ends within a line writes parts of it.
constexpr int64_t kStreamedRun = 512;

bool IsStreamed(const LoopBase& loop, const LoopBase::Output& output, int64_t slot_bytes, int64_t run) {
  if (slot_bytes < kStreamedBytes || output.strides.back() != 1) return false;
  const Type type = loop.registers[static_cast<size_t>(output.reg)];
  return run * TypeBytes(type) >= kStreamedRun &&
         std::none_of(loop.inputs.begin(), loop.inputs.end(),
                      [&](const LoopBase::Input& input) { return input.slot == output.slot; });
}

// How many elements of an output stand side by side.
int64_t ContiguousRun(const LoopBase& loop, const LoopBase::Output& output) {
  int64_t run = 1;
  for (size_t d = loop.dims.size(); d-- > 0 && (output.strides[d] == run || loop.dims[d] == 1);) run *= loop.dims[d];
  return run;
}

}  // namespace

std::vector<int64_t> Parser::ParseNumbers(size_t limit) {
  std::vector<int64_t> numbers(static_cast<size_t>(Count()));
  for (int64_t& number : numbers) {
    number = Word();
    Require(number >= 0 && number < static_cast<int64_t>(limit), "a number is out of range");
  }
  return numbers;
}

int64_t Parser::ParseDims(LoopBase& loop) {
  const int64_t rank = Count();
  Require(rank <= kMaxRank, "too many loop dimensions");
  int64_t points = 1;
  for (int64_t d = 0; d < rank; ++d) {
    loop.dims.push_back(Word());
    points = Times(points, loop.dims.back());
  }
  loop.num_reduced = Word();
  Require(loop.num_reduced >= 0 && loop.num_reduced <= rank, "wrong number of reduced dimensions");
  return points;
}

Loop Parser::ParseLoop() {
  Loop loop;
  const int64_t mode = Word();
  Require(mode == 0 || mode == 1, "unknown loop mode");
  loop.mode = static_cast<LoopMode>(mode);
  const bool columns = loop.mode == LoopMode::kColumns;
  const int64_t points = ParseDims(loop);
  Require((loop.num_reduced > 0) == columns && (!columns || loop.num_reduced < static_cast<int64_t>(loop.dims.size())),
          "wrong number of reduced dimensions");
  const int64_t num_registers = Count();
  Require(num_registers > 0, "a loop without registers");
  for (int64_t i = 0; i < num_registers; ++i) loop.registers.push_back(ParseType());
  ParseSources(loop);
  for (int64_t i = 0; i < num_registers; ++i) loop.uniform.push_back(IsInvariant(loop, i));
  const size_t rank = loop.dims.size();
  int64_t run = rank == 0 ? 1 : loop.dims.back();
  if (columns) run = Times(run, loop.dims[rank - 2]);
  const int64_t* const steps = next_;
  loop.steps = ParseSteps(loop);
  loop.reductions = ParseReductions(loop);
  Require(loop.reductions.empty() != columns, "reductions and loop mode disagree");
  for (const Loop::Reduction& reduction : loop.reductions) {
    Require(IsInvariant(loop, reduction.initial), "a reduction begins with what varies");
  }
  std::vector<int64_t> kept(loop.dims.begin(), loop.dims.end() - loop.num_reduced);
  if (columns) kept.back() = loop.dims.back();
  loop.outputs = ParseOutputs(loop, kept);
  const int64_t greatest_tile = GreatestTile(loop, TilesOf(loop));
  loop.tile = Within(greatest_tile, run);
  if (!columns) {
    for (Loop::Output& output : loop.outputs) {
      output.streamed = rank > 0 && IsStreamed(loop, output, SlotBytes(output.slot), loop.dims.back());
      loop.streams |= output.streamed;
    }
    ChooseBox(loop, greatest_tile, loop.streams);
    loop.streams = loop.streams && loop.box.empty();
    if (loop.box.empty()) ReadNumbersOfRows(loop, steps);
    for (Loop::Output& output : loop.outputs) {
      output.streamed = output.streamed && loop.box.empty();
      output.in_place = !output.streamed && IsInPlace(loop, loop.steps, loop.outputs, output);
    }
  }
  if (columns) PlanColumns(loop, points);
  loop.lane_bytes = 64 + loop.reductions.size() * static_cast<size_t>(loop.columns * 8 + 64);
  for (Type type : loop.registers) loop.lane_bytes += static_cast<size_t>(loop.tile * TypeBytes(type) + 64);
  loop.work = Times(points, static_cast<int64_t>(1 + loop.steps.size() + loop.reductions.size()));
  return loop;
}

// Where a tile lies within a row, inputs that are the same in all of one are read as numbers. steps: their bytecode.
void Parser::ReadNumbersOfRows(Loop& loop, const int64_t* steps) {
  const auto is_number = [](const Loop::Input& input) { return !input.strides.empty() && input.strides.back() == 0; };
  if (std::none_of(loop.inputs.begin(), loop.inputs.end(), is_number)) return;
  for (const Loop::Input& input : loop.inputs) {
    if (is_number(input)) loop.uniform[static_cast<size_t>(input.reg)] = true;
  }
  std::swap(next_, steps);
  loop.steps = ParseSteps(loop);
  std::swap(next_, steps);
  const std::vector<bool> has_tile = TilesOf(loop);
  for (Loop::Input& input : loop.inputs)
    input.is_number = is_number(input) && !has_tile[static_cast<size_t>(input.reg)];
  loop.tile = Within(GreatestTile(loop, has_tile), loop.dims.back());
}

RowLoop Parser::ParseRowLoop() {
  RowLoop loop;
  const int64_t points = ParseDims(loop);
  Require(loop.num_reduced > 0, "wrong number of reduced dimensions");
  loop.row = 1;
  for (size_t d = loop.dims.size() - static_cast<size_t>(loop.num_reduced); d < loop.dims.size(); ++d) {
    loop.row *= loop.dims[d];
  }
  loop.in_blocks = loop.row > 0 && loop.row <= kMaxBlockRow && points > loop.row;
  const int64_t num_registers = Count();
  int64_t row_bytes = 0;
  for (int64_t i = 0; i < num_registers; ++i) {
    loop.registers.push_back(ParseType());
    const int64_t extent = Word();
    Require(extent >= 0 && extent <= 3, "unknown extent of a register");
    loop.extents.push_back(static_cast<RowLoop::Extent>(extent));
    if (loop.extents.back() == RowLoop::Extent::kRow) {
      loop.row_registers.push_back(i);
      row_bytes += Times(loop.row, TypeBytes(loop.registers.back()));
    }
  }
  Require(num_registers > 0, "a loop without registers");
  ParseSources(loop);
  std::vector<bool> has_tile;
  for (int64_t i = 0; i < num_registers; ++i) {
    const RowLoop::Extent extent = loop.extents[static_cast<size_t>(i)];
    const bool in_row = extent == RowLoop::Extent::kTile || extent == RowLoop::Extent::kRow;
    loop.uniform.push_back(loop.in_blocks ? IsInvariant(loop, i) : !in_row);
    has_tile.push_back(loop.in_blocks ? in_row : extent == RowLoop::Extent::kTile);
  }
  const auto row_invariant = [&](const std::vector<int64_t>& strides) {
    return std::all_of(strides.end() - loop.num_reduced, strides.end(), [](int64_t s) { return s == 0; });
  };
  const auto require_tile = [&](int64_t reg) {
    const RowLoop::Extent extent = loop.extents[static_cast<size_t>(reg)];
    Require(extent == RowLoop::Extent::kTile || extent == RowLoop::Extent::kScalar, "a source needs a tile");
  };
  for (const Loop::Constant& constant : loop.constants) require_tile(constant.reg);
  for (const Loop::Array& array : loop.arrays) require_tile(array.reg);
  for (size_t i = 0; i < loop.inputs.size(); ++i) {
    Loop::Input& input = loop.inputs[i];
    require_tile(input.reg);
    input.fixed = row_invariant(input.strides);
    if (!input.invariant && input.fixed) loop.row_inputs.push_back(static_cast<int64_t>(i));
  }
  for (size_t i = 0; i < loop.iotas.size(); ++i) {
    require_tile(loop.iotas[i].reg);
    loop.iotas[i].fixed = row_invariant(loop.iotas[i].coefficients);
    if (loop.iotas[i].fixed) loop.row_iotas.push_back(static_cast<int64_t>(i));
  }
  int64_t operations = 1;
  for (int64_t i = Count(); i > 0; --i) {
    loop.phases.push_back(ParsePhase(loop));
    const RowLoop::Phase& phase = loop.phases.back();
    operations += static_cast<int64_t>(phase.steps.size() + phase.reductions.size());
    loop.max_reductions = std::max(loop.max_reductions, phase.reductions.size());
  }
  loop.work = Times(points, operations);
  for (const RowLoop::Phase& phase : loop.phases) MarkTiles(phase.steps, phase.outputs, phase.reductions, has_tile);
  for (RowLoop::Phase& phase : loop.phases) {
    const auto is_number = [&](int64_t reg) { return !has_tile[static_cast<size_t>(reg)]; };
    phase.broadcasts.erase(std::remove_if(phase.broadcasts.begin(), phase.broadcasts.end(), is_number),
                           phase.broadcasts.end());
  }
  if (loop.in_blocks) {
    ChooseBlock(loop, GreatestTile(loop, has_tile, kMaxBlock));
  } else {
    loop.tile = Within(GreatestTile(loop, has_tile), loop.dims.back());
  }
  // Every register and the accumulators are aligned to 64 bytes.
  int64_t lane_bytes = 64 + static_cast<int64_t>(loop.max_reductions) * 64 + 64;
  Require(!__builtin_add_overflow(lane_bytes, row_bytes, &lane_bytes), "a row is too long");
  // A block's registers hold a tile and what they are in each row.
  for (Type type : loop.registers) lane_bytes += (loop.tile + loop.rows) * TypeBytes(type) + 128;
  lane_bytes += loop.rows * 8;
  loop.lane_bytes = static_cast<size_t>(lane_bytes);
  return loop;
}

RowLoop::Phase Parser::ParsePhase(RowLoop& loop) {
  RowLoop::Phase phase;
  phase.scalar_steps = ParseSteps(loop);
  phase.scalar_outputs = ParseOutputs(loop, {loop.dims.begin(), loop.dims.end() - loop.num_reduced});
  phase.broadcasts = ParseNumbers(loop.registers.size());
  phase.inputs = ParseNumbers(loop.inputs.size());
  phase.iotas = ParseNumbers(loop.iotas.size());
  phase.steps = ParseSteps(loop);
  phase.outputs = ParseOutputs(loop, loop.dims);
  phase.reductions = ParseReductions(loop);
  const auto extent = [&](int64_t reg) { return loop.extents[static_cast<size_t>(reg)]; };
  const auto has_tile = [&](int64_t reg) { return extent(reg) != RowLoop::Extent::kSingle; };
  bool tiles = std::all_of(phase.broadcasts.begin(), phase.broadcasts.end(), has_tile);
  for (const int64_t reg : phase.broadcasts) Require(!IsArray(loop, reg), "an array is filled");
  for (const Loop::Step& step : phase.steps) {
    tiles = tiles && has_tile(step.result) && has_tile(step.a) && has_tile(step.b) && has_tile(step.c);
  }
  for (const Loop::Output& output : phase.outputs) tiles = tiles && has_tile(output.reg);
  for (const Loop::Reduction& reduction : phase.reductions) tiles = tiles && has_tile(reduction.reg);
  Require(tiles, "a register of one element is used as a tile");
  for (Loop::Output& output : phase.outputs) {
    const int64_t run = loop.in_blocks ? ContiguousRun(loop, output) : loop.dims.back();
    output.streamed = IsStreamed(loop, output, SlotBytes(output.slot), run);
    output.in_place = !output.streamed && extent(output.reg) == RowLoop::Extent::kTile &&
                      IsInPlace(loop, phase.steps, phase.outputs, output);
    loop.streams |= output.streamed;
  }
  ReduceProducts(loop, phase);
  return phase;
}

void Parser::ParseSources(LoopBase& loop) {
  for (int64_t i = Count(); i > 0; --i) {
    Loop::Input input;
    input.slot = ReadableSlot();
    input.reg = Register(loop);
    input.offset = Word();
    input.strides = ParseStrides(loop.dims.size());
    input.invariant = std::all_of(input.strides.begin(), input.strides.end(), [](int64_t s) { return s == 0; });
    CheckAccess(input.slot, TypeOf(loop, input.reg), input.offset, loop.dims, input.strides);
    loop.inputs.push_back(std::move(input));
  }
  for (int64_t i = Count(); i > 0; --i) {
    const int64_t reg = Register(loop);
    loop.constants.push_back({reg, Word()});
  }
  for (int64_t i = Count(); i > 0; --i) {
    const int64_t reg = Register(loop);
    const int64_t offset = Word();
    const TileFunction function = SelectKernels().iota[static_cast<int>(TypeOf(loop, reg))];
    Require(function != nullptr, "positions of this type do not exist");
    loop.iotas.push_back({reg, offset, ParseStrides(loop.dims.size()), function});
  }
  for (int64_t i = Count(); i > 0; --i) {
    const int64_t slot = ReadableSlot();
    const int64_t reg = Register(loop);
    Require(!IsSource(loop, reg), "an array in the register of another source");
    Require(SlotBytes(slot) >= TypeBytes(TypeOf(loop, reg)), "an array without elements");
    loop.arrays.push_back({slot, reg});
  }
}

std::vector<Loop::Output> Parser::ParseOutputs(const LoopBase& loop, const std::vector<int64_t>& dims) {
  std::vector<Loop::Output> outputs;
  for (int64_t i = Count(); i > 0; --i) {
    Loop::Output output;
    output.slot = WritableSlot();
    output.reg = Register(loop);
    output.offset = Word();
    output.strides = ParseStrides(dims.size());
    Require(!IsArray(loop, output.reg), "an array is stored");
    CheckAccess(output.slot, TypeOf(loop, output.reg), output.offset, dims, output.strides);
    outputs.push_back(std::move(output));
  }
  return outputs;
}

}  // namespace flagos::cpu
