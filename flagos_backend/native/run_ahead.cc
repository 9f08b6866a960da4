#include "run_ahead.h"

#include <algorithm>

namespace flagos {
namespace {

// How long the caller waits in vain. Steps of a training over several processes take seconds, and are no wait in vain.
constexpr int64_t kHostPatienceNs = 1000000000;
constexpr int64_t kProcessesPatienceNs = 10 * kHostPatienceNs;
constexpr size_t kMaxAllowance = 16;

}  // namespace

bool RunAhead::Fits(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  return Within(bytes, limits_.launches);
}

void RunAhead::Admit(size_t bytes, WaitsFor worst) {
  Prune();
  std::unique_lock<std::mutex> lock(mutex_);
  // Once full, it waits for half of the launches: one wait for many short ones.
  const size_t launches = Within(bytes, limits_.launches) ? limits_.launches : (limits_.launches + 1) / 2;
  while (!Within(bytes, launches)) {
    const Ref<Event> done = Awaited().done;
    const size_t before = launches_.size();
    lock.unlock();
    bool ended = true;
    if (worst == WaitsFor::kNothing) {
      done->Wait();
    } else {
      ended = done->WaitFor(worst == WaitsFor::kProcesses ? kProcessesPatienceNs : kHostPatienceNs);
    }
    Prune();
    lock.lock();
    if (ended || launches_.size() < before) {
      allowance_ = 1;
      continue;
    }
    launches_.clear();
    bytes_ = 0;
    allowance_ = std::min(allowance_ * 2, kMaxAllowance);
  }
}

void RunAhead::Add(Ref<Event> done, size_t bytes, WaitsFor waits_for) {
  std::lock_guard<std::mutex> lock(mutex_);
  launches_.push_back({std::move(done), bytes, waits_for});
  bytes_ += bytes;
}

WaitsFor RunAhead::Worst() {
  Prune();
  std::lock_guard<std::mutex> lock(mutex_);
  WaitsFor worst = WaitsFor::kNothing;
  for (const Launch& launch : launches_) worst = std::max(worst, launch.waits_for);
  return worst;
}

void RunAhead::Prune() {
  std::deque<Launch> asked;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    asked = launches_;
  }
  // Who finds an event ready calls those who listen: with no lock held. Launches that wait for nothing end in order, and
  // to ask a device takes time.
  bool in_order_ended = true;
  for (const Launch& launch : asked) {
    if (launch.waits_for != WaitsFor::kNothing) {
      launch.done->ready();
    } else if (in_order_ended) {
      in_order_ended = launch.done->ready();
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  launches_.erase(std::remove_if(launches_.begin(), launches_.end(),
                                 [this](const Launch& launch) {
                                   if (!launch.done->is_complete()) return false;
                                   bytes_ -= launch.bytes;
                                   return true;
                                 }),
                  launches_.end());
}

bool RunAhead::Within(size_t bytes, size_t launches) const noexcept {
  const size_t count = launches_.size();
  if (count >= launches * allowance_) return count == 0;
  return count < kFree * allowance_ || bytes_ + bytes <= limits_.bytes * allowance_;
}

const RunAhead::Launch& RunAhead::Awaited() const {
  const auto certain = std::find_if(launches_.begin(), launches_.end(),
                                    [](const Launch& launch) { return launch.waits_for == WaitsFor::kNothing; });
  return certain == launches_.end() ? launches_.front() : *certain;
}

}  // namespace flagos
