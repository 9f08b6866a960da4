// Reads the bytecode of gathers and scatters: how windows stand in an array and in their result or updates.
#include <algorithm>
#include <limits>

#include "cpu/parse.h"
#include "cpu/windows.h"

namespace flagos::cpu {

// All places that windows, their elements and their indices may stand at.
struct Parser::WindowReach {
  struct Dims {
    std::vector<int64_t> sizes, strides;
    void Add(int64_t size, int64_t stride) {
      sizes.push_back(size);
      strides.push_back(stride);
    }
  };
  Dims array, indices, other;
};

Parser::WindowReach Parser::ParseWindows(IndexedWindows& windows, Type* index_type, bool drops) {
  WindowReach reach;
  windows.element_bytes = Word();
  Require(windows.element_bytes > 0 && windows.element_bytes <= 16, "bad element size");
  *index_type = ParseType();
  const Kernels& kernels = SelectKernels();
  windows.start = (drops ? kernels.kept_start : kernels.clamped_start)[static_cast<size_t>(*index_type)];
  Require(windows.start != nullptr, "indices are integers");
  windows.index_bytes = TypeBytes(*index_type);
  windows.num_windows = windows.window_elements = windows.run = 1;
  const int64_t batch_rank = Count();
  for (int64_t d = 0; d < batch_rank; ++d) {
    const IndexedWindows::Batch batch{Word(), Word(), Word(), Word()};
    Require(batch.size > 0, "windows of nothing");
    windows.num_windows = Times(windows.num_windows, batch.size);
    reach.indices.Add(batch.size, batch.index_stride);
    reach.array.Add(batch.size, batch.array_stride);
    reach.other.Add(batch.size, batch.other_stride);
    windows.batch.push_back(batch);
  }
  const int64_t vector_stride = Word();
  const int64_t num_starts = Count();
  for (int64_t i = 0; i < num_starts; ++i) {
    const IndexedWindows::Start start{-1, i * vector_stride, Word(), Word(), Word()};
    Require(start.wrap >= 0 && start.wrap >> (8 * windows.index_bytes - 1) == 0, "an index is raised by too much");
    Require(start.limit >= 0 && start.limit < std::numeric_limits<int64_t>::max(), "a window is larger than its array");
    reach.array.Add(start.limit + 1, start.array_stride);
    windows.starts.push_back(start);
  }
  const int64_t window_rank = Count();
  for (int64_t d = 0; d < window_rank; ++d) {
    const IndexedWindows::Window window{Word(), Word(), Word()};
    Require(window.size > 0, "windows of nothing");
    windows.window_elements = Times(windows.window_elements, window.size);
    reach.array.Add(window.size, window.array_stride);
    reach.other.Add(window.size, window.other_stride);
    windows.outer.push_back(window);
  }
  Require(batch_rank <= kMaxRank && num_starts <= kMaxRank && window_rank <= kMaxRank, "too many dimensions");
  if (window_rank > 0 && windows.outer.back().array_stride == 1 && windows.outer.back().other_stride == 1) {
    windows.run = windows.outer.back().size;
    windows.outer.pop_back();
  }
  return reach;
}

// indices: one slot for all numbers of an index, or one for each of them.
void Parser::CheckWindows(const WindowReach& reach, IndexedWindows& windows, int64_t array,
                          const std::vector<int64_t>& indices, int64_t other) const {
  const size_t num_starts = windows.starts.size();
  Require(indices.size() == 1 || indices.size() == num_starts, "windows have another number of indices");
  for (size_t i = 0; i < num_starts; ++i) {
    IndexedWindows::Start& start = windows.starts[i];
    start.slot = indices[indices.size() == 1 ? 0 : i];
    if (indices.size() > 1) start.offset = 0;
    CheckAccess(start.slot, windows.index_bytes, start.offset, reach.indices.sizes, reach.indices.strides);
  }
  CheckAccess(array, windows.element_bytes, 0, reach.array.sizes, reach.array.strides);
  CheckAccess(other, windows.element_bytes, 0, reach.other.sizes, reach.other.strides);
}

GatherWindows Parser::ParseGather() {
  GatherWindows gather;
  Type index_type;
  const WindowReach reach = ParseWindows(gather, &index_type, /*drops=*/false);
  std::vector<int64_t> sources = ReadableSlots();
  const std::vector<int64_t> targets = WritableSlots();
  Require(Count() == 0 && sources.size() >= 2 && targets.size() == 1, "a gather has operands and one result");
  gather.array = sources[0];
  gather.target = targets[0];
  sources.erase(sources.begin());
  CheckWindows(reach, gather, gather.array, sources, gather.target);
  ChooseTake(gather, index_type);
  return gather;
}

void Parser::ChooseTake(GatherWindows& gather, Type index_type) {
  const IndexedWindows::Batch inner = Innermost(gather);
  int64_t greatest = 0;
  const auto reaches = [&](int64_t steps, int64_t stride) {
    constexpr int64_t kGreatest = std::numeric_limits<uint32_t>::max();
    int64_t most;
    if (stride < 0 || __builtin_mul_overflow(steps, stride, &most) || most > kGreatest - greatest) return false;
    greatest += most;
    return true;
  };
  if (gather.run != 1 || inner.other_stride != 1 || !reaches(inner.size - 1, inner.array_stride)) return;
  for (const IndexedWindows::Start& start : gather.starts) {
    if (!reaches(start.limit, start.array_stride)) return;
  }
  const Kernels& kernels = SelectKernels();
  for (size_t log = 0; log < 4; ++log) {
    if (gather.element_bytes == int64_t{1} << log) gather.take = kernels.take[log];
  }
  gather.short_start = kernels.short_start[static_cast<size_t>(index_type)];
}

ScatterWindows Parser::ParseScatter() {
  ScatterWindows scatter;
  Type index_type;
  const WindowReach reach = ParseWindows(scatter, &index_type, /*drops=*/true);
  const int64_t combine = Word();
  scatter.combine = nullptr;
  if (combine >= 0) {
    const Type type = ParseType();
    Require(combine < kNumCombines && TypeBytes(type) == scatter.element_bytes, "a scatter that does not exist");
    scatter.combine = SelectKernels().scatter[combine][static_cast<size_t>(type)];
    Require(scatter.combine != nullptr, "a scatter that does not exist");
  }
  const int64_t split = Word(), dimension = Word();
  scatter.split = static_cast<Split>(split);
  scatter.split_dimension = static_cast<size_t>(dimension);
  const size_t choices = scatter.split == Split::kBatch    ? scatter.batch.size()
                         : scatter.split == Split::kWindow ? scatter.outer.size()
                                                           : 1;
  Require(split >= 0 && split <= 3 && dimension >= 0 && scatter.split_dimension < choices,
          "threads share a dimension that is not there");
  scatter.windows_first = Word() != 0;
  std::vector<int64_t> sources = ReadableSlots();
  const std::vector<int64_t> targets = WritableSlots();
  Require(Count() == 0 && sources.size() >= 3 && targets.size() == 1, "a scatter has operands and one result");
  scatter.array = sources.front();
  scatter.updates = sources.back();
  sources.erase(sources.begin());
  sources.pop_back();
  scatter.target = targets[0];
  scatter.array_bytes = SlotBytes(scatter.array);
  Require(SlotBytes(scatter.target) == scatter.array_bytes, "a result has the wrong size");
  Require(scatter.target != scatter.updates && std::count(sources.begin(), sources.end(), scatter.target) == 0,
          "a scatter writes over its updates");
  CheckWindows(reach, scatter, scatter.target, sources, scatter.updates);
  return scatter;
}

}  // namespace flagos::cpu
