#include "event.h"

#include <chrono>
#include <optional>

#include "api.h"
#include "call.h"
#include "context.h"
#include "log.h"
#include "python.h"
#include "threads.h"

using flagos::Ref;
using flagos::Status;

Ref<FlagosEvent> FlagosEvent::Ready() {
  static FlagosEvent* const event = [] {
    auto* made = new FlagosEvent;
    made->ready_.store(true, std::memory_order_release);
    return made;
  }();
  return Ref<FlagosEvent>::Share(event);
}

Ref<FlagosEvent> FlagosEvent::Failed(Status status) {
  auto event = flagos::Make<FlagosEvent>();
  event->status_ = std::move(status);
  event->ready_.store(true, std::memory_order_release);
  return event;
}

bool FlagosEvent::Complete(Status status) {
  std::vector<Callback> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_.load(std::memory_order_relaxed)) return false;
    status_ = std::move(status);
    ready_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    changed_.notify_all();
  }
  for (const Callback& callback : callbacks) Run(callback, status_);
  return true;
}

void FlagosEvent::CompleteAt(Ref<flagos::Point> point, Finish finish) {
  bool wanted = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    point_ = std::move(point);
    finish_ = std::move(finish);
    has_point_.store(true, std::memory_order_release);
    wanted = !callbacks_.empty();
    changed_.notify_all();
  }
  if (wanted) Defer();
}

void FlagosEvent::OnReady(Callback callback) {
  if (!ready()) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!ready_.load(std::memory_order_relaxed)) {
      callbacks_.push_back(std::move(callback));
      lock.unlock();
      if (has_point_.load(std::memory_order_acquire)) Defer();
      return;
    }
  }
  Run(callback, status_);
}

bool FlagosEvent::Poll() noexcept {
  try {
    if (!point_->Reached()) return false;
  } catch (...) {
    // The error is reported by the wait.
  }
  Resolve();
  return true;
}

void FlagosEvent::Resolve() noexcept {
  flagos::python::ReleaseGil released;
  Status status;
  try {
    point_->Wait();
  } catch (...) {
    status = flagos::StatusOfException("waiting for the device");
    flagos::python::KeepDiscarded();
  }
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (resolving_) {
      changed_.wait(lock, [this] { return ready_.load(std::memory_order_relaxed); });
      return;
    }
    resolving_ = true;
  }
  if (status.ok() && finish_) {
    try {
      finish_();
    } catch (...) {
      status = flagos::StatusOfException("after work of the device");
    }
  }
  finish_ = nullptr;  // what it held is free before anybody hears that it is done
  Complete(std::move(status));
}

void FlagosEvent::Defer() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (deferred_ || ready_.load(std::memory_order_relaxed)) return;
    deferred_ = true;
  }
  point_->completions()->Push([self = Ref<FlagosEvent>::Share(this)] { self->Resolve(); });
}

void FlagosEvent::Run(const Callback& callback, const Status& status) noexcept {
  try {
    callback(status);
  } catch (...) {
    flagos::Log(FLAGOS_LOG_ERROR, "event callback: %s",
                flagos::StatusOfException("event callback").data()->message.c_str());
  }
}

const Status& FlagosEvent::Wait() {
  if (!ready()) {
    flagos::python::ReleaseGil released;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] {
        return ready_.load(std::memory_order_relaxed) || has_point_.load(std::memory_order_relaxed);
      });
    }
    if (!ready_.load(std::memory_order_acquire)) Resolve();
  }
  return status_;
}

bool FlagosEvent::WaitFor(int64_t timeout_ns) {
  if (ready()) return true;
  // Beyond a century the clock's arithmetic overflows, and nobody can tell the difference.
  constexpr int64_t kCentury = int64_t{100} * 365 * 24 * 3600 * 1000000000;
  flagos::python::ReleaseGil released;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(std::min(timeout_ns, kCentury));
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool begun = changed_.wait_until(lock, deadline, [this] {
      return ready_.load(std::memory_order_relaxed) || has_point_.load(std::memory_order_relaxed);
    });
    if (!begun) return false;
  }
  // Devices have no wait that ends early: another thread waits for the point.
  if (!ready_.load(std::memory_order_acquire)) Defer();
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_until(lock, deadline, [this] { return ready_.load(std::memory_order_relaxed); });
}

namespace flagos {

Ref<Event> WhenAll(const std::vector<Ref<Event>>& events) {
  struct Join {
    std::vector<Ref<Event>> events;
    Ref<Event> done = Make<Event>();
    std::atomic<size_t> left;
  };
  auto join = std::make_shared<Join>();
  for (const Ref<Event>& event : events) {
    if (!event->ready() || !event->status().ok()) join->events.push_back(event);
  }
  if (join->events.empty()) return Event::Ready();
  join->left = join->events.size();
  // The callbacks keep `join` alive; indexing a copy because the last callback may run inside the loop.
  const std::vector<Ref<Event>> waited = join->events;
  for (const Ref<Event>& event : waited) {
    event->OnReady([join](const Status&) {
      if (join->left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      Status first;
      for (const Ref<Event>& done : join->events) {
        if (first.ok()) first = done->status();
      }
      join->events.clear();
      join->done->Complete(std::move(first));
    });
  }
  return join->done;
}

namespace api {

FlagosError* event_create(FlagosEventCreateArgs* host) {
  return Enter("event_create", host, [](FlagosEventCreateArgs& args) {
    FLAGOS_REQUIRE_FIELD(args, event);
    FLAGOS_REQUIRE(args, context);
    auto event = Make<Event>();
    event->set_by_host = true;
    args.event = event.Detach();
  });
}

void event_destroy(FlagosEvent* event) {
  if (event == nullptr) return;
  auto reference = Ref<Event>::Adopt(event);
  if (event->set_by_host && !event->ready()) {
    // Its only setter is gone: whoever waits would wait for ever.
    event->Complete(Status(FLAGOS_CANCELLED, "the host destroyed the event without setting it; call event_set first"));
  }
}

FlagosError* event_set(FlagosEventSetArgs* host) {
  return Enter("event_set", host, [](FlagosEventSetArgs& args) {
    Status status = TakeError(args.error);
    FLAGOS_REQUIRE(args, event);
    if (!args.event->set_by_host) {
      Fail(FLAGOS_FAILED_PRECONDITION,
           "event_set: this event is completed by the backend; only events of event_create "
           "can be set");
    }
    auto reference = Ref<Event>::Share(args.event);
    if (!args.event->Complete(std::move(status))) {
      Fail(FLAGOS_FAILED_PRECONDITION, "event_set: the event was set before; an event completes once");
    }
  });
}

FlagosError* event_query(FlagosEventQueryArgs* host) {
  return Enter("event_query", host, [](FlagosEventQueryArgs& args) {
    FLAGOS_REQUIRE(args, event);
    args.is_ready = args.event->ready() ? 1 : 0;
    args.error = nullptr;
    if (args.is_ready && args.struct_size >= offsetof(FlagosEventQueryArgs, error) + sizeof(args.error)) {
      args.error = NewError(args.event->status());
    }
  });
}

FlagosError* event_await(FlagosEventAwaitArgs* host) {
  return Enter("event_await", host, [](FlagosEventAwaitArgs& args) {
    FLAGOS_REQUIRE(args, event);
    auto reference = Ref<Event>::Share(args.event);
    // Only what is not there yet is a wait.
    const Ref<Context> recording = args.event->ready() ? Ref<Context>() : RecordingContext();
    std::optional<ScopedSpan> span;
    if (recording) span.emplace(recording->profiler, SpanCategory::kWait, "event_await", SpanFacts{});
    // A host whose struct has no timeout waits for ever.
    const bool timed = args.struct_size >= sizeof(FlagosEventAwaitArgs) && args.timeout_ns >= 0;
    if (!timed) {
      args.event->Wait();
    } else if (!args.event->WaitFor(args.timeout_ns)) {
      Fail(FLAGOS_DEADLINE_EXCEEDED, "event_await: not complete after %lld ns; wait longer or use event_on_ready",
           static_cast<long long>(args.timeout_ns));
    }
    if (!args.event->status().ok()) throw Failure(args.event->status());
  });
}

FlagosError* event_on_ready(FlagosEventOnReadyArgs* host) {
  return Enter("event_on_ready", host, [](FlagosEventOnReadyArgs& args) {
    FLAGOS_REQUIRE(args, event);
    FLAGOS_REQUIRE(args, callback);
    auto reference = Ref<Event>::Share(args.event);
    args.event->OnReady([callback = args.callback, user_data = args.user_data](const Status& status) {
      callback(user_data, NewError(status));
    });
  });
}

}  // namespace api
}  // namespace flagos
