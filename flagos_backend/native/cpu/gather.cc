// Windows of an array at starts that the program computes. A window is copied run by run.
#include <algorithm>
#include <cstring>
#include <limits>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

// A loop nest of copies in bytes: `run` bytes at every position of the outer dimensions.
class WindowCopy {
 public:
  explicit WindowCopy(const GatherWindows& gather) : outer_(gather.window), bytes_(gather.element_bytes) {
    run_ = 1;
    while (!outer_.empty() && outer_.back().array_stride == run_ && outer_.back().result_stride == run_) {
      run_ *= outer_.back().size;
      outer_.pop_back();
    }
    run_bytes_ = run_ * bytes_;
  }

  void operator()(char* to, const char* from) const { Copy(to, from, 0); }

 private:
  void Copy(char* to, const char* from, size_t dimension) const {
    if (dimension == outer_.size()) return CopyRun(to, from);
    const GatherWindows::Window& window = outer_[dimension];
    for (int64_t i = 0; i < window.size; ++i) {
      Copy(to + i * window.result_stride * bytes_, from + i * window.array_stride * bytes_, dimension + 1);
    }
  }
  // Single elements, the usual case, are cheaper without a call.
  void CopyRun(char* to, const char* from) const {
    switch (run_bytes_) {
      case 4:
        std::memcpy(to, from, 4);
        return;
      case 8:
        std::memcpy(to, from, 8);
        return;
      default:
        std::memcpy(to, from, static_cast<size_t>(run_bytes_));
    }
  }

  std::vector<GatherWindows::Window> outer_;
  int64_t bytes_, run_, run_bytes_;
};

struct Job {
  const GatherWindows& gather;
  char* const* slots;
};

void GatherRange(void* user, int64_t begin, int64_t end) {
  if (begin == end) return;
  const auto& [gather, slots] = *static_cast<const Job*>(user);
  const WindowCopy copy(gather);
  const char* const array = slots[gather.array];
  const char* const indices = slots[gather.indices];
  char* const target = slots[gather.target];
  const int64_t index_bytes = TypeBytes(gather.index_type);
  for (int64_t position = begin; position < end; ++position) {
    int64_t index = 0, from = 0, to = 0, rest = position;
    for (size_t d = gather.batch.size(); d-- > 0;) {
      const GatherWindows::Batch& batch = gather.batch[d];
      const int64_t i = d == 0 ? rest : rest % batch.size;
      rest /= batch.size;
      index += i * batch.index_stride;
      from += i * batch.array_stride;
      to += i * batch.result_stride;
    }
    for (const GatherWindows::Start& start : gather.starts) {
      const int64_t value = ReadIndex(indices + index * index_bytes, gather.index_type);
      from += std::clamp<int64_t>(value, 0, start.limit) * start.array_stride;
      index += gather.index_vector_stride;
    }
    copy(target + to * gather.element_bytes, array + from * gather.element_bytes);
  }
}

}  // namespace

int64_t ReadIndex(const char* from, Type type) {
  const auto read = [&](auto value) {
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  switch (type) {
    case Type::kS8:
      return read(int8_t{});
    case Type::kS16:
      return read(int16_t{});
    case Type::kS32:
      return read(int32_t{});
    case Type::kU8:
      return read(uint8_t{});
    case Type::kU16:
      return read(uint16_t{});
    case Type::kU32:
      return read(uint32_t{});
    case Type::kU64:
      return static_cast<int64_t>(std::min<uint64_t>(read(uint64_t{}), std::numeric_limits<int64_t>::max()));
    default:
      return read(int64_t{});
  }
}

void RunGather(const GatherWindows& gather, char* const* slots) {
  Job job{gather, slots};
  RunTasks(gather.num_windows, gather.num_windows * gather.window_elements, &GatherRange, &job);
}

}  // namespace flagos::cpu
