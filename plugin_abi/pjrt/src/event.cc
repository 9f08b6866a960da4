#include "event.h"

#include <memory>
#include <utility>

#include "api.h"

struct PJRT_Event {
  // Of a backend event; api outlives it. A null handle without host is complete.
  flagos_pjrt::Ref<PJRT_Client> client;
  flagos_pjrt::OwnedEvent handle;
  std::atomic<bool> succeeded{false};  // what a query found, so that the next one need not ask the backend
  flagos_pjrt::Ref<flagos_pjrt::HostEvent> host;
};

namespace flagos_pjrt {
namespace {

struct PendingCallback {
  const FlagosApi* api;
  PJRT_Event_OnReadyCallback callback;
  void* user_arg;
};

void OnBackendEvent(void* data, FlagosError* error) {
  const std::unique_ptr<PendingCallback> pending(static_cast<PendingCallback*>(data));
  const BackendCallbackScope scope;
  pending->callback(TakeError(*pending->api, error), pending->user_arg);
}

// Whether event is complete; then *error is why it failed, or null.
PJRT_Error* Query(PJRT_Event* event, bool* ready, PJRT_Error** error) {
  *error = nullptr;
  if (event->host) {
    *ready = event->host->IsReady();
    if (*ready) *error = event->host->Error();
    return nullptr;
  }
  *ready = event->handle == nullptr || event->succeeded.load(std::memory_order_acquire);
  if (*ready) return nullptr;
  auto query = MakeArgs<FlagosEventQueryArgs>();
  query.event = event->handle.get();
  const FlagosApi& api = *event->client->api;
  FLAGOS_RETURN_IF_ERROR(TakeError(api, api.event_query(&query)));
  *ready = query.is_ready != 0;
  *error = TakeError(api, query.error);
  if (*ready && *error == nullptr) event->succeeded.store(true, std::memory_order_release);
  return nullptr;
}

}  // namespace

PJRT_Error* HostEvent::Set(int32_t code, std::string_view message) {
  std::vector<Waiter> waiters;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (IsReady()) {
      return MakeError(FLAGOS_FAILED_PRECONDITION, "PJRT_Event_Set: the event is complete already.");
    }
    code_ = code;
    message_ = message;
    waiters.swap(waiters_);
    ready_.store(true, std::memory_order_release);
  }
  completed_.notify_all();
  for (const Waiter& waiter : waiters) waiter.callback(Error(), waiter.user_arg);
  return nullptr;
}

PJRT_Error* HostEvent::Error() const { return code_ == FLAGOS_OK ? nullptr : MakeError(code_, message_); }

PJRT_Error* HostEvent::Await() {
  std::unique_lock<std::mutex> lock(mutex_);
  completed_.wait(lock, [this] { return IsReady(); });
  return Error();
}

void HostEvent::OnReady(PJRT_Event_OnReadyCallback callback, void* user_arg) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!IsReady()) {
      waiters_.push_back({callback, user_arg});
      return;
    }
  }
  callback(Error(), user_arg);
}

PJRT_Event* WrapEvent(PJRT_Client* client, FlagosEvent* event) {
  OwnedEvent handle(event, Destroyer{client->api});
  return new PJRT_Event{Ref<PJRT_Client>::Share(client), std::move(handle), {}, {}};
}

PJRT_Event* WrapEvent(Ref<HostEvent> event) {
  return new PJRT_Event{{}, OwnedEvent(nullptr, Destroyer{nullptr}), {}, std::move(event)};
}

PJRT_Error* PJRT_Event_Destroy(PJRT_Event_Destroy_Args* args) {
  delete args->event;
  return nullptr;
}

PJRT_Error* PJRT_Event_IsReady(PJRT_Event_IsReady_Args* args) {
  PJRT_Error* error = nullptr;
  FLAGOS_RETURN_IF_ERROR(Query(args->event, &args->is_ready, &error));
  if (error != nullptr) DestroyError(error);
  return nullptr;
}

PJRT_Error* PJRT_Event_Error(PJRT_Event_Error_Args* args) {
  bool ready = false;
  PJRT_Error* error = nullptr;
  FLAGOS_RETURN_IF_ERROR(Query(args->event, &ready, &error));
  if (!ready) {
    return MakeError(FLAGOS_FAILED_PRECONDITION,
                     "PJRT_Event_Error: the event is not complete yet. Wait for it with PJRT_Event_Await first.");
  }
  return error;
}

PJRT_Error* PJRT_Event_Await(PJRT_Event_Await_Args* args) {
  PJRT_Event* event = args->event;
  if (event->host) return event->host->Await();
  if (event->handle == nullptr || event->succeeded.load(std::memory_order_acquire)) return nullptr;
  auto wait = MakeArgs<FlagosEventAwaitArgs>();
  wait.event = event->handle.get();
  wait.timeout_ns = -1;
  return TakeError(*event->client->api, event->client->api->event_await(&wait));
}

PJRT_Error* PJRT_Event_OnReady(PJRT_Event_OnReady_Args* args) {
  if (args->callback == nullptr) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, "PJRT_Event_OnReady: the callback is NULL.");
  }
  PJRT_Event* event = args->event;
  // The callback may destroy the event, so nothing below touches it once a callback can run.
  if (event->host) {
    const Ref<HostEvent> host = event->host;
    host->OnReady(args->callback, args->user_arg);
    return nullptr;
  }
  if (event->handle == nullptr || event->succeeded.load(std::memory_order_acquire)) {
    args->callback(nullptr, args->user_arg);
    return nullptr;
  }
  const FlagosApi* api = event->client->api;
  auto pending = std::make_unique<PendingCallback>(PendingCallback{api, args->callback, args->user_arg});
  auto on_ready = MakeArgs<FlagosEventOnReadyArgs>();
  on_ready.event = event->handle.get();
  on_ready.callback = &OnBackendEvent;
  on_ready.user_data = pending.get();
  // Until the registration is known to have failed, the callback owns pending.
  PendingCallback* registered = pending.release();
  PJRT_Error* error = TakeError(*api, api->event_on_ready(&on_ready));
  if (error != nullptr) delete registered;
  return error;
}

PJRT_Error* PJRT_Event_Create(PJRT_Event_Create_Args* args) {
  args->event = WrapEvent(Ref<HostEvent>::Adopt(new HostEvent));
  return nullptr;
}

PJRT_Error* PJRT_Event_Set(PJRT_Event_Set_Args* args) {
  if (!args->event->host) {
    return MakeError(FLAGOS_FAILED_PRECONDITION,
                     "PJRT_Event_Set: only an event from PJRT_Event_Create can be set; this one is the device's.");
  }
  // The event may be destroyed by a callback that Set runs.
  const Ref<HostEvent> host = args->event->host;
  return host->Set(args->error_code, std::string_view(args->error_message, args->error_message_size));
}

}  // namespace flagos_pjrt
