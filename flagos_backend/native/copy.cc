#include "copy.h"

#include <algorithm>
#include <cstdlib>

namespace flagos {
namespace {

struct Axis {
  int64_t size;
  int64_t to;
  int64_t from;
};

// A piece of work below this many bytes is not worth another thread.
constexpr size_t kGrain = size_t{1} << 20;
// Rows and columns of a tile of a transposition: both sides stay in the first-level cache.
constexpr int64_t kTile = 32;

struct Plan {
  size_t element;
  size_t rank = 0;
  Axis axes[kMaxRank];
};

// Drops axes of one element and joins neighbours that both sides walk as one.
Plan MakePlan(const Shape& shape, const int64_t* to, const int64_t* from) {
  Plan plan;
  plan.element = static_cast<size_t>(ElementBytes(shape.type));
  for (size_t i = 0; i < shape.dims.rank(); ++i) {
    if (shape.dims[i] == 1) continue;
    const Axis axis{shape.dims[i], to[i], from[i]};
    if (plan.rank > 0) {
      Axis& outer = plan.axes[plan.rank - 1];
      if (outer.to == axis.size * axis.to && outer.from == axis.size * axis.from) {
        outer = {outer.size * axis.size, axis.to, axis.from};
        continue;
      }
    }
    plan.axes[plan.rank++] = axis;
  }
  return plan;
}

template <class Word>
void CopyRow(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    Word word;  // memcpy, because neither side need be aligned
    std::memcpy(&word, from + i * from_stride, sizeof(Word));
    std::memcpy(to + i * to_stride, &word, sizeof(Word));
  }
}

struct Word16 {
  uint64_t low, high;
};

void CopyLine(size_t element, const Axis& axis, char* to, const char* from) {
  const auto step = static_cast<int64_t>(element);
  if (axis.to == step && axis.from == step) {
    std::memcpy(to, from, static_cast<size_t>(axis.size) * element);
    return;
  }
  switch (element) {
    case 1:
      return CopyRow<uint8_t>(to, axis.to, from, axis.from, axis.size);
    case 2:
      return CopyRow<uint16_t>(to, axis.to, from, axis.from, axis.size);
    case 4:
      return CopyRow<uint32_t>(to, axis.to, from, axis.from, axis.size);
    case 8:
      return CopyRow<uint64_t>(to, axis.to, from, axis.from, axis.size);
    default:
      return CopyRow<Word16>(to, axis.to, from, axis.from, axis.size);
  }
}

void CopyPlane(size_t element, const Axis& outer, const Axis& inner, char* to, const char* from) {
  const bool transposed = std::abs(outer.from) < std::abs(inner.from);
  if (!transposed) {
    for (int64_t i = 0; i < outer.size; ++i) CopyLine(element, inner, to + i * outer.to, from + i * outer.from);
    return;
  }
  for (int64_t row = 0; row < outer.size; row += kTile) {
    const int64_t rows = std::min(kTile, outer.size - row);
    for (int64_t column = 0; column < inner.size; column += kTile) {
      const Axis part{std::min(kTile, inner.size - column), inner.to, inner.from};
      for (int64_t i = row; i < row + rows; ++i) {
        CopyLine(element, part, to + i * outer.to + column * inner.to, from + i * outer.from + column * inner.from);
      }
    }
  }
}

void CopyAxes(const Plan& plan, size_t depth, char* to, const char* from) {
  const size_t left = plan.rank - depth;
  if (left == 0) {
    std::memcpy(to, from, plan.element);
  } else if (left == 1) {
    CopyLine(plan.element, plan.axes[depth], to, from);
  } else if (left == 2) {
    CopyPlane(plan.element, plan.axes[depth], plan.axes[depth + 1], to, from);
  } else {
    const Axis& axis = plan.axes[depth];
    for (int64_t i = 0; i < axis.size; ++i) CopyAxes(plan, depth + 1, to + i * axis.to, from + i * axis.from);
  }
}

}  // namespace

void CopyElements(const Shape& shape, void* to, const int64_t* to_strides, const void* from,
                  const int64_t* from_strides, ThreadPool* pool) {
  if (shape.bytes == 0) return;
  int64_t dense[kMaxRank];
  DenseStrides(shape, dense);
  Plan plan = MakePlan(shape, to_strides ? to_strides : dense, from_strides ? from_strides : dense);
  auto* target = static_cast<char*>(to);
  auto* source = static_cast<const char*>(from);
  if (pool == nullptr || shape.bytes < 2 * kGrain || plan.rank == 0) {
    CopyAxes(plan, 0, target, source);
    return;
  }
  // Threads share the longest axis; which one it is does not change the result.
  size_t split = 0;
  for (size_t i = 1; i < plan.rank; ++i) {
    if (plan.axes[i].size > plan.axes[split].size) split = i;
  }
  const int64_t size = plan.axes[split].size;
  const int64_t parts = std::min<int64_t>(size, static_cast<int64_t>(shape.bytes / kGrain));
  pool->ParallelFor(parts, [&](int64_t part) {
    const int64_t begin = size * part / parts, end = size * (part + 1) / parts;
    Plan piece = plan;
    piece.axes[split].size = end - begin;
    CopyAxes(piece, 0, target + begin * plan.axes[split].to, source + begin * plan.axes[split].from);
  });
}

}  // namespace flagos
