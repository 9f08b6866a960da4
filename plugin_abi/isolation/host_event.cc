// The host's side of events. Whether one has completed is known here: the child says so unasked.
#include "objects.h"

namespace flagos_isolation {
namespace {

FlagosError* EventCreate(FlagosEventCreateArgs* args) {
  return Enter("event_create", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("event_create", event);
    FLAGOS_NEED(args->context != nullptr, "event_create: no context");
    Link& link = *args->context->link;
    Call call;
    call.method = Method::kEventCreate;
    call.event = link.NewIds();
    std::shared_ptr<EventState> state = link.Expect(call.event, nullptr, /*is_owed=*/false);
    Reply reply;
    if (Status status = link.Request(call, &reply); status != nullptr) {
      link.Complete(call.event, status, {});
      return status;
    }
    args->event = NewEvent(args->context, std::move(state), call.event);
    args->event->made_by_host = true;
    link.Owe(1);
    return nullptr;
  });
}

void EventDestroy(FlagosEvent* event) {
  if (event == nullptr) return;
  if (event->made_by_host) {
    Call call;
    call.method = Method::kEventDestroy;
    call.object = event->id;
    event->context->link->Post(call);
    if (!event->is_set.exchange(true)) event->context->link->Owe(-1);
  }
  delete event;
}

FlagosError* EventSet(FlagosEventSetArgs* args) {
  return Enter("event_set", args, [&]() -> Status {
    Status error = TakeError(args->error);
    FLAGOS_NEED(args->event != nullptr, "event_set: no event");
    if (!args->event->made_by_host) {
      return MakeStatus(FLAGOS_FAILED_PRECONDITION,
                        "event_set: this event is completed by the backend. Set those of event_create.");
    }
    Call call;
    call.method = Method::kEventSet;
    call.object = args->event->id;
    call.error = error;
    Reply reply;
    Link& link = *args->event->context->link;
    FLAGOS_RETURN_IF_ERROR(link.Request(call, &reply));
    if (!args->event->is_set.exchange(true)) link.Owe(-1);
    link.Complete(call.object, std::move(error), {});  // known here, without waiting for the child to say so
    return nullptr;
  });
}

FlagosError* EventQuery(FlagosEventQueryArgs* args) {
  return Enter("event_query", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("event_query", error);
    FLAGOS_NEED(args->event != nullptr, "event_query: no event");
    Status status;
    args->is_ready = args->event->state->Query(&status) ? 1 : 0;
    args->error = NewError(status);
    return nullptr;
  });
}

FlagosError* EventAwait(FlagosEventAwaitArgs* args) {
  return Enter("event_await", args, [&]() -> Status {
    FLAGOS_NEED(args->event != nullptr, "event_await: no event");
    Status status;
    if (args->event->state->Await(args->timeout_ns, &status)) return status;
    return MakeStatus(FLAGOS_DEADLINE_EXCEEDED, "event_await: the event did not complete in time");
  });
}

FlagosError* EventOnReady(FlagosEventOnReadyArgs* args) {
  return Enter("event_on_ready", args, [&]() -> Status {
    FLAGOS_NEED(args->event != nullptr && args->callback != nullptr, "event_on_ready: no event or no callback");
    args->event->state->OnReady([callback = args->callback, user_data = args->user_data](const Status& status) {
      callback(user_data, NewError(status));
    });
    return nullptr;
  });
}

}  // namespace

FlagosEvent* NewEvent(FlagosContext* context, std::shared_ptr<EventState> state, uint64_t id) {
  auto* event = new FlagosEvent;
  event->context = context;
  event->state = std::move(state);
  event->id = id;
  return event;
}

FlagosEvent* ReadyEvent(FlagosContext* context) {
  auto state = std::make_shared<EventState>();
  state->Complete(nullptr);
  return NewEvent(context, std::move(state), 0);
}

void FillEvents(FlagosApi* api) {
  api->event_create = EventCreate;
  api->event_destroy = EventDestroy;
  api->event_set = EventSet;
  api->event_query = EventQuery;
  api->event_await = EventAwait;
  api->event_on_ready = EventOnReady;
}

}  // namespace flagos_isolation
