// Updates of windows of an array at starts that the program computes, in the order of the windows.
#include <algorithm>

#include "cpu/run_loop.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"
#include "cpu/windows.h"

namespace flagos::cpu {
namespace {

// Threads share no less of a run than these: what they write stays in lines of their own.
constexpr int64_t kLeastRun = 16;

// A part of a scatter and where it begins, in elements.
struct Part {
  ScatterWindows scatter;
  int64_t array = 0, indices = 0, updates = 0;
};

int64_t SplitSize(const ScatterWindows& scatter) {
  switch (scatter.split) {
    case Split::kNone:
      return 1;
    case Split::kBatch:
      return scatter.batch[scatter.split_dimension].size;
    case Split::kWindow:
      return scatter.outer[scatter.split_dimension].size;
    case Split::kRun:
      return std::max<int64_t>(1, scatter.run / kLeastRun);
  }
  return 1;
}

Part PartOf(const ScatterWindows& scatter, int64_t number, int64_t parts) {
  Part part{scatter};
  const int64_t size = SplitSize(scatter), begin = size * number / parts, end = size * (number + 1) / parts;
  switch (scatter.split) {
    case Split::kNone:
      break;
    case Split::kBatch: {
      IndexedWindows::Batch& batch = part.scatter.batch[scatter.split_dimension];
      part.scatter.num_windows = part.scatter.num_windows / batch.size * (end - begin);
      batch.size = end - begin;
      part.array = begin * batch.array_stride;
      part.indices = begin * batch.index_stride;
      part.updates = begin * batch.other_stride;
      break;
    }
    case Split::kWindow: {
      IndexedWindows::Window& window = part.scatter.outer[scatter.split_dimension];
      window.size = end - begin;
      part.array = begin * window.array_stride;
      part.updates = begin * window.other_stride;
      break;
    }
    case Split::kRun:
      part.array = part.updates = begin * kLeastRun;
      part.scatter.run = (end == size ? scatter.run : end * kLeastRun) - part.array;
  }
  return part;
}

template <class Update>
void VisitUpdates(const Part& part, char* const* slots, const Update& update) {
  const ScatterWindows& scatter = part.scatter;
  VisitWindows(scatter, slots, part.indices, 0, scatter.num_windows, [&](const WindowChunk& chunk) {
    if (!scatter.windows_first) {
      VisitRuns(scatter, [&](int64_t array, int64_t updates) {
        update(array, updates + chunk.other, chunk.offsets, chunk.stride, chunk.size);
      });
      return;
    }
    for (int64_t i = 0; i < chunk.size; ++i) {
      VisitRuns(scatter, [&](int64_t array, int64_t updates) {
        update(array, updates + chunk.other + i * chunk.stride, chunk.offsets + i, chunk.stride, 1);
      });
    }
  });
}

void UpdatePart(const Part& part, char* const* slots) {
  const ScatterWindows& scatter = part.scatter;
  const int64_t bytes = scatter.element_bytes, run_bytes = scatter.run * bytes;
  char* const source = slots[scatter.updates] + part.updates * bytes;
  char* const target = slots[scatter.target] + part.array * bytes;
  const auto copy_runs = CopyRunsOf</*kScatters=*/true>(run_bytes);
  VisitUpdates(part, slots, [&](int64_t array, int64_t updates, const int64_t* offsets, int64_t stride, int64_t n) {
    char *const to = target + array * bytes, *const from = source + updates * bytes;
    if (scatter.combine != nullptr) {
      scatter.combine(to, offsets, from, stride, scatter.run, n);
    } else {
      copy_runs(to, from, offsets, bytes, stride * bytes, run_bytes, n);
    }
  });
}

}  // namespace

void RunScatter(const ScatterWindows& scatter, char* const* slots) {
  if (scatter.array != scatter.target) CopyArray(slots[scatter.target], slots[scatter.array], scatter.array_bytes);
  struct Job {
    const ScatterWindows& scatter;
    char* const* slots;
    int64_t parts;
  } job{scatter, slots, std::min<int64_t>(SplitSize(scatter), ThreadPool::Shared().num_threads())};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& work = *static_cast<Job*>(user);
    for (int64_t number = begin; number < end; ++number) {
      UpdatePart(PartOf(work.scatter, number, work.parts), work.slots);
    }
  };
  RunTasks(job.parts, scatter.num_windows * scatter.window_elements, body, &job);
}

}  // namespace flagos::cpu
