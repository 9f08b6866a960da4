// Loops over rows: everything about a row is done while it is in the cache.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// A running reduction. Of a compensated sum, `lost` is what rounding took from it so far.
struct Accumulator {
  alignas(8) char value[8];
  double lost;
};

class RowLane {
 public:
  RowLane(const RowLoop& loop, char* const* slots)
      : loop_(loop), slots_(slots), tiles_(loop.lane_bytes, loop.registers.size(), loop.dims.size()) {
    for (size_t i = 0; i < loop.registers.size(); ++i) {
      const RowLoop::Extent extent = loop.extents[i];
      const int64_t elements = extent == RowLoop::Extent::kRow      ? loop.row
                               : extent == RowLoop::Extent::kSingle ? 1
                                                                    : loop.tile;
      tiles_.buffer[i] = tiles_.place[i] = tiles_.Take(elements * TypeBytes(loop.registers[i]));
    }
    accumulators_ =
        reinterpret_cast<Accumulator*>(tiles_.Take(static_cast<int64_t>(loop.max_reductions * sizeof(Accumulator))));
    FillInvariant(loop, slots, tiles_);
    int64_t bytes = 0;  // of all arrays, at a point
    for (const Loop::Input& input : loop.inputs) bytes += Bytes(input.reg);
    for (const RowLoop::Phase& phase : loop.phases) {
      for (const Loop::Output& output : phase.outputs) bytes += Bytes(output.reg);
    }
    looks_ahead_ =
        loop.num_reduced == 1 && loop.dims.size() > 1 && Product(loop.dims, 0, loop.dims.size()) * bytes >= Ahead::kFar;
  }

  void Run(int64_t begin, int64_t end) {
    const size_t kept = loop_.dims.size() - static_cast<size_t>(loop_.num_reduced);
    SetIndex(tiles_.index, begin, loop_.dims, 0, kept);
    for (int64_t row = begin; row < end; ++row, Advance(tiles_.index, loop_.dims, 0, kept)) {
      for (const int64_t i : loop_.row_inputs) {
        const Loop::Input& input = loop_.inputs[Index(i)];
        std::memcpy(tiles_.buffer[Index(input.reg)], Address(input), static_cast<size_t>(Bytes(input.reg)));
      }
      for (const int64_t i : loop_.row_iotas) ComputeIota(loop_.iotas[Index(i)], 1);
      if (looks_ahead_) LookAhead();
      for (const RowLoop::Phase& phase : loop_.phases) RunPhase(phase);
    }
    if (loop_.streams) FlushStreams();
  }

 private:
  static size_t Index(int64_t reg) { return static_cast<size_t>(reg); }
  int64_t Bytes(int64_t reg) const { return TypeBytes(loop_.registers[Index(reg)]); }

  // Of an input's or an output's element at the index.
  template <class Access>
  char* Address(const Access& access) const {
    int64_t offset = access.offset;
    for (size_t d = 0; d < access.strides.size(); ++d) offset += tiles_.index[d] * access.strides[d];
    return slots_[Index(access.slot)] + offset * Bytes(access.reg);
  }

  // What the next row reads and writes, as far as it is contiguous.
  void LookAhead() {
    const size_t rank = loop_.dims.size();
    const auto add = [&](const auto& access) {
      if (access.strides[rank - 1] != 1 || access.strides[rank - 2] == 0) return;
      const int64_t bytes = Bytes(access.reg);
      ahead_.Add(Address(access) + access.strides[rank - 2] * bytes, loop_.row * bytes);
    };
    ahead_.Clear();
    for (const Loop::Input& input : loop_.inputs) add(input);
    int64_t steps = 0;
    for (const RowLoop::Phase& phase : loop_.phases) {
      for (const Loop::Output& output : phase.outputs) {
        if (!output.streamed) add(output);
      }
      steps += static_cast<int64_t>(phase.unfolded_steps.size() + phase.reductions.size());
    }
    ahead_.Start(steps * ((loop_.row + loop_.tile - 1) / loop_.tile));
  }

  void ComputeIota(const Loop::Iota& iota, int64_t n) {
    int64_t start = iota.offset;
    for (size_t d = 0; d < loop_.dims.size(); ++d) start += tiles_.index[d] * iota.coefficients[d];
    iota.function(tiles_.buffer[Index(iota.reg)], &start, &iota.coefficients.back(), nullptr, n);
  }

  void Compute(const std::vector<Loop::Step>& steps, int64_t n) {
    char** const place = tiles_.place;
    for (const Loop::Step& step : steps) {
      ahead_.Step();
      step.function(place[Index(step.result)], place[Index(step.a)], place[Index(step.b)], place[Index(step.c)], n);
    }
  }

  void RunPhase(const RowLoop::Phase& phase) {
    Compute(phase.scalar_steps, 1);
    for (const Loop::Output& output : phase.scalar_outputs) {
      std::memcpy(Address(output), tiles_.buffer[Index(output.reg)], static_cast<size_t>(Bytes(output.reg)));
    }
    for (const int64_t reg : phase.broadcasts) {
      char* const buffer = tiles_.buffer[Index(reg)];
      Gather(buffer, buffer, 0, loop_.tile, Bytes(reg));
    }
    if (phase.outputs.empty() && phase.reductions.empty()) return;
    for (size_t r = 0; r < phase.reductions.size(); ++r) Start(phase.reductions[r], accumulators_[r]);
    const size_t rank = loop_.dims.size(), kept = rank - static_cast<size_t>(loop_.num_reduced);
    const int64_t inner = loop_.dims.back();
    int64_t done = 0;  // elements of the row
    for (; done < loop_.row; Advance(tiles_.index, loop_.dims, kept, rank - 1)) {
      for (int64_t start = 0; start < inner; start += loop_.tile) {
        const int64_t n = std::min(loop_.tile, inner - start);
        tiles_.index[rank - 1] = start;
        RunTile(phase, done, n);
        done += n;
      }
    }
    for (size_t r = 0; r < phase.reductions.size(); ++r) Finish(phase.reductions[r], accumulators_[r]);
    std::fill_n(tiles_.index + kept, rank - kept, 0);
  }

  void RunTile(const RowLoop::Phase& phase, int64_t position, int64_t n) {
    for (const int64_t reg : loop_.row_registers) {
      tiles_.place[Index(reg)] = tiles_.buffer[Index(reg)] + position * Bytes(reg);
    }
    for (const int64_t i : phase.inputs) {
      const Loop::Input& input = loop_.inputs[Index(i)];
      if (input.strides.back() == 1) {
        tiles_.place[Index(input.reg)] = Address(input);
      } else {
        Gather(tiles_.buffer[Index(input.reg)], Address(input), input.strides.back(), n, Bytes(input.reg));
      }
    }
    for (const int64_t i : phase.iotas) ComputeIota(loop_.iotas[Index(i)], n);
    for (const Loop::Output& output : phase.outputs) {
      if (output.in_place) tiles_.place[Index(output.reg)] = Address(output);
    }
    Compute(phase.unfolded_steps, n);
    for (size_t r = 0; r < phase.reductions.size(); ++r) {
      ahead_.Step();
      ReduceTile(phase.reductions[r], accumulators_[r], n);
    }
    for (const Loop::Output& output : phase.outputs) {
      char*& place = tiles_.place[Index(output.reg)];
      if (output.in_place) {
        place = tiles_.buffer[Index(output.reg)];
      } else if (output.streamed) {
        Stream(Address(output), place, n * Bytes(output.reg));
      } else {
        Scatter(Address(output), place, output.strides.back(), n, Bytes(output.reg));
      }
    }
  }

  void Start(const Loop::Reduction& reduction, Accumulator& accumulator) {
    const char* const initial = tiles_.buffer[Index(reduction.initial)];
    if (reduction.widen != nullptr) {
      reduction.widen(accumulator.value, initial, nullptr, nullptr, 1);
    } else {
      std::memcpy(accumulator.value, initial, static_cast<size_t>(TypeBytes(reduction.type)));
    }
    accumulator.lost = 0.0;
  }

  void ReduceTile(const Loop::Reduction& reduction, Accumulator& accumulator, int64_t n) {
    if (reduction.reduce_products != nullptr) {
      const char* const a = tiles_.place[Index(reduction.a)];
      return reduction.reduce_products(accumulator.value, a, tiles_.place[Index(reduction.b)], n);
    }
    const char* const values = tiles_.place[Index(reduction.reg)];
    if (!reduction.compensated) return reduction.reduce(accumulator.value, values, n);
    double part = 0.0;
    reduction.reduce(&part, values, n);
    // Knuth's exact sum: total + part = sum + error.
    double total;
    std::memcpy(&total, accumulator.value, sizeof total);
    const double sum = total + part, taken = sum - total;
    accumulator.lost += (total - (sum - taken)) + (part - taken);
    std::memcpy(accumulator.value, &sum, sizeof sum);
  }

  void Finish(const Loop::Reduction& reduction, Accumulator& accumulator) {
    char* const to = tiles_.buffer[Index(reduction.result)];
    if (reduction.narrow != nullptr) return reduction.narrow(to, accumulator.value, nullptr, nullptr, 1);
    std::memcpy(to, accumulator.value, static_cast<size_t>(TypeBytes(reduction.type)));
    if (!reduction.compensated || !std::isfinite(accumulator.lost)) return;
    double sum;
    std::memcpy(&sum, to, sizeof sum);
    sum += accumulator.lost;
    std::memcpy(to, &sum, sizeof sum);
  }

  const RowLoop& loop_;
  char* const* slots_;
  Tiles tiles_;
  Ahead ahead_;
  bool looks_ahead_;
  Accumulator* accumulators_;  // of each reduction of a phase
};

}  // namespace

void RunRowLoop(const RowLoop& loop, char* const* slots) {
  if (loop.in_blocks) return RunRowBlockLoop(loop, slots);
  struct Job {
    const RowLoop* loop;
    char* const* slots;
  } job{&loop, slots};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& work = *static_cast<Job*>(user);
    if (begin < end) RowLane(*work.loop, work.slots).Run(begin, end);
  };
  RunTasks(Product(loop.dims, 0, loop.dims.size() - static_cast<size_t>(loop.num_reduced)), loop.work, body, &job);
}

}  // namespace flagos::cpu
