// Reads the words of gathers and scatters: how windows stand in an array and in their result or updates.
#include <limits>

#include "cpu/parse.h"

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

Parser::WindowReach Parser::ParseWindows(IndexedWindows& windows, bool drops) {
  WindowReach reach;
  windows.element_bytes = Word();
  Require(windows.element_bytes > 0 && windows.element_bytes <= 16, "bad element size");
  const Type index_type = ParseType();
  const Kernels& kernels = SelectKernels();
  windows.start = (drops ? kernels.kept_start : kernels.clamped_start)[static_cast<size_t>(index_type)];
  Require(windows.start != nullptr, "indices are integers");
  windows.index_bytes = TypeBytes(index_type);
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
  windows.index_vector_stride = Word();
  const int64_t num_starts = Count();
  for (int64_t i = 0; i < num_starts; ++i) {
    const IndexedWindows::Start start{Word(), Word()};
    Require(start.limit >= 0 && start.limit < std::numeric_limits<int64_t>::max(), "a window is larger than its array");
    reach.array.Add(start.limit + 1, start.array_stride);
    windows.starts.push_back(start);
  }
  if (num_starts > 0) reach.indices.Add(num_starts, windows.index_vector_stride);
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

void Parser::CheckWindows(const WindowReach& reach, const IndexedWindows& windows, int64_t array, int64_t indices,
                          int64_t other) const {
  CheckAccess(array, windows.element_bytes, 0, reach.array.sizes, reach.array.strides);
  CheckAccess(indices, windows.index_bytes, 0, reach.indices.sizes, reach.indices.strides);
  CheckAccess(other, windows.element_bytes, 0, reach.other.sizes, reach.other.strides);
}

GatherWindows Parser::ParseGather() {
  GatherWindows gather;
  const WindowReach reach = ParseWindows(gather, /*drops=*/false);
  const std::vector<int64_t> sources = ReadableSlots(), targets = WritableSlots();
  Require(Count() == 0 && sources.size() == 2 && targets.size() == 1, "a gather has two operands and one result");
  gather.array = sources[0];
  gather.indices = sources[1];
  gather.target = targets[0];
  CheckWindows(reach, gather, gather.array, gather.indices, gather.target);
  return gather;
}

ScatterWindows Parser::ParseScatter() {
  ScatterWindows scatter;
  const WindowReach reach = ParseWindows(scatter, /*drops=*/true);
  const int64_t combine = Word();
  scatter.combine = nullptr;
  if (combine >= 0) {
    const Type type = ParseType();
    Require(combine < kNumCombines && TypeBytes(type) == scatter.element_bytes, "a scatter that does not exist");
    scatter.combine = SelectKernels().scatter[combine][static_cast<size_t>(type)];
    Require(scatter.combine != nullptr, "a scatter that does not exist");
  }
  const int64_t split = Word(), dimension = Word();
  scatter.split = static_cast<ScatterWindows::Split>(split);
  scatter.split_dimension = static_cast<size_t>(dimension);
  const size_t choices = scatter.split == ScatterWindows::Split::kBatch    ? scatter.batch.size()
                         : scatter.split == ScatterWindows::Split::kWindow ? scatter.outer.size()
                                                                           : 1;
  Require(split >= 0 && split <= 3 && dimension >= 0 && scatter.split_dimension < choices,
          "threads share a dimension that is not there");
  scatter.windows_first = Word() != 0;
  const std::vector<int64_t> sources = ReadableSlots(), targets = WritableSlots();
  Require(Count() == 0 && sources.size() == 3 && targets.size() == 1, "a scatter has three operands and one result");
  scatter.array = sources[0];
  scatter.indices = sources[1];
  scatter.updates = sources[2];
  scatter.target = targets[0];
  scatter.array_bytes = SlotBytes(scatter.array);
  Require(SlotBytes(scatter.target) == scatter.array_bytes, "a result has the wrong size");
  Require(scatter.target != scatter.indices && scatter.target != scatter.updates, "a scatter writes over its updates");
  CheckWindows(reach, scatter, scatter.target, scatter.indices, scatter.updates);
  return scatter;
}

}  // namespace flagos::cpu
