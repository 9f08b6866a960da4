#include "gathering.h"

namespace flagos {

bool Gathering::All(bool yes) {
  std::unique_lock<std::mutex> lock(mutex_);
  const size_t turn = turn_;
  agreed_ = agreed_ && yes;
  if (failed_.ok() && ++came_ == shares_) {
    answer_ = agreed_;
    agreed_ = true;
    came_ = 0;
    ++turn_;
    changed_.notify_all();
    return answer_;
  }
  changed_.wait(lock, [this, turn] { return turn_ != turn || !failed_.ok(); });
  if (turn_ == turn) throw Failure(failed_);
  return answer_;  // that of the next turn needs this share
}

void Gathering::Abort(const Status& status) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed_.ok()) failed_ = status;
  changed_.notify_all();
}

}  // namespace flagos
