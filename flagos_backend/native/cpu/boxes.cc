// Which loops have boxes for tiles, and how large those are.
#include <algorithm>
#include <cstdlib>
#include <tuple>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// Of a loop that only moves elements, which no tile has to hold.
constexpr int64_t kMoved = 8192;
// The sides of a box that transposes: as much as a line of memory holds, and as squares of vectors have.
constexpr int64_t kLineBytes = 64, kLeastSide = 16, kGreatestSide = 64;

// What all arrays of a loop have in common.
template <class Function>
void ForEachAccess(const Loop& loop, Function function) {
  for (const Loop::Input& input : loop.inputs) {
    if (!input.invariant) function(input);
  }
  for (const Loop::Output& output : loop.outputs) function(output);
}

// A dimension along which arrays are contiguous that are not so along the last one; -1 for none.
int64_t TransposedDimension(const Loop& loop, int64_t* bytes) {
  std::vector<int64_t> arrays(loop.dims.size());
  *bytes = kLineBytes;
  ForEachAccess(loop, [&](const auto& access) {
    if (std::abs(access.strides.back()) <= 1) return;
    for (size_t d = 0; d + 1 < loop.dims.size(); ++d) {
      if (access.strides[d] != 1 || loop.dims[d] == 1) continue;
      ++arrays[d];
      *bytes = std::min(*bytes, TypeBytes(loop.registers[static_cast<size_t>(access.reg)]));
    }
  });
  const auto most = std::max_element(arrays.begin(), arrays.end());
  return most == arrays.end() || *most == 0 ? -1 : most - arrays.begin();
}

// A box of at most `elements`: `transposed`, if there is one, and the last dimension first, then what is next to that.
std::vector<int64_t> MakeBox(const Loop& loop, int64_t transposed, int64_t bytes, int64_t elements) {
  std::vector<int64_t> box(loop.dims.size(), 1);
  const size_t last = loop.dims.size() - 1;
  int64_t left = elements;
  const auto take = [&](size_t d, int64_t greatest) {
    // As many as fit, in parts that are about as large as one another.
    const int64_t fitting = std::max<int64_t>(1, std::min(loop.dims[d], greatest));
    const int64_t parts = (loop.dims[d] + fitting - 1) / fitting;
    const int64_t even = (loop.dims[d] + parts - 1) / parts;
    box[d] = std::min(fitting, (even + kLeastSide - 1) / kLeastSide * kLeastSide);
    left /= box[d];
  };
  if (transposed >= 0) {
    const size_t other = static_cast<size_t>(transposed);
    const int64_t side = std::clamp(kLineBytes / bytes, kLeastSide, kGreatestSide);
    const int64_t width = std::min(loop.dims[last], side), height = std::min(loop.dims[other], side);
    if (width * height > elements) {
      take(other, kLeastSide / 2);
      take(last, left);
    } else {
      take(other, std::min(elements / width, height == side ? std::max(side, kGreatestSide * side / width) : height));
      take(last, height == side ? std::min(left, kGreatestSide) : left);
    }
  }
  for (size_t d = loop.dims.size(); d-- > 0;) {
    if (box[d] == 1) take(d, left);
  }
  return box;
}

// Whether boxes of rows save more than they cost, in about nanoseconds for each row: calls of operations, and copies
// of what is read and written where it stands when a tile is a row.
bool SavesTime(const Loop& loop, const std::vector<int64_t>& box) {
  constexpr int64_t kStep = 6, kAccess = 4, kTile = 8, kCopy = 3, kVector = 32;
  const int64_t columns = loop.dims.back(), rows = Product(box, 0, box.size() - 1);
  if (box.back() < columns || rows < 2) return false;
  int64_t saved = kTile + kStep * static_cast<int64_t>(loop.steps.size() + loop.iotas.size()), lost = 0;
  ForEachAccess(loop, [&](const auto& access) {
    saved += kAccess;
    if (access.strides.back() != 1) return;
    int64_t dense = 1;
    bool in_place = true;
    for (size_t d = loop.dims.size(); d-- > 0;) {
      in_place = in_place && (box[d] == 1 || access.strides[d] == dense);
      dense *= box[d];
    }
    const int64_t bytes = columns * TypeBytes(loop.registers[static_cast<size_t>(access.reg)]);
    if (!in_place) lost += kCopy + bytes / kVector;
  });
  return saved * (rows - 1) / rows > lost;
}

// Puts inputs, or outputs, one behind the other that are interleaved in memory: as many as the stride along the last
// dimension says, as coordinates of points. Whether there are any. has_tile(access): it has a tile of its own.
template <class Access, class HasTile>
bool FindInterleaved(const Loop& loop, std::vector<Access>& accesses, const HasTile& has_tile) {
  constexpr int64_t kMostInterleaved = 4, kLeastBytes = 4;  // of which there are shuffles
  std::stable_sort(accesses.begin(), accesses.end(), [](const Access& a, const Access& b) {
    return std::tie(a.slot, a.offset) < std::tie(b.slot, b.offset);
  });
  bool found = false;
  for (size_t first = 0; first < accesses.size(); ++first) {
    const Access access = accesses[first];
    const Type type = loop.registers[static_cast<size_t>(access.reg)];
    const int64_t count = access.strides.back();
    if (count < 2 || count > kMostInterleaved || TypeBytes(type) < kLeastBytes || !has_tile(access)) continue;
    int64_t member = 1;
    for (; member < count; ++member) {
      if (first + static_cast<size_t>(member) >= accesses.size()) break;
      const auto place = accesses.begin() + static_cast<int64_t>(first) + member;
      const auto next = std::find_if(place, accesses.end(), [&](const Access& other) {
        return other.slot == access.slot && other.offset == access.offset + member && other.strides == access.strides &&
               loop.registers[static_cast<size_t>(other.reg)] == type && has_tile(other);
      });
      if (next == accesses.end()) break;
      std::swap(*place, *next);
    }
    if (member < count) continue;
    accesses[first].interleaved = count;
    while (--member > 0) accesses[++first].interleaved = 0;
    found = true;
  }
  return found;
}

// The same of both.
bool FindInterleaved(Loop& loop) {
  const auto is_alone = [](const auto& accesses, int64_t reg) {
    return std::count_if(accesses.begin(), accesses.end(), [&](const auto& other) { return other.reg == reg; }) == 1;
  };
  const bool of_inputs = FindInterleaved(loop, loop.inputs, [&](const Loop::Input& input) {
    return input.computed && !input.invariant && is_alone(loop.inputs, input.reg);
  });
  const bool of_outputs = FindInterleaved(loop, loop.outputs, [&](const Loop::Output& output) {
    const auto computes = [&](const Loop::Step& step) { return step.result == output.reg; };
    return std::any_of(loop.steps.begin(), loop.steps.end(), computes) && is_alone(loop.outputs, output.reg);
  });
  return of_inputs || of_outputs;
}

}  // namespace

void ChooseBox(Loop& loop, int64_t elements, bool streams) {
  const int64_t points = Product(loop.dims, 0, loop.dims.size());
  if (loop.dims.empty() || points == 0) return;
  for (Loop::Input& input : loop.inputs) {
    input.computed = std::any_of(loop.steps.begin(), loop.steps.end(), [&](const Loop::Step& step) {
      return step.a == input.reg || step.b == input.reg || step.c == input.reg;
    });
  }
  const bool moves = loop.steps.empty() && loop.iotas.empty();
  int64_t bytes;
  const int64_t transposed = TransposedDimension(loop, &bytes);
  if (transposed < 0 && streams) return;
  const bool interleaves = FindInterleaved(loop) && points > elements;
  if (transposed < 0 && loop.dims.size() < 2 && !moves && !interleaves) return;
  std::vector<int64_t> box = MakeBox(loop, transposed, bytes, moves ? kMoved : elements);
  if (transposed < 0 && !moves && !interleaves && !SavesTime(loop, box)) return;
  loop.tile = moves ? 1 : Product(box, 0, box.size());
  loop.box = std::move(box);
  for (Loop::Output& output : loop.outputs) {
    const auto stored = [&](const Loop::Input& input) { return input.reg == output.reg && !input.invariant; };
    const auto input = std::find_if(loop.inputs.begin(), loop.inputs.end(), stored);
    if (input != loop.inputs.end()) output.moved = input - loop.inputs.begin();
  }
}

}  // namespace flagos::cpu
