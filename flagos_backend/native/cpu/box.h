// A box of a loop nest: so many elements of several dimensions at a time, side by side in a tile.
#ifndef FLAGOS_NATIVE_CPU_BOX_H_
#define FLAGOS_NATIVE_CPU_BOX_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/native_program.h"
#include "cpu/tiles.h"

namespace flagos::cpu {

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
  Dimension dimensions_[kMaxRank + 1];  // of a box, and of what is interleaved
};

// Where a box begins in its loop nest, how far it reaches, and the strides of its elements in a tile.
class Box {
 public:
  // memory: 3 numbers for each dimension, of which the first are the index. reach: of a whole box.
  Box(const std::vector<int64_t>& dims, const std::vector<int64_t>& reach, int64_t* memory)
      : index(memory), extents(memory + dims.size()), dense(memory + 2 * dims.size()), dims_(dims), reach_(reach) {}

  static int64_t Count(const std::vector<int64_t>& dims, const std::vector<int64_t>& reach) {
    int64_t count = 1;
    for (size_t d = 0; d < dims.size(); ++d) count *= (dims[d] + reach[d] - 1) / reach[d];
    return count;
  }

  void Set(int64_t number) {
    elements = 1;
    for (size_t d = dims_.size(); d-- > 0;) {
      const int64_t boxes = (dims_[d] + reach_[d] - 1) / reach_[d];
      index[d] = number % boxes * reach_[d];
      number /= boxes;
      extents[d] = std::min(reach_[d], dims_[d] - index[d]);
      dense[d] = elements;
      elements *= extents[d];
    }
  }

  // Over the dimensions that both have strides of.
  template <class To, class From>
  Movement Between(const To& to, const From& from, size_t rank) const {
    Movement movement;
    for (size_t d = 0; d < rank; ++d) movement.Add(extents[d], to[d], from[d]);
    return movement;
  }

  // Of the first element.
  int64_t Offset(int64_t offset, const std::vector<int64_t>& strides) const {
    for (size_t d = 0; d < strides.size(); ++d) offset += index[d] * strides[d];
    return offset;
  }

  // The positions of its elements over dimensions [d, rank), of which the first is `start`; `strides`: where they go.
  void CountPositions(const LoopBase::Iota& iota, size_t d, size_t rank, int64_t start, char* to,
                      const int64_t* strides, int64_t bytes) const {
    const int64_t step = iota.coefficients[d];
    if (d + 1 == rank) return iota.function(to, &start, &step, nullptr, extents[d]);
    for (int64_t i = 0; i < extents[d]; ++i) {
      CountPositions(iota, d + 1, rank, start + i * step, to + i * strides[d] * bytes, strides, bytes);
    }
  }

  int64_t* const index;
  int64_t* const extents;
  int64_t* const dense;
  int64_t elements = 0;

 private:
  const std::vector<int64_t>& dims_;
  const std::vector<int64_t>& reach_;
};

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_BOX_H_
