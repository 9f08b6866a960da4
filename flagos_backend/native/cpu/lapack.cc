#include "cpu/lapack.h"

#include <atomic>
#include <mutex>

namespace flagos::cpu {
namespace {

constexpr int64_t kTypes = 4, kRoutines = static_cast<int64_t>(LapackRoutine::kCount);

std::atomic<const std::vector<int64_t>*> found{nullptr};

}  // namespace

bool HaveLapack() { return found.load(std::memory_order_acquire) != nullptr; }

void SetLapack(const std::vector<int64_t>& addresses) {
  static std::once_flag once;
  if (addresses.size() != static_cast<size_t>(kTypes * kRoutines)) return;
  // Never freed: launches of other threads may call routines until the process ends.
  std::call_once(once, [&] { found.store(new std::vector<int64_t>(addresses), std::memory_order_release); });
}

const int64_t* LapackAddresses(int64_t element_type) {
  return found.load(std::memory_order_acquire)->data() + element_type * kRoutines;
}

}  // namespace flagos::cpu
