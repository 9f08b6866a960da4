// Loops whose tiles are boxes: so many elements of several dimensions at a time. Where rows are short, a box holds many;
// where what lies along the last dimension is far apart in memory, a box holds what lies together.
#include <algorithm>
#include <cstring>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// Dimensions of a box that has more than one element along each, outermost first.
class Movement {
 public:
  void Add(int64_t extent, int64_t to, int64_t from) {
    if (extent == 1) return;
    if (rank_ > 0) {
      Dimension& outer = dimensions_[rank_ - 1];
      if (outer.to == to * extent && outer.from == from * extent) {
        outer = {outer.extent * extent, to, from};
        return;
      }
    }
    dimensions_[rank_++] = {extent, to, from};
  }

  // Whether all elements stand where they go to if both begin at one place.
  bool IsInPlace() const { return rank_ == 0 || (rank_ == 1 && dimensions_[0].to == 1 && dimensions_[0].from == 1); }

  void Run(char* to, const char* from, int64_t bytes) {
    const Dimension columns = TakeOut([](const Dimension& d) { return d.to == 1; });
    const Dimension rows = TakeOut([](const Dimension& d) { return d.from == 1; });
    const Plane plane{rows.extent, columns.extent, rows.to, columns.to, rows.from, columns.from};
    RunOver(0, to, from, plane, bytes);
  }

 private:
  struct Dimension {
    int64_t extent, to, from;
  };

  // The innermost dimension of that kind, or of any.
  template <class IsWanted>
  Dimension TakeOut(IsWanted is_wanted) {
    if (rank_ == 0) return {1, 0, 0};
    int wanted = rank_ - 1;
    for (int d = rank_ - 1; d >= 0; --d) {
      if (!is_wanted(dimensions_[d])) continue;
      wanted = d;
      break;
    }
    const Dimension taken = dimensions_[wanted];
    std::copy(dimensions_ + wanted + 1, dimensions_ + rank_, dimensions_ + wanted);
    --rank_;
    return taken;
  }

  void RunOver(int d, char* to, const char* from, const Plane& plane, int64_t bytes) const {
    if (d == rank_) return MoveElements(to, from, plane, bytes);
    for (int64_t i = 0; i < dimensions_[d].extent; ++i) {
      RunOver(d + 1, to + i * dimensions_[d].to * bytes, from + i * dimensions_[d].from * bytes, plane, bytes);
    }
  }

  int rank_ = 0;
  Dimension dimensions_[kMaxRank];
};

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
        extents_(tiles_.index + loop.dims.size()),
        filled_(extents_ + loop.dims.size()),
        dense_(filled_ + loop.dims.size()),
        starts_(dense_ + loop.dims.size()) {
    for (size_t i = 0; i < loop.registers.size(); ++i) {
      tiles_.home[i] = tiles_.place[i] = tiles_.Take(loop.tile * TypeBytes(loop.registers[i]));
    }
    for (const Loop::Constant& constant : loop.constants) {
      Gather(tiles_.home[Index(constant.reg)], reinterpret_cast<const char*>(&constant.bits), 0, loop.tile,
             Bytes(constant.reg));
    }
    for (const Loop::Input& input : loop.inputs) {
      if (input.invariant) Gather(tiles_.home[Index(input.reg)], Address(input), 0, loop.tile, Bytes(input.reg));
    }
  }

  void Run(int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      SetBox(task);
      for (const Loop::Input& input : loop_.inputs) {
        if (input.computed && !input.invariant) Load(input);
      }
      for (size_t i = 0; i < loop_.iotas.size(); ++i) Count(i);
      std::copy(extents_, extents_ + loop_.dims.size(), filled_);
      for (const Loop::Output& output : loop_.outputs) Place(output);
      for (const Loop::Step& step : loop_.steps) {
        step.function(tiles_.place[Index(step.result)], tiles_.place[Index(step.a)], tiles_.place[Index(step.b)],
                      tiles_.place[Index(step.c)], elements_);
      }
      for (const Loop::Output& output : loop_.outputs) Store(output);
    }
  }

 private:
  static size_t Index(int64_t reg) { return static_cast<size_t>(reg); }
  int64_t Bytes(int64_t reg) const { return TypeBytes(loop_.registers[Index(reg)]); }

  void SetBox(int64_t task) {
    elements_ = 1;
    for (size_t d = loop_.dims.size(); d-- > 0;) {
      const int64_t boxes = (loop_.dims[d] + loop_.box[d] - 1) / loop_.box[d];
      tiles_.index[d] = task % boxes * loop_.box[d];
      task /= boxes;
      extents_[d] = std::min(loop_.box[d], loop_.dims[d] - tiles_.index[d]);
      dense_[d] = elements_;
      elements_ *= extents_[d];
    }
  }

  template <class Access>
  char* Address(const Access& access) const {
    int64_t offset = access.offset;
    for (size_t d = 0; d < access.strides.size(); ++d) offset += tiles_.index[d] * access.strides[d];
    return slots_[Index(access.slot)] + offset * Bytes(access.reg);
  }

  template <class To, class From>
  Movement Between(const To& to, const From& from) const {
    Movement movement;
    for (size_t d = 0; d < loop_.dims.size(); ++d) movement.Add(extents_[d], to[d], from[d]);
    return movement;
  }

  void Load(const Loop::Input& input) {
    Movement movement = Between(dense_, input.strides);
    char*& place = tiles_.place[Index(input.reg)];
    if (movement.IsInPlace()) {
      place = Address(input);
    } else {
      place = tiles_.home[Index(input.reg)];
      movement.Run(place, Address(input), Bytes(input.reg));
    }
  }

  // Positions, unless those of the box before are the same.
  void Count(size_t number) {
    const Loop::Iota& iota = loop_.iotas[number];
    const size_t rank = loop_.dims.size();
    int64_t start = iota.offset;
    for (size_t d = 0; d < rank; ++d) start += tiles_.index[d] * iota.coefficients[d];
    if (starts_[number] == start && std::equal(extents_, extents_ + rank, filled_)) return;
    starts_[number] = start;
    CountOver(iota, 0, start, tiles_.home[Index(iota.reg)]);
  }

  void CountOver(const Loop::Iota& iota, size_t d, int64_t start, char* to) {
    const int64_t step = iota.coefficients[d];
    if (d + 1 == loop_.dims.size()) return iota.function(to, &start, &step, nullptr, extents_[d]);
    for (int64_t i = 0; i < extents_[d]; ++i) {
      CountOver(iota, d + 1, start + i * step, to + i * dense_[d] * Bytes(iota.reg));
    }
  }

  // Where a result is computed that may be computed in place.
  void Place(const Loop::Output& output) {
    if (!output.in_place) return;
    const bool in_place = Between(output.strides, dense_).IsInPlace();
    tiles_.place[Index(output.reg)] = in_place ? Address(output) : tiles_.home[Index(output.reg)];
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
      Between(output.strides, dense_).Run(to, from, Bytes(output.reg));
    }
  }

  const Loop& loop_;
  char* const* slots_;
  Tiles tiles_;
  int64_t* const extents_;  // of the box
  int64_t* const filled_;   // and of the box that the positions are those of
  int64_t* const dense_;    // strides within a tile
  int64_t* const starts_;   // of the positions
  int64_t elements_ = 0;
};

}  // namespace

void RunBoxLoop(const Loop& loop, char* const* slots) {
  struct Job {
    const Loop* loop;
    char* const* slots;
  } job{&loop, slots};
  int64_t tasks = 1;
  for (size_t d = 0; d < loop.dims.size(); ++d) tasks *= (loop.dims[d] + loop.box[d] - 1) / loop.box[d];
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& work = *static_cast<Job*>(user);
    if (begin < end) Lane(*work.loop, work.slots).Run(begin, end);
  };
  RunTasks(tasks, loop.work, body, &job);
}

}  // namespace flagos::cpu
