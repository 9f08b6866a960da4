#include "barrier.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "spin.h"

namespace flagos {
namespace {

constexpr std::chrono::microseconds kPatience{50};

bool HasProcessors(size_t shares) {
  static const size_t processors = std::max(1U, std::thread::hardware_concurrency());
  return shares <= processors;
}

}  // namespace

bool Barrier::All(bool yes) {
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t generation = generation_.load(std::memory_order_relaxed);
  agreed_ = agreed_ && yes;
  if (failed_.ok() && ++came_ == shares_) {
    answer_ = agreed_;
    agreed_ = true;
    came_ = 0;
    generation_.store(generation + 1, std::memory_order_release);
    changed_.notify_all();
    return answer_;
  }
  const auto is_over = [this, generation] { return generation_.load(std::memory_order_acquire) != generation; };
  if (failed_.ok() && HasProcessors(shares_)) {
    lock.unlock();
    ComesSoon(is_over, kPatience);
    lock.lock();
  }
  changed_.wait(lock, [this, &is_over] { return is_over() || !failed_.ok(); });
  if (!is_over()) throw Failure(failed_);
  return answer_;  // that of the next generation needs this share
}

void Barrier::Abort(const Status& status) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.ok()) failed_ = status;
  changed_.notify_all();
}

}  // namespace flagos
