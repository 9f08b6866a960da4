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
  VisitWindows(gather, slots[gather.indices], begin, end, [&](const WindowChunk& chunk) {
    VisitRuns(gather, [&](int64_t in_array, int64_t in_result) {
      char* const to = target + (chunk.other + in_result) * bytes;
      copy_runs(array + in_array * bytes, to, chunk.offsets, bytes, chunk.stride * bytes, run_bytes, chunk.size);
    });
  });
}

}  // namespace

void RunGather(const GatherWindows& gather, char* const* slots) {
  Job job{gather, slots};
  RunTasks(gather.num_windows, gather.num_windows * gather.window_elements, &GatherRange, &job);
}

}  // namespace flagos::cpu
