// Something that will have happened: completes once, with success or an error, and then calls whoever asked.
#ifndef FLAGOS_NATIVE_EVENT_H_
#define FLAGOS_NATIVE_EVENT_H_

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "error.h"
#include "point.h"
#include "ref.h"

namespace flagos {
class DeviceQueue;
}

struct FlagosEvent final : flagos::RefCounted<FlagosEvent> {
 public:
  using Callback = std::function<void(const flagos::Status&)>;

  FlagosEvent() = default;
  ~FlagosEvent() = default;

  // The one event that has always been complete. Shared by everybody, so that what is ready costs nothing.
  static flagos::Ref<FlagosEvent> Ready();
  static flagos::Ref<FlagosEvent> Failed(flagos::Status status);

  // False: it was complete already, and nothing changed. Callbacks run here, with no lock held.
  bool Complete(flagos::Status status);

  // Leaves it to the device to complete this: when `point` is reached, after `finish` has run in the thread that finds
  // out first. Nobody watches a point that nobody asks for.
  using Finish = std::function<void()>;
  void CompleteAt(flagos::Ref<flagos::Point> point, Finish finish = nullptr);

  // Asks the device where there is one. Callers hold no lock.
  bool ready() noexcept {
    return ready_.load(std::memory_order_acquire) || (has_point_.load(std::memory_order_acquire) && Poll());
  }
  // Whether somebody has found it ready already. Any lock may be held.
  bool is_complete() const noexcept { return ready_.load(std::memory_order_acquire); }
  // Why it failed; only once ready.
  const flagos::Status& status() const noexcept { return status_; }

  // Runs callback once complete, at once if it is. An exception in a callback is a defect and ends in the log.
  void OnReady(Callback callback);

  // Blocks, without the interpreter lock. Callers keep a reference meanwhile.
  const flagos::Status& Wait();
  // False: the time ran out.
  bool WaitFor(int64_t timeout_ns);

  // An event that the host completes with event_set.
  bool set_by_host = false;

  // The queue in which the task stands that completes this, and before which nothing stands that waits for anybody but
  // other queues: what comes later in that queue need not wait. NULL: none. With the mutex of the LaunchOrder.
  const flagos::DeviceQueue* queue = nullptr;

 private:
  static void Run(const Callback& callback, const flagos::Status& status) noexcept;
  bool Poll() noexcept;
  // Waits for the point and completes.
  void Resolve() noexcept;
  // Has another thread resolve this, once.
  void Defer();

  std::atomic<bool> ready_{false};
  std::atomic<bool> has_point_{false};
  flagos::Ref<flagos::Point> point_;  // does not change once has_point_
  Finish finish_;
  bool resolving_ = false;
  bool deferred_ = false;
  flagos::Status status_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Callback> callbacks_;
};

namespace flagos {

using Event = ::FlagosEvent;

// Complete when all of `events` are; fails with the first error in their order.
Ref<Event> WhenAll(const std::vector<Ref<Event>>& events);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_EVENT_H_
