// Positions of the greatest or least elements of rows. Long or few rows are cut into segments, whose minima or maxima
// are rows in their turn; of many short rows, columns are made, which are searched side by side.
#include <algorithm>
#include <cstring>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// Cuts that depend on nothing but the shape.
constexpr int64_t kEnoughTasks = 16, kLeastSegment = 1 << 13;
constexpr int64_t kShortRow = 64, kManyRows = 16;
constexpr int64_t kTransposedBytes = 1 << 15;  // of rows that have become columns

int64_t DivideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Arrays of `size` elements, each `inner` apart, `inner` such rows beside each other, `outer` times.
struct Search {
  const ArgMinMax& step;
  const char* source;
  int64_t outer, size, inner;
  int64_t segments, segment;  // of how many elements
  int64_t columns, chunks;    // that are searched at once
  int64_t transposed = 0;     // rows that become columns at once; 0: none do
  int64_t* at;                // [outer][segments][inner], from the beginning of a row

  Search(const ArgMinMax& of, const char* from, int64_t outer_size, int64_t row, int64_t inner_size, bool cuts)
      : step(of), source(from), outer(outer_size), size(row), inner(inner_size) {
    columns = std::min(inner, kArgMinMaxColumns);
    chunks = DivideUp(inner, columns);
    const int64_t most = cuts ? std::max<int64_t>(1, row * columns / kLeastSegment) : 1;
    segments = std::min(most, DivideUp(kEnoughTasks, outer * chunks));
    segment = DivideUp(size, segments);
    segments = DivideUp(size, segment);
    if (inner == 1 && size <= kShortRow && outer >= kManyRows) {
      transposed = std::min(kArgMinMaxColumns, kTransposedBytes / (size * TypeBytes(step.type)));
    }
  }

  int64_t tasks() const { return transposed > 0 ? DivideUp(outer, transposed) : outer * segments * chunks; }

  static void Run(void* user, int64_t begin, int64_t end) {
    const Search& search = *static_cast<Search*>(user);
    for (int64_t task = begin; task < end; ++task)
      search.transposed > 0 ? search.RunTransposed(task) : search.RunTask(task);
  }

  void RunTransposed(int64_t task) const {
    alignas(64) char columns_of_rows[kTransposedBytes];
    const int64_t first = task * transposed, n = std::min(transposed, outer - first), bytes = TypeBytes(step.type);
    MoveElements(columns_of_rows, source + first * size * bytes, {size, n, n, 1, 1, size}, bytes);
    step.in_columns(at + first, columns_of_rows, size, n, n);
  }

  void RunTask(int64_t task) const {
    const int64_t first = task % chunks * columns, row = task / chunks;
    const int64_t o = row / segments, start = row % segments * segment, length = std::min(segment, size - start);
    const char* const from = source + ((o * size + start) * inner + first) * TypeBytes(step.type);
    int64_t* const to = at + row * inner + first;
    const int64_t n = std::min(columns, inner - first);
    if (inner == 1) {
      *to = step.in_row(from, length);
    } else {
      step.in_columns(to, from, length, inner, n);
    }
    for (int64_t i = 0; i < n; ++i) to[i] += start;
  }
};

}  // namespace

void RunArgMinMax(const ArgMinMax& step, char* const* slots) {
  thread_local std::vector<int64_t> positions, winners;
  thread_local std::vector<char> candidates;
  const int64_t results = step.outer * step.inner, bytes = TypeBytes(step.type);
  if (results == 0) return;
  const char* const source = slots[step.source];
  Search search(step, source, step.outer, step.size, step.inner, true);
  positions.resize(static_cast<size_t>(results * search.segments));
  search.at = positions.data();
  RunTasks(search.tasks(), results * step.size * 2, &Search::Run, &search);
  const auto element = [&](int64_t o, int64_t position, int64_t i) {
    return source + ((o * step.size + position) * step.inner + i) * bytes;
  };
  if (search.segments > 1) {
    candidates.resize(static_cast<size_t>(results * search.segments * bytes));
    for (int64_t k = 0; k < results * search.segments; ++k) {
      const char* const from = element(k / step.inner / search.segments, search.at[k], k % step.inner);
      std::memcpy(candidates.data() + k * bytes, from, static_cast<size_t>(bytes));
    }
    winners.resize(static_cast<size_t>(results));
    Search last(step, candidates.data(), step.outer, search.segments, step.inner, false);
    last.at = winners.data();
    Search::Run(&last, 0, last.tasks());
    for (int64_t k = 0; k < results; ++k) {
      const int64_t o = k / step.inner, i = k % step.inner;
      search.at[k] = search.at[(o * search.segments + winners[static_cast<size_t>(k)]) * step.inner + i];
    }
  }
  char* index = slots[step.indices];
  char* value = slots[step.values];
  const int64_t index_bytes = TypeBytes(step.index_type);
  const int64_t* position = search.at;
  for (int64_t o = 0; o < step.outer; ++o) {
    for (int64_t i = 0; i < step.inner; ++i, index += index_bytes, value += bytes, ++position) {
      CopyElement(index, reinterpret_cast<const char*>(position), index_bytes);
      CopyElement(value, element(o, *position, i), bytes);
    }
  }
}

}  // namespace flagos::cpu
