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

void TakeRange(void* user, int64_t begin, int64_t end) {
  const auto& [gather, slots] = *static_cast<const Job*>(user);
  const int64_t bytes = gather.element_bytes, step = Innermost(gather).array_stride;
  uint32_t offsets[kChunk];
  VisitNeighbours(gather, begin, end, [&](int64_t index, int64_t array, int64_t other, int64_t n) {
    std::fill_n(offsets, n, 0);
    for (int64_t i = 1; step != 0 && i < n; ++i) offsets[i] = offsets[i - 1] + static_cast<uint32_t>(step);
    for (const IndexedWindows::Start& start : gather.starts) {
      gather.short_start(offsets, StartsAt(gather, start, index, slots), n);
    }
    gather.take(slots[gather.target] + other * bytes, slots[gather.array] + array * bytes, offsets, n);
  });
}

}  // namespace

void RunGather(const GatherWindows& gather, char* const* slots) {
  Job job{gather, slots};
  const auto body = gather.take != nullptr ? &TakeRange : &GatherRange;
  RunTasks(gather.num_windows, gather.num_windows * gather.window_elements, body, &job);
}

}  // namespace flagos::cpu
