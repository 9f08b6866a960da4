// Loops whose tiles are boxes: so many elements of several dimensions at a time. Where rows are short, a box holds many;
// where what lies along the last dimension is far apart in memory, a box holds what lies together.
#include <algorithm>
#include <cstring>

#include "cpu/box.h"
#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// The strides of one element.
struct Nowhere {
  int64_t operator[](size_t) const { return 0; }
};

// What one thread needs for one loop.
class Lane {
 public:
  Lane(const Loop& loop, char* const* slots)
      : loop_(loop),
        slots_(slots),
        tiles_(loop.lane_bytes, loop.registers.size(), 4 * loop.dims.size() + loop.iotas.size()),
        box_(loop.dims, loop.box, tiles_.index),
        filled_(tiles_.index + 3 * loop.dims.size()),
        starts_(filled_ + loop.dims.size()) {
    std::fill_n(tiles_.buffer, loop.registers.size(), nullptr);
    PlaceTurns(loop.inputs);
    PlaceTurns(loop.outputs);
    for (size_t i = 0; i < loop.registers.size(); ++i) {
      if (tiles_.buffer[i] == nullptr) tiles_.buffer[i] = tiles_.Take(loop.tile * TypeBytes(loop.registers[i]));
      tiles_.place[i] = tiles_.buffer[i];
    }
    FillInvariant(loop, slots, tiles_);
  }

  void Run(int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      box_.Set(task);
      for (const Loop::Input& input : loop_.inputs) {
        if (input.computed && !input.invariant && input.interleaved > 0) Load(input);
      }
      for (size_t i = 0; i < loop_.iotas.size(); ++i) Count(i);
      std::copy_n(box_.extents, loop_.dims.size(), filled_);
      for (const Loop::Output& output : loop_.outputs) Place(output);
      for (const Loop::Step& step : loop_.steps) {
        step.function(tiles_.place[Index(step.result)], tiles_.place[Index(step.a)], tiles_.place[Index(step.b)],
                      tiles_.place[Index(step.c)], box_.elements);
      }
      for (const Loop::Output& output : loop_.outputs) {
        if (output.interleaved > 0) Store(output);
      }
    }
  }

 private:
  static size_t Index(int64_t reg) { return static_cast<size_t>(reg); }
  int64_t Bytes(int64_t reg) const { return TypeBytes(loop_.registers[Index(reg)]); }

  // The tiles of what is interleaved in memory, each as far behind the one before it.
  template <class Access>
  void PlaceTurns(const std::vector<Access>& accesses) {
    for (size_t first = 0; first < accesses.size(); ++first) {
      for (int64_t member = 0; member < accesses[first].interleaved && accesses[first].interleaved > 1; ++member) {
        const Access& access = accesses[first + static_cast<size_t>(member)];
        tiles_.buffer[Index(access.reg)] = tiles_.Take(TileBytes(access));
      }
    }
  }

  // From the tile of one to that of the next one.
  template <class Access>
  int64_t TileBytes(const Access& access) const {
    return (loop_.tile * Bytes(access.reg) + 63) / 64 * 64;
  }

  template <class Access>
  char* Address(const Access& access) const {
    return slots_[Index(access.slot)] + box_.Offset(access.offset, access.strides) * Bytes(access.reg);
  }

  template <class To, class From>
  Movement Between(const To& to, const From& from) const {
    return box_.Between(to, from, loop_.dims.size());
  }

  void Load(const Loop::Input& input) {
    Movement movement = Between(box_.dense, input.strides);
    movement.Add(input.interleaved, TileBytes(input) / Bytes(input.reg), 1);
    char*& place = tiles_.place[Index(input.reg)];
    if (movement.IsInPlace()) {
      place = Address(input);
    } else {
      place = tiles_.buffer[Index(input.reg)];
      movement.Run(place, Address(input), Bytes(input.reg));
    }
  }

  // Positions, unless those of the box before are the same.
  void Count(size_t number) {
    const Loop::Iota& iota = loop_.iotas[number];
    const int64_t start = box_.Offset(iota.offset, iota.coefficients);
    if (starts_[number] == start && std::equal(filled_, filled_ + loop_.dims.size(), box_.extents)) return;
    starts_[number] = start;
    char* const to = tiles_.buffer[Index(iota.reg)];
    box_.CountPositions(iota, 0, loop_.dims.size(), start, to, box_.dense, Bytes(iota.reg));
  }

  // Where a result is computed that may be computed in place.
  void Place(const Loop::Output& output) {
    if (!output.in_place) return;
    const bool in_place = Between(output.strides, box_.dense).IsInPlace();
    tiles_.place[Index(output.reg)] = in_place ? Address(output) : tiles_.buffer[Index(output.reg)];
  }

  void Store(const Loop::Output& output) {
    if (output.moved >= 0) {
      const Loop::Input& input = loop_.inputs[Index(output.moved)];
      return Between(output.strides, input.strides).Run(Address(output), Address(input), Bytes(output.reg));
    }
    char* const to = Address(output);
    const char* const from = tiles_.place[Index(output.reg)];
    if (loop_.uniform[Index(output.reg)]) {
      Between(output.strides, Nowhere()).Run(to, from, Bytes(output.reg));
    } else if (to != from) {
      Movement movement = Between(output.strides, box_.dense);
      movement.Add(output.interleaved, 1, TileBytes(output) / Bytes(output.reg));
      movement.Run(to, from, Bytes(output.reg));
    }
  }

  const Loop& loop_;
  char* const* slots_;
  Tiles tiles_;
  Box box_;
  int64_t* const filled_;  // the extents of the box that the positions are those of
  int64_t* const starts_;  // of the positions
};

}  // namespace

void RunBoxLoop(const Loop& loop, char* const* slots) {
  struct Job {
    const Loop* loop;
    char* const* slots;
  } job{&loop, slots};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& work = *static_cast<Job*>(user);
    if (begin < end) Lane(*work.loop, work.slots).Run(begin, end);
  };
  RunTasks(Box::Count(loop.dims, loop.box), loop.work, body, &job);
}

}  // namespace flagos::cpu
