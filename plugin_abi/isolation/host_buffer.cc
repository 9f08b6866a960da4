// The host's side of buffers, but for moving their contents: host_transfer.cc.
#include "objects.h"

namespace flagos_isolation {
namespace {

// Makes a call that makes one buffer of `context`.
Status RequestBuffer(FlagosContext* context, Call* call, FlagosBuffer** buffer) {
  const uint64_t id = context->link->NewIds();
  call->made = {static_cast<int64_t>(id)};
  Reply reply;
  FLAGOS_RETURN_IF_ERROR(context->link->Request(*call, &reply));
  if (reply.buffers.size() != 1) return context->link->Malformed("no buffer where there must be one");
  return NewBuffer(context, id, std::move(reply.buffers[0]), buffer);
}

FlagosError* BufferAllocate(FlagosBufferAllocateArgs* args) {
  return Enter("buffer_allocate", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("buffer_allocate", buffer);
    Call call;
    call.method = Method::kBufferAllocate;
    FLAGOS_RETURN_IF_ERROR(
        PlaceCall("buffer_allocate", &call, args->context, args->memory, args->dims, args->rank, args->element_type));
    return RequestBuffer(args->context, &call, &args->buffer);
  });
}

FlagosError* BufferView(FlagosBufferViewArgs* args) {
  return Enter("buffer_view", args, [] { return NotIsolated("buffer_view, memory that somebody else owns,"); });
}

FlagosError* BufferPointer(FlagosBufferPointerArgs* args) {
  return Enter("buffer_pointer", args,
               [] { return NotIsolated("buffer_pointer, as DLPack and views of arrays need it,"); });
}

FlagosError* BufferPromise(FlagosBufferPromiseArgs* args) {
  return Enter("buffer_promise", args, [&]() -> Status {
    Call call;
    call.method = Method::kBufferPromise;
    call.error = TakeError(args->error);
    FLAGOS_NEED_ROOM("buffer_promise", buffer);
    FLAGOS_RETURN_IF_ERROR(
        PlaceCall("buffer_promise", &call, args->context, args->memory, args->dims, args->rank, args->element_type));
    FLAGOS_RETURN_IF_ERROR(RequestBuffer(args->context, &call, &args->buffer));
    if (call.error == nullptr) {
      args->buffer->is_promise = true;
      args->context->link->Owe(1);
    }
    return nullptr;
  });
}

FlagosError* BufferFulfill(FlagosBufferFulfillArgs* args) {
  return Enter("buffer_fulfill", args, [&]() -> Status {
    Call call;
    call.method = Method::kBufferFulfill;
    call.error = TakeError(args->error);
    FLAGOS_NEED(args->promise != nullptr, "buffer_fulfill: no promise");
    FLAGOS_NEED((args->source != nullptr) != (call.error != nullptr), "buffer_fulfill: a source or an error, not both");
    FLAGOS_NEED(args->source == nullptr || args->source->context == args->promise->context,
                "buffer_fulfill: the source is of another context");
    call.object = args->promise->id;
    call.other = args->source != nullptr ? args->source->id : 0;
    Reply reply;
    FLAGOS_RETURN_IF_ERROR(args->promise->context->link->Request(call, &reply));
    if (args->promise->is_promise.exchange(false)) args->promise->context->link->Owe(-1);
    return nullptr;
  });
}

FlagosError* BufferDescribe(FlagosBufferDescribeArgs* args) {
  return Enter("buffer_describe", args, [&]() -> Status {
    FLAGOS_NEED(args->buffer != nullptr, "buffer_describe: no buffer");
    const FlagosBuffer& buffer = *args->buffer;
    args->dims = buffer.described.dims.data();
    args->rank = buffer.described.dims.size();
    args->size_bytes = static_cast<size_t>(buffer.described.size_bytes);
    args->device = buffer.device;
    args->memory = buffer.memory;
    args->element_type = static_cast<int32_t>(buffer.described.element_type);
    args->is_deleted = buffer.is_deleted ? 1 : 0;
    return nullptr;
  });
}

FlagosError* BufferReadyEvent(FlagosBufferReadyEventArgs* args) {
  return Enter("buffer_ready_event", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("buffer_ready_event", event);
    FLAGOS_NEED(args->buffer != nullptr, "buffer_ready_event: no buffer");
    FlagosBuffer& buffer = *args->buffer;
    Link& link = *buffer.context->link;
    if (buffer.described.is_ready && !buffer.is_deleted && link.alive()) {
      args->event = ReadyEvent(buffer.context);
      return nullptr;
    }
    Call call;
    call.method = Method::kBufferReadyEvent;
    call.object = buffer.id;
    call.event = link.NewIds();
    std::shared_ptr<EventState> state = link.Expect(call.event);
    Reply reply;
    if (Status status = link.Request(call, &reply); status != nullptr) {
      link.Complete(call.event, status, {});
      return status;
    }
    args->event = NewEvent(buffer.context, std::move(state), call.event);
    return nullptr;
  });
}

FlagosError* BufferCopy(FlagosBufferCopyArgs* args) {
  return Enter("buffer_copy", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("buffer_copy", copy);
    FLAGOS_NEED(args->buffer != nullptr && args->memory != nullptr, "buffer_copy: no buffer or no memory");
    FLAGOS_NEED(args->memory->context == args->buffer->context, "buffer_copy: the memory is of another context");
    Call call;
    call.method = Method::kBufferCopy;
    call.object = args->buffer->id;
    call.memory = args->memory->index + 1;
    return RequestBuffer(args->buffer->context, &call, &args->copy);
  });
}

FlagosError* BufferBitcast(FlagosBufferBitcastArgs* args) {
  return Enter("buffer_bitcast", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("buffer_bitcast", view);
    FLAGOS_NEED(args->buffer != nullptr, "buffer_bitcast: no buffer");
    Call call;
    call.method = Method::kBufferBitcast;
    FlagosBuffer& buffer = *args->buffer;
    FLAGOS_RETURN_IF_ERROR(
        PlaceCall("buffer_bitcast", &call, buffer.context, buffer.memory, args->dims, args->rank, args->element_type));
    call.object = buffer.id;
    return RequestBuffer(buffer.context, &call, &args->view);
  });
}

FlagosError* BufferDelete(FlagosBufferDeleteArgs* args) {
  return Enter("buffer_delete", args, [&]() -> Status {
    FLAGOS_NEED(args->buffer != nullptr, "buffer_delete: no buffer");
    Call call;
    call.method = Method::kBufferDelete;
    call.object = args->buffer->id;
    Reply reply;
    Link& link = *args->buffer->context->link;
    // What a child that has ended had is given up already.
    if (Status status = link.Request(call, &reply); status != nullptr && link.alive()) return status;
    args->buffer->is_deleted = true;
    return nullptr;
  });
}

FlagosError* BufferHold(FlagosBufferHoldArgs* args) {
  return Enter("buffer_hold", args, [&]() -> Status {
    FLAGOS_NEED(args->buffer != nullptr, "buffer_hold: no buffer");
    Call call;
    call.method = Method::kBufferHold;
    call.object = args->buffer->id;
    call.number = args->delta;
    Reply reply;
    return args->buffer->context->link->Request(call, &reply);
  });
}

FlagosError* BufferDonate(FlagosBufferDonateArgs* args) {
  return Enter("buffer_donate", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("buffer_donate", donated);
    FLAGOS_NEED(args->buffer != nullptr && args->dependency != nullptr, "buffer_donate: no buffer or no dependency");
    FLAGOS_NEED(args->dependency->context == args->buffer->context, "buffer_donate: the event is of another context");
    Call call;
    call.method = Method::kBufferDonate;
    call.object = args->buffer->id;
    // The child lets go of an event of its own that has completed; how it did is known here, if not yet then soon.
    Status status;
    if (!args->dependency->state->Query(&status)) call.other = args->dependency->id;
    while (true) {
      call.error = status;
      Status failed = RequestBuffer(args->buffer->context, &call, &args->donated);
      if (failed == nullptr) break;
      if (failed->code != FLAGOS_NOT_FOUND || call.other == 0) return failed;
      call.other = 0;
      args->dependency->state->Await(-1, &status);
    }
    args->buffer->is_deleted = true;
    return nullptr;
  });
}

}  // namespace

int64_t ElementSize(int32_t element_type) {
  switch (element_type) {
    case FLAGOS_TYPE_TOKEN:
      return 0;
    case FLAGOS_TYPE_S16:
    case FLAGOS_TYPE_U16:
    case FLAGOS_TYPE_F16:
    case FLAGOS_TYPE_BF16:
      return 2;
    case FLAGOS_TYPE_S32:
    case FLAGOS_TYPE_U32:
    case FLAGOS_TYPE_F32:
      return 4;
    case FLAGOS_TYPE_S64:
    case FLAGOS_TYPE_U64:
    case FLAGOS_TYPE_F64:
    case FLAGOS_TYPE_C64:
      return 8;
    case FLAGOS_TYPE_C128:
      return 16;
    default:
      break;
  }
  const bool is_byte = element_type > FLAGOS_TYPE_INVALID && element_type <= FLAGOS_TYPE_F8E8M0FNU &&
                       (element_type < 13 || element_type > 14);
  return is_byte ? 1 : -1;
}

Status DenseSize(const int64_t* dims, size_t rank, int64_t element_type, int64_t* size) {
  constexpr size_t kMaxRank = 64;
  *size = element_type >= 0 && element_type <= INT32_MAX ? ElementSize(static_cast<int32_t>(element_type)) : -1;
  FLAGOS_NEED(*size >= 0, "no array has element_type " + std::to_string(element_type));
  FLAGOS_NEED(element_type != FLAGOS_TYPE_TOKEN || rank == 0, "a token has no dimensions");
  FLAGOS_NEED(rank <= kMaxRank, "no array has rank " + std::to_string(rank));
  bool is_empty = false;
  for (size_t i = 0; i < rank; ++i) {
    const std::string dimension = "dims[" + std::to_string(i) + "]";
    FLAGOS_NEED(dims[i] >= 0, dimension + " is " + std::to_string(dims[i]));
    is_empty = is_empty || dims[i] == 0;
    FLAGOS_NEED(dims[i] == 0 || !__builtin_mul_overflow(*size, dims[i], size),
                "the size of the array overflows at " + dimension);
  }
  if (is_empty) *size = 0;
  return nullptr;
}

Status PlaceCall(const std::string& function, Call* call, const FlagosContext* context, const FlagosMemory* memory,
                 const int64_t* dims, size_t rank, int32_t element_type) {
  FLAGOS_NEED(context != nullptr && memory != nullptr, function + ": a buffer needs a context and a memory");
  FLAGOS_NEED(memory->context == context, function + ": the memory is of another context");
  FLAGOS_NEED(dims != nullptr || rank == 0, function + ": the dimensions are missing");
  int64_t size = 0;
  if (const Status status = DenseSize(dims, rank, element_type, &size); status != nullptr) {
    return Wrong(function + ": " + status->message);
  }
  call->memory = memory->index + 1;
  call->dims.assign(dims, dims + rank);
  call->element_type = element_type;
  call->size = size;
  return nullptr;
}

Status NewBuffer(FlagosContext* context, uint64_t id, Buffer described, FlagosBuffer** buffer) {
  const int64_t device = described.device - 1;
  const int64_t memory = described.memory - 1;
  const auto is_index = [](int64_t index, size_t count) { return index >= 0 && static_cast<uint64_t>(index) < count; };
  int64_t size = 0;
  if (!is_index(device, context->devices.size()) || !is_index(memory, context->memories.size()) ||
      DenseSize(described.dims.data(), described.dims.size(), described.element_type, &size) != nullptr ||
      size != described.size_bytes) {
    return context->link->Malformed("a buffer that cannot be");
  }
  auto made = std::make_unique<FlagosBuffer>();
  made->context = context;
  made->id = id;
  made->described = std::move(described);
  made->device = context->devices[static_cast<size_t>(device)].get();
  made->memory = context->memories[static_cast<size_t>(memory)].get();
  *buffer = made.release();
  return nullptr;
}

void DestroyBuffer(FlagosBuffer* buffer) {
  if (buffer == nullptr) return;
  buffer->context->link->Release(buffer->id, buffer->described.size_bytes);
  if (buffer->is_promise) buffer->context->link->Owe(-1);
  delete buffer;
}

void FillBuffers(FlagosApi* api) {
  api->buffer_allocate = BufferAllocate;
  api->buffer_view = BufferView;
  api->buffer_promise = BufferPromise;
  api->buffer_fulfill = BufferFulfill;
  api->buffer_destroy = DestroyBuffer;
  api->buffer_describe = BufferDescribe;
  api->buffer_ready_event = BufferReadyEvent;
  api->buffer_copy = BufferCopy;
  api->buffer_bitcast = BufferBitcast;
  api->buffer_delete = BufferDelete;
  api->buffer_hold = BufferHold;
  api->buffer_pointer = BufferPointer;
  api->buffer_donate = BufferDonate;
}

}  // namespace flagos_isolation
