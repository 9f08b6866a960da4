// Whether integers lie in a range: a pass that only tells whether all do, so that it is vectorised.
#include <atomic>
#include <cstring>

#include "cpu/run_loop.h"
#include "cpu/tiles.h"

namespace flagos::cpu {
namespace {

struct Job {
  const Call::IndexCheck& check;
  const char* indices;
  std::atomic<bool> all_inside{true};
};

// The sign of either difference is set where an index lies outside: bounds are so small that no difference of an index
// inside overflows, and one that does is of an index that the other difference tells.
template <class T>
void CheckRange(void* user, int64_t begin, int64_t end) {
  Job& job = *static_cast<Job*>(user);
  const uint64_t low = static_cast<uint64_t>(job.check.low), last = static_cast<uint64_t>(job.check.high - 1);
  const char* const from = job.indices;
  uint64_t outside = 0;
  for (int64_t i = begin; i < end; ++i) {
    T index;
    std::memcpy(&index, from + i * static_cast<int64_t>(sizeof(T)), sizeof index);
    const uint64_t wide = static_cast<uint64_t>(static_cast<int64_t>(index));
    outside |= (wide - low) | (last - wide);
  }
  if (static_cast<int64_t>(outside) < 0) job.all_inside.store(false, std::memory_order_relaxed);
}

}  // namespace

bool AllInside(const Call::IndexCheck& check, const char* indices) {
  Job job{check, indices};
  RunTasks(check.count, check.count, check.type == Type::kS32 ? &CheckRange<int32_t> : &CheckRange<int64_t>, &job);
  return job.all_inside.load(std::memory_order_relaxed);
}

}  // namespace flagos::cpu
