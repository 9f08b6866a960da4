#include "barrier.h"

namespace flagos {

bool Barrier::All(bool yes) {
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t generation = generation_;
  agreed_ = agreed_ && yes;
  if (failed_.ok() && ++came_ == shares_) {
    answer_ = agreed_;
    agreed_ = true;
    came_ = 0;
    ++generation_;
    changed_.notify_all();
    return answer_;
  }
  changed_.wait(lock, [this, generation] { return generation_ != generation || !failed_.ok(); });
  if (generation_ == generation) throw Failure(failed_);
  return answer_;  // that of the next generation needs this share
}

void Barrier::Abort(const Status& status) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.ok()) failed_ = status;
  changed_.notify_all();
}

}  // namespace flagos
