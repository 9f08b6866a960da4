// Loops over short rows: a tile holds a block of them, so that a call of an operation works on many.
#include <algorithm>
#include <cstring>

#include "cpu/box.h"
#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// Rows that are reduced at once, and those of which any block begins where a line of memory does.
constexpr int64_t kGroup = 8, kAligned = 16;

class RowBlockLane {
 public:
  RowBlockLane(const RowLoop& loop, char* const* slots)
      : loop_(loop),
        slots_(slots),
        kept_(loop.dims.size() - static_cast<size_t>(loop.num_reduced)),
        tiles_(loop.lane_bytes, 2 * loop.registers.size(), 4 * loop.dims.size() + kept_ + loop.iotas.size()),
        box_(loop.dims, loop.box, tiles_.index),
        filled_(tiles_.index + 3 * loop.dims.size()),
        row_dense_(filled_ + loop.dims.size()),
        starts_(row_dense_ + kept_),
        loaded_(loop.inputs.size()) {
    for (size_t i = 0; i < loop.registers.size(); ++i) {
      const RowLoop::Extent extent = loop.extents[i];
      const int64_t bytes = TypeBytes(loop.registers[i]);
      if (extent != RowLoop::Extent::kSingle) tiles_.buffer[i] = tiles_.place[i] = tiles_.Take(loop.tile * bytes);
      const bool has_values =
          !loop.uniform[i] && (extent == RowLoop::Extent::kScalar || extent == RowLoop::Extent::kSingle);
      tiles_.buffer[loop.registers.size() + i] = has_values ? tiles_.Take(loop.rows * bytes) : tiles_.buffer[i];
    }
    accumulators_ = tiles_.Take(loop.rows * 8);
    FillInvariant(loop, slots, tiles_);
    for (const Loop::Array& array : loop.arrays) {
      tiles_.buffer[loop.registers.size() + Index(array.reg)] = tiles_.buffer[Index(array.reg)];
    }
    int64_t bytes = 0;  // of all arrays, at a point
    for (const Loop::Input& input : loop.inputs) bytes += input.fixed ? 0 : Bytes(input.reg);
    for (const RowLoop::Phase& phase : loop.phases) {
      for (const Loop::Output& output : phase.outputs) bytes += Bytes(output.reg);
      calls_ += static_cast<int64_t>(phase.scalar_steps.size() + phase.steps.size() + phase.reductions.size());
    }
    looks_ahead_ = calls_ > 1 && Product(loop.dims, 0, loop.dims.size()) * bytes >= Ahead::kFar;
  }

  void Run(int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      box_.Set(task);
      rows_ = box_.elements / loop_.row;
      for (size_t d = 0; d < kept_; ++d) row_dense_[d] = box_.dense[d] / loop_.row;
      const bool alike = std::equal(filled_, filled_ + loop_.dims.size(), box_.extents);
      ahead_.Clear();
      for (size_t i = 0; i < loop_.inputs.size(); ++i) Load(i, alike);
      for (size_t i = 0; i < loop_.iotas.size(); ++i) Count(i, alike);
      std::copy_n(box_.extents, loop_.dims.size(), filled_);
      ahead_.Start(calls_);
      for (const RowLoop::Phase& phase : loop_.phases) RunPhase(phase);
    }
    if (loop_.streams) FlushStreams();
  }

 private:
  static size_t Index(int64_t reg) { return static_cast<size_t>(reg); }
  int64_t Bytes(int64_t reg) const { return TypeBytes(loop_.registers[Index(reg)]); }
  // Where there is one element of a register for each row.
  char* Values(int64_t reg) const { return tiles_.buffer[loop_.registers.size() + Index(reg)]; }

  template <class Access>
  char* Address(const Access& access) const {
    return slots_[Index(access.slot)] + box_.Offset(access.offset, access.strides) * Bytes(access.reg);
  }

  // alike: the block before had as many elements along each dimension. What is read from the same place is still there.
  void Load(size_t number, bool alike) {
    const Loop::Input& input = loop_.inputs[number];
    if (input.invariant) return;
    const char* const from = Address(input);
    if (input.fixed) {
      if (alike && loaded_[number] == from) return;
      box_.Between(row_dense_, input.strides, kept_).Run(Values(input.reg), from, Bytes(input.reg));
    } else {
      char*& place = tiles_.place[Index(input.reg)];
      Movement movement = box_.Between(box_.dense, input.strides, loop_.dims.size());
      if (movement.IsInPlace()) {
        place = const_cast<char*>(from);
        // The next block begins where this one ends.
        const int64_t bytes = box_.elements * Bytes(input.reg);
        if (looks_ahead_) ahead_.Add(from + bytes, bytes);
        return;
      }
      if (alike && loaded_[number] == from) return;
      place = tiles_.buffer[Index(input.reg)];
      movement.Run(place, from, Bytes(input.reg));
    }
    loaded_[number] = from;
  }

  void Count(size_t number, bool alike) {
    const Loop::Iota& iota = loop_.iotas[number];
    const int64_t start = box_.Offset(iota.offset, iota.coefficients), bytes = Bytes(iota.reg);
    if (alike && starts_[number] == start) return;
    starts_[number] = start;
    if (iota.fixed) {
      box_.CountPositions(iota, 0, kept_, start, Values(iota.reg), row_dense_, bytes);
    } else {
      box_.CountPositions(iota, 0, loop_.dims.size(), start, tiles_.buffer[Index(iota.reg)], box_.dense, bytes);
    }
  }

  void Compute(const std::vector<Loop::Step>& steps, char* const* at, int64_t n) {
    for (const Loop::Step& step : steps) {
      ahead_.Step();
      step.function(at[Index(step.result)], at[Index(step.a)], at[Index(step.b)], at[Index(step.c)], n);
    }
  }

  void RunPhase(const RowLoop::Phase& phase) {
    Compute(phase.scalar_steps, tiles_.buffer + loop_.registers.size(), rows_);
    for (const Loop::Output& output : phase.scalar_outputs) {
      box_.Between(output.strides, row_dense_, kept_).Run(Address(output), Values(output.reg), Bytes(output.reg));
    }
    for (const int64_t reg : phase.broadcasts) {
      const Plane plane{rows_, loop_.row, loop_.row, 1, 1, 0};
      MoveElements(tiles_.buffer[Index(reg)], Values(reg), plane, Bytes(reg));
    }
    for (const Loop::Output& output : phase.outputs) {
      if (output.in_place) tiles_.place[Index(output.reg)] = PlaceOf(output);
    }
    Compute(phase.steps, tiles_.place, box_.elements);
    for (const Loop::Reduction& reduction : phase.reductions) {
      ahead_.Step();
      Reduce(reduction);
    }
    for (const Loop::Output& output : phase.outputs) Store(output);
  }

  // Where a result is computed that may be computed in place.
  char* PlaceOf(const Loop::Output& output) const {
    const bool in_place = box_.Between(output.strides, box_.dense, loop_.dims.size()).IsInPlace();
    return in_place ? Address(output) : tiles_.buffer[Index(output.reg)];
  }

  void Store(const Loop::Output& output) {
    char* const to = Address(output);
    char*& place = tiles_.place[Index(output.reg)];
    const int64_t bytes = Bytes(output.reg);
    Movement movement = box_.Between(output.strides, box_.dense, loop_.dims.size());
    if (output.streamed && movement.IsInPlace()) {
      Stream(to, place, box_.elements * bytes);
    } else if (to != place) {
      movement.Run(to, place, bytes);
    } else {
      place = tiles_.buffer[Index(output.reg)];
    }
  }

  void Reduce(const Loop::Reduction& reduction) {
    const char* const initial = Values(reduction.initial);
    const size_t bytes = static_cast<size_t>(rows_ * TypeBytes(reduction.type));
    if (reduction.widen != nullptr) {
      reduction.widen(accumulators_, initial, nullptr, nullptr, rows_);
    } else {
      std::memcpy(accumulators_, initial, bytes);
    }
    reduction.reduce_each(accumulators_, tiles_.place[Index(reduction.reg)], rows_, loop_.row);
    char* const to = Values(reduction.result);
    if (reduction.narrow != nullptr) {
      reduction.narrow(to, accumulators_, nullptr, nullptr, rows_);
    } else {
      std::memcpy(to, accumulators_, bytes);
    }
  }

  const RowLoop& loop_;
  char* const* slots_;
  const size_t kept_;  // dimensions
  Tiles tiles_;        // of each register its tile, and what it holds for each row
  Box box_;
  int64_t* const filled_;            // the extents of the block before
  int64_t* const row_dense_;         // strides of the rows, one element for each
  int64_t* const starts_;            // of positions
  std::vector<const char*> loaded_;  // of each input, what is in its tile
  char* accumulators_;
  Ahead ahead_;
  bool looks_ahead_;
  int64_t calls_ = 0;  // of operations, for each block
  int64_t rows_ = 0;
};

}  // namespace

void ChooseBlock(RowLoop& loop, int64_t elements) {
  const size_t kept = loop.dims.size() - static_cast<size_t>(loop.num_reduced);
  loop.box = loop.dims;
  loop.rows = 1;
  int64_t left = elements / loop.row;
  for (size_t d = kept; d-- > 0;) {
    // As many as fit, in whole groups and in parts that are about as large as one another.
    const int64_t group = left >= kAligned ? kAligned : left >= kGroup ? kGroup : 1;
    const int64_t fitting = std::clamp<int64_t>(left / group * group, 1, loop.dims[d]);
    const int64_t parts = (loop.dims[d] + fitting - 1) / fitting, even = (loop.dims[d] + parts - 1) / parts;
    loop.box[d] = std::min(fitting, (even + group - 1) / group * group);
    left /= loop.box[d];
    loop.rows *= loop.box[d];
  }
  loop.tile = loop.rows * loop.row;
}

void RunRowBlockLoop(const RowLoop& loop, char* const* slots) {
  struct Job {
    const RowLoop* loop;
    char* const* slots;
  } job{&loop, slots};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& work = *static_cast<Job*>(user);
    if (begin < end) RowBlockLane(*work.loop, work.slots).Run(begin, end);
  };
  RunTasks(Box::Count(loop.dims, loop.box), loop.work, body, &job);
}

}  // namespace flagos::cpu
