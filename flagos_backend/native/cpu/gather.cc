// Windows of an array at starts that the program computes, copied run by run.
#include "cpu/run_loop.h"
#include "cpu/tiles.h"
#include "cpu/windows.h"

namespace flagos::cpu {
namespace {

struct Job {
  const GatherWindows& gather;
  char* const* slots;
};

void GatherRange(void* user, int64_t begin, int64_t end) {
  const auto& [gather, slots] = *static_cast<const Job*>(user);
  char* const array = slots[gather.array];
  char* const target = slots[gather.target];
  const int64_t bytes = gather.element_bytes, run_bytes = gather.run * bytes;
  const auto copy_runs = CopyRunsOf</*kScatters=*/false>(run_bytes);
  VisitWindows(gather, slots, 0, begin, end, [&](const WindowChunk& chunk) {
    VisitRuns(gather, [&](int64_t in_array, int64_t in_result) {
      char* const to = target + (chunk.other + in_result) * bytes;
      copy_runs(array + in_array * bytes, to, chunk.offsets, bytes, chunk.stride * bytes, run_bytes, chunk.size);
    });
  });
}

// Windows [begin, end), and where in the arrays the first runs of windows at 0 are.
void Take(const GatherWindows& gather, char* const* slots, int64_t begin, int64_t end, int64_t in_array,
          int64_t in_result) {
  const int64_t bytes = gather.element_bytes, step = Innermost(gather).array_stride;
  uint32_t offsets[kChunk];
  VisitNeighbours(gather, begin, end, [&](int64_t index, int64_t array, int64_t other, int64_t n) {
    std::fill_n(offsets, n, 0);
    for (int64_t i = 1; step != 0 && i < n; ++i) offsets[i] = offsets[i - 1] + static_cast<uint32_t>(step);
    for (const IndexedWindows::Start& start : gather.starts) {
      gather.short_start(offsets, StartsAt(gather, start, index, slots), n);
    }
    const auto take = [&](int64_t from, int64_t to) {
      gather.take(slots[gather.target] + (other + to) * bytes, slots[gather.array] + (array + from) * bytes, offsets,
                  n);
    };
    VisitRuns(gather, take, 0, in_array, in_result);
  });
}

void TakeRange(void* user, int64_t begin, int64_t end) {
  const auto& [gather, slots] = *static_cast<const Job*>(user);
  Take(gather, slots, begin, end, 0, 0);
}

// Of all windows, positions [begin, end) along their outermost dimension.
void TakeRows(void* user, int64_t begin, int64_t end) {
  const auto& [gather, slots] = *static_cast<const Job*>(user);
  GatherWindows part = gather;
  IndexedWindows::Window& rows = part.outer.front();
  rows.size = end - begin;
  Take(part, slots, 0, part.num_windows, begin * rows.array_stride, begin * rows.other_stride);
}

}  // namespace

void RunGather(const GatherWindows& gather, char* const* slots) {
  // Of rows of an array that are long enough to be read once, the caches would otherwise read each line for every thread.
  constexpr int64_t kRows = 32;
  Job job{gather, slots};
  const int64_t work = gather.num_windows * gather.window_elements;
  if (gather.take != nullptr && !gather.outer.empty() && gather.outer.front().size >= kRows) {
    return RunTasks(gather.outer.front().size, work, &TakeRows, &job);
  }
  RunTasks(gather.num_windows, work, gather.take != nullptr ? &TakeRange : &GatherRange, &job);
}

}  // namespace flagos::cpu
