// Where windows at run-time starts stand, a chunk of them at a time: what gathers and scatters share.
#ifndef FLAGOS_NATIVE_CPU_WINDOWS_H_
#define FLAGOS_NATIVE_CPU_WINDOWS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/native_program.h"

namespace flagos::cpu {

inline IndexedWindows::Batch Innermost(const IndexedWindows& windows) {
  return windows.batch.empty() ? IndexedWindows::Batch{1, 0, 0, 0} : windows.batch.back();
}

// Windows in a row of the batch: window i starts at element offsets[i] of the array, and at other + i * stride.
struct WindowChunk {
  const int64_t* offsets;
  int64_t other, stride, size;
};

constexpr int64_t kChunk = 512;

// visit(index, array, other, n) for windows [begin, end), in order: n neighbours along the last dimension of the batch, and
// where the first of them has its indices and would be in the arrays if these were 0.
template <class Visit>
void VisitNeighbours(const IndexedWindows& windows, int64_t begin, int64_t end, const Visit& visit) {
  const size_t rank = windows.batch.size();
  const IndexedWindows::Batch inner = Innermost(windows);
  for (int64_t n = 0; begin < end; begin += n) {
    const int64_t first = begin % inner.size;
    n = std::min({kChunk, inner.size - first, end - begin});
    int64_t index = first * inner.index_stride, array = first * inner.array_stride, other = first * inner.other_stride;
    int64_t rest = begin / inner.size;
    for (size_t d = rank; d-- > 1;) {
      const IndexedWindows::Batch& batch = windows.batch[d - 1];
      const int64_t i = d == 1 ? rest : rest % batch.size;
      rest /= batch.size;
      index += i * batch.index_stride;
      array += i * batch.array_stride;
      other += i * batch.other_stride;
    }
    visit(index, array, other, n);
  }
}

// The numbers of `start` for windows whose first has its index at `index`.
inline Starts StartsAt(const IndexedWindows& windows, const IndexedWindows::Start& start, int64_t index,
                       char* const* slots) {
  const char* const numbers = slots[start.slot] + (start.offset + index) * windows.index_bytes;
  return {numbers, Innermost(windows).index_stride, start.limit, start.array_stride, start.wrap};
}

// visit(chunk) for windows [begin, end), in order. first_index: what is added to where their indices are.
template <class Visit>
void VisitWindows(const IndexedWindows& windows, char* const* slots, int64_t first_index, int64_t begin, int64_t end,
                  const Visit& visit) {
  int64_t offsets[kChunk];
  const IndexedWindows::Batch inner = Innermost(windows);
  VisitNeighbours(windows, begin, end, [&](int64_t index, int64_t array, int64_t other, int64_t n) {
    std::fill_n(offsets, n, array);
    for (int64_t i = 1; inner.array_stride != 0 && i < n; ++i) offsets[i] = offsets[i - 1] + inner.array_stride;
    for (const IndexedWindows::Start& start : windows.starts) {
      windows.start(offsets, StartsAt(windows, start, first_index + index, slots), n);
    }
    visit(WindowChunk{offsets, other, inner.other_stride, n});
  });
}

// visit(array, other) for the offsets of all runs of a window.
template <class Visit>
void VisitRuns(const IndexedWindows& windows, const Visit& visit, size_t dimension = 0, int64_t array = 0,
               int64_t other = 0) {
  if (dimension == windows.outer.size()) return visit(array, other);
  const IndexedWindows::Window& outer = windows.outer[dimension];
  for (int64_t i = 0; i < outer.size; ++i) {
    VisitRuns(windows, visit, dimension + 1, array + i * outer.array_stride, other + i * outer.other_stride);
  }
}

// Copies the run of each of n windows: from + offsets[i] * bytes to to + i * stride, or the other way round for a scatter,
// without those of negative offsets. kRunBytes: how many bytes, where the compiler is to know; 0: any number.
template <int64_t kRunBytes, bool kScatters>
void CopyRuns(char* array, char* other, const int64_t* offsets, int64_t bytes, int64_t stride, int64_t run_bytes,
              int64_t n) {
  const size_t size = static_cast<size_t>(kRunBytes == 0 ? run_bytes : kRunBytes);
  for (int64_t i = 0; i < n; ++i, other += stride) {
    if (!kScatters) {
      std::memcpy(other, array + offsets[i] * bytes, size);
    } else if (offsets[i] >= 0) {
      std::memcpy(array + offsets[i] * bytes, other, size);
    }
  }
}
template <bool kScatters>
auto CopyRunsOf(int64_t run_bytes) {
  switch (run_bytes) {
    case 1:
      return &CopyRuns<1, kScatters>;
    case 2:
      return &CopyRuns<2, kScatters>;
    case 4:
      return &CopyRuns<4, kScatters>;
    case 8:
      return &CopyRuns<8, kScatters>;
    case 16:
      return &CopyRuns<16, kScatters>;
    default:
      return &CopyRuns<0, kScatters>;
  }
}

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_WINDOWS_H_
