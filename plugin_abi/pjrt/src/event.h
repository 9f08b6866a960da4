// Events: of the backend, of the host (PJRT_Event_Create), or complete from the start.
#ifndef FLAGOS_PJRT_EVENT_H_
#define FLAGOS_PJRT_EVENT_H_

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "client.h"
#include "flagos_calls.h"

namespace flagos_pjrt {

// An event that this process completes itself; shared by the PJRT_Event and whoever completes it.
class HostEvent : public RefCounted {
 public:
  // Null, or FAILED_PRECONDITION when it is already complete.
  [[nodiscard]] PJRT_Error* Set(int32_t code, std::string_view message);
  bool IsReady() const { return ready_.load(std::memory_order_acquire); }
  [[nodiscard]] PJRT_Error* Error() const;  // of a complete event
  [[nodiscard]] PJRT_Error* Await();
  void OnReady(PJRT_Event_OnReadyCallback callback, void* user_arg);

 private:
  struct Waiter {
    PJRT_Event_OnReadyCallback callback;
    void* user_arg;
  };
  std::atomic<bool> ready_{false};
  std::mutex mutex_;
  std::condition_variable completed_;
  int32_t code_ = FLAGOS_OK;  // written once, before ready_
  std::string message_;
  std::vector<Waiter> waiters_;
};

// Takes over event. client is kept until the PJRT_Event goes.
PJRT_Event* WrapEvent(PJRT_Client* client, FlagosEvent* event);
PJRT_Event* WrapEvent(Ref<HostEvent> event);

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_EVENT_H_
