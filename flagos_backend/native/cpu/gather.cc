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
  const char* const array = slots[gather.array];
  char* const target = slots[gather.target];
  const int64_t bytes = gather.element_bytes, run_bytes = gather.run * bytes;
  VisitWindows(gather, slots[gather.indices], begin, end, [&](const WindowChunk& chunk) {
    WithRunBytes(run_bytes, [&](auto fixed) {
      VisitRuns(gather, [&](int64_t in_array, int64_t in_result) {
        const char* const from = array + in_array * bytes;
        char* const to = target + (chunk.other + in_result) * bytes;
        const int64_t stride = chunk.stride * bytes;
        for (int64_t i = 0; i < chunk.size; ++i)
          CopyRun(to + i * stride, from + chunk.offsets[i] * bytes, run_bytes, fixed);
      });
    });
  });
}

}  // namespace

void RunGather(const GatherWindows& gather, char* const* slots) {
  Job job{gather, slots};
  RunTasks(gather.num_windows, gather.num_windows * gather.window_elements, &GatherRange, &job);
}

}  // namespace flagos::cpu
