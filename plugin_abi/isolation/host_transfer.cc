// The host's side of moving contents: small ones go in messages, large ones are copied from and to the child's memory, or
// through shared memory where that is not within reach.
#include <algorithm>
#include <cstring>
#include <utility>

#include "objects.h"

namespace flagos_isolation {
namespace {

// What a message carries; above it, a segment costs less than the copies through the socket.
constexpr int64_t kMaxInline = int64_t{1} << 14;

// From here on a copy by the system costs less than a second one of ours.
constexpr int64_t kMinDirect = int64_t{1} << 16;

// Whether the host copies `size` dense bytes from or to arrays of `memory` itself.
bool IsDirect(const Link& link, const FlagosMemory& memory, int64_t size) {
  const auto is_host = [](const FlagosDevice* device) { return device->described.is_host_memory; };
  return size >= kMinDirect && link.reaches_memory() && !memory.devices.empty() &&
         std::all_of(memory.devices.begin(), memory.devices.end(), is_host);
}

// Elements of less than a byte, of which the backend looks after the upper bits.
bool IsNarrow(int32_t element_type) {
  switch (element_type) {
    case FLAGOS_TYPE_S1:
    case FLAGOS_TYPE_U1:
    case FLAGOS_TYPE_S2:
    case FLAGOS_TYPE_U2:
    case FLAGOS_TYPE_S4:
    case FLAGOS_TYPE_U4:
    case FLAGOS_TYPE_F4E2M1FN:
      return true;
    default:
      return false;
  }
}

// Copies between a dense array and one that `strides` lay out. From the outermost dimension inwards.
void CopyStrided(char* dense, char* laid_out, const int64_t* dims, const int64_t* strides, size_t rank, int64_t item,
                 bool to_dense) {
  if (rank == 0) {
    const auto size = static_cast<size_t>(item);
    to_dense ? std::memcpy(dense, laid_out, size) : std::memcpy(laid_out, dense, size);
    return;
  }
  int64_t inner = item;
  for (size_t i = 1; i < rank; ++i) inner *= dims[i];
  if (rank == 1 && strides[0] == item) {
    const auto size = static_cast<size_t>(item * dims[0]);
    to_dense ? std::memcpy(dense, laid_out, size) : std::memcpy(laid_out, dense, size);
    return;
  }
  for (int64_t i = 0; i < dims[0]; ++i) {
    CopyStrided(dense + i * inner, laid_out + i * strides[0], dims + 1, strides + 1, rank - 1, item, to_dense);
  }
}

Status NoSharedMemory(int64_t size) {
  return MakeStatus(FLAGOS_RESOURCE_EXHAUSTED,
                    "no shared memory of " + std::to_string(size) +
                        " bytes for a transfer to or from the backend's process. Free memory, "
                        "or allow more of it.");
}

// Takes a segment for the contents of a call that are too large for a message. NULL in `*segment`: they are not.
Status TakeSegment(Link* link, int64_t size, Call* call, std::shared_ptr<Segment>* segment) {
  if (size <= kMaxInline) return nullptr;
  *segment = link->segments().Take(static_cast<size_t>(size));
  if (*segment == nullptr) return NoSharedMemory(size);
  call->segment = (*segment)->id();
  call->forgotten = link->segments().TakeForgotten();
  return nullptr;
}

// Sends contents that the host has put into `call.data` or into the segment, which is the host's again once the event
// `call.released` has completed.
Status Send(Link* link, Call* call, std::shared_ptr<Segment> segment, Reply* reply) {
  if (segment == nullptr) return link->Request(*call, reply);
  call->released = link->NewIds();
  Segment* lent = segment.get();
  // A buffer that was made of it may keep it for as long as the host keeps the buffer.
  link->Expect(
      call->released,
      [link, segment = std::move(segment)](Status*, const Link::Delivery&) { link->segments().Give(segment); },
      /*is_owed=*/false);
  Status status = link->Request(*call, reply, lent);
  if (status != nullptr) link->Complete(call->released, status, {});
  return status;
}

// Allocates a buffer in the child and writes it there: nobody reads it before it is returned.
Status WriteNewBuffer(Link* link, Call call, const void* data, FlagosContext* context, FlagosBuffer** buffer) {
  call.method = Method::kBufferAllocate;
  call.number = 1;
  const uint64_t id = link->NewIds();
  call.made = {static_cast<int64_t>(id)};
  Reply reply;
  FLAGOS_RETURN_IF_ERROR(link->Request(call, &reply));
  if (reply.buffers.size() != 1) return link->Malformed("no buffer where there must be one");
  FlagosBuffer* made = nullptr;
  FLAGOS_RETURN_IF_ERROR(NewBuffer(context, id, std::move(reply.buffers[0]), &made));
  Status status = made->described.size_bytes == call.size
                      ? link->WriteMemory(reply.address, data, static_cast<size_t>(call.size))
                      : link->Malformed("a buffer of another size");
  if (status != nullptr) {
    DestroyBuffer(made);
    return status;
  }
  *buffer = made;
  return nullptr;
}

FlagosError* BufferFromHost(FlagosBufferFromHostArgs* args) {
  return Enter("buffer_from_host", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("buffer_from_host", done_with_host);
    FLAGOS_NEED_ROOM("buffer_from_host", buffer);
    Call call;
    call.method = Method::kBufferFromHost;
    FLAGOS_RETURN_IF_ERROR(
        PlaceCall("buffer_from_host", &call, args->context, args->memory, args->dims, args->rank, args->element_type));
    FLAGOS_NEED(args->data != nullptr || call.size == 0, "buffer_from_host: the contents are missing");
    FLAGOS_NEED(
        args->semantics >= FLAGOS_HOST_IMMUTABLE_ONLY_DURING_CALL && args->semantics <= FLAGOS_HOST_MUTABLE_ZERO_COPY,
        "buffer_from_host: no semantics of host memory");
    Link& link = *args->context->link;
    if (args->byte_strides == nullptr && !IsNarrow(args->element_type) && IsDirect(link, *args->memory, call.size)) {
      Status status = WriteNewBuffer(&link, call, args->data, args->context, &args->buffer);
      if (status == nullptr) args->done_with_host = ReadyEvent(args->context);
      // A backend that allocates nothing, or gives no addresses, takes contents otherwise.
      if (status == nullptr || status->code != FLAGOS_UNIMPLEMENTED) return status;
    }
    std::shared_ptr<Segment> segment;
    FLAGOS_RETURN_IF_ERROR(TakeSegment(&link, call.size, &call, &segment));
    if (segment == nullptr) call.data.resize(static_cast<size_t>(call.size));
    char* place = segment != nullptr ? segment->data() : call.data.data();
    if (call.size == 0) {
    } else if (args->byte_strides == nullptr) {
      std::memcpy(place, args->data, static_cast<size_t>(call.size));
    } else {
      CopyStrided(place, static_cast<char*>(const_cast<void*>(args->data)), args->dims, args->byte_strides, args->rank,
                  ElementSize(args->element_type), /*to_dense=*/true);
    }
    const uint64_t id = link.NewIds();
    call.made = {static_cast<int64_t>(id)};
    Reply reply;
    FLAGOS_RETURN_IF_ERROR(Send(&link, &call, std::move(segment), &reply));
    if (reply.buffers.size() != 1) return link.Malformed("no buffer where there must be one");
    FLAGOS_RETURN_IF_ERROR(NewBuffer(args->context, id, std::move(reply.buffers[0]), &args->buffer));
    args->done_with_host = ReadyEvent(args->context);  // copied
    return nullptr;
  });
}

// A transfer to `data`, laid out by `strides` where they are not NULL.
struct Destination {
  char* data;
  int64_t size;
  std::vector<int64_t> dims, strides;
  int64_t item;
};

void Deliver(const Destination& to, const char* dense) {
  if (to.strides.empty()) {
    std::memcpy(to.data, dense, static_cast<size_t>(to.size));
  } else {
    CopyStrided(const_cast<char*>(dense), to.data, to.dims.data(), to.strides.data(), to.dims.size(), to.item,
                /*to_dense=*/false);
  }
}

// Makes a call that pins the memory of an array, and copies `to.size` bytes of it, which are dense there and here, once
// they are there. The event completes then.
Status ReceiveDirect(FlagosContext* context, Call* call, const Destination& to, FlagosEvent** done) {
  Link& link = *context->link;
  const uint64_t pin = link.NewIds();
  call->made = {static_cast<int64_t>(pin)};
  call->event = link.NewIds();
  Link* of = &link;
  const auto arrive = [of, pin, data = to.data, size = static_cast<size_t>(to.size)](Status* status,
                                                                                     const Link::Delivery& delivery) {
    if (*status != nullptr) return;  // the child has pinned nothing
    *status = of->ReadMemory(data, delivery.address, size);
    Call unpin;
    unpin.method = Method::kBufferUnpin;
    unpin.object = pin;
    of->Post(unpin);
  };
  std::shared_ptr<EventState> state = link.Expect(call->event, arrive);
  Reply reply;
  if (Status status = link.Request(*call, &reply); status != nullptr) {
    link.Complete(call->event, status, {});
    return status;
  }
  *done = NewEvent(context, std::move(state), call->event);
  return nullptr;
}

// Makes a call that reads `to.size` bytes; the event completes once they have been delivered.
Status Receive(FlagosBuffer* buffer, Call* call, Destination to, FlagosEvent** done) {
  FlagosContext* context = buffer->context;
  Link& link = *context->link;
  if (to.strides.empty() && IsDirect(link, *buffer->memory, to.size)) {
    Status status = ReceiveDirect(context, call, to, done);
    // A backend without views, or without addresses, has nothing to pin.
    if (status == nullptr || status->code != FLAGOS_UNIMPLEMENTED) return status;
    call->made.clear();
  }
  std::shared_ptr<Segment> segment;
  FLAGOS_RETURN_IF_ERROR(TakeSegment(&link, to.size, call, &segment));
  Segment* lent = segment.get();
  call->event = link.NewIds();
  Link* of = &link;
  std::shared_ptr<EventState> state = link.Expect(call->event, [of, segment = std::move(segment), to = std::move(to)](
                                                                   Status* status, const Link::Delivery& delivery) {
    const std::string_view data = delivery.data;
    if (*status == nullptr && segment == nullptr && data.size() != static_cast<size_t>(to.size)) {
      *status = MakeStatus(FLAGOS_DATA_LOSS, "the backend's process sent " + std::to_string(data.size()) +
                                                 " bytes where " + std::to_string(to.size) + " were asked for");
    }
    if (*status == nullptr && to.size > 0) Deliver(to, segment != nullptr ? segment->data() : data.data());
    if (segment != nullptr) of->segments().Give(segment);
  });
  Reply reply;
  if (Status status = link.Request(*call, &reply, lent); status != nullptr) {
    link.Complete(call->event, status, {});
    return status;
  }
  *done = NewEvent(context, std::move(state), call->event);
  return nullptr;
}

FlagosError* BufferToHost(FlagosBufferToHostArgs* args) {
  return Enter("buffer_to_host", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("buffer_to_host", done);
    FLAGOS_NEED(args->buffer != nullptr, "buffer_to_host: no buffer");
    FlagosBuffer& buffer = *args->buffer;
    const int64_t size = buffer.described.size_bytes;
    FLAGOS_NEED(args->data != nullptr || size == 0, "buffer_to_host: no memory to copy to");
    FLAGOS_NEED(
        args->byte_strides != nullptr || args->size >= static_cast<size_t>(size),
        "buffer_to_host: the memory has " + std::to_string(args->size) + " bytes, the buffer " + std::to_string(size));
    Call call;
    call.method = Method::kBufferToHost;
    call.object = buffer.id;
    call.size = size;
    Destination to{
        static_cast<char*>(args->data), size, {}, {}, ElementSize(static_cast<int32_t>(buffer.described.element_type))};
    if (args->byte_strides != nullptr && size > 0) {
      to.dims = buffer.described.dims;
      to.strides.assign(args->byte_strides, args->byte_strides + to.dims.size());
    }
    return Receive(&buffer, &call, std::move(to), &args->done);
  });
}

// Bytes of [offset, offset + size) of a buffer.
Status RawCall(const std::string& function, Method method, const FlagosBuffer* buffer, const void* data, int64_t offset,
               int64_t size, Call* call) {
  FLAGOS_NEED(buffer != nullptr, function + ": no buffer");
  const int64_t all = buffer->described.size_bytes;
  if (offset < 0 || size < 0 || offset > all || size > all - offset) {
    return MakeStatus(FLAGOS_OUT_OF_RANGE, function + ": " + std::to_string(size) + " bytes from " +
                                               std::to_string(offset) + " lie outside the buffer of " +
                                               std::to_string(all));
  }
  FLAGOS_NEED(data != nullptr || size == 0, function + ": no memory to copy from or to");
  call->method = method;
  call->object = buffer->id;
  call->offset = offset;
  call->size = size;
  return nullptr;
}

FlagosError* BufferReadRaw(FlagosBufferReadRawArgs* args) {
  return Enter("buffer_read_raw", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("buffer_read_raw", done);
    Call call;
    FLAGOS_RETURN_IF_ERROR(
        RawCall("buffer_read_raw", Method::kBufferReadRaw, args->buffer, args->data, args->offset, args->size, &call));
    Destination to{static_cast<char*>(args->data), args->size, {}, {}, 1};
    return Receive(args->buffer, &call, std::move(to), &args->done);
  });
}

FlagosError* BufferWriteRaw(FlagosBufferWriteRawArgs* args) {
  return Enter("buffer_write_raw", args, [&]() -> Status {
    FLAGOS_NEED_ROOM("buffer_write_raw", done);
    Call call;
    FLAGOS_RETURN_IF_ERROR(RawCall("buffer_write_raw", Method::kBufferWriteRaw, args->buffer, args->data, args->offset,
                                   args->size, &call));
    FlagosContext* context = args->buffer->context;
    Link& link = *context->link;
    std::shared_ptr<Segment> segment;
    FLAGOS_RETURN_IF_ERROR(TakeSegment(&link, call.size, &call, &segment));
    if (segment == nullptr) call.data.resize(static_cast<size_t>(call.size));
    if (call.size > 0) {
      std::memcpy(segment != nullptr ? segment->data() : call.data.data(), args->data, static_cast<size_t>(call.size));
    }
    call.event = link.NewIds();
    std::shared_ptr<EventState> state = link.Expect(call.event);
    Reply reply;
    if (Status status = Send(&link, &call, std::move(segment), &reply); status != nullptr) {
      link.Complete(call.event, status, {});
      return status;
    }
    args->done = NewEvent(context, std::move(state), call.event);
    return nullptr;
  });
}

}  // namespace

void FillTransfers(FlagosApi* api) {
  api->buffer_from_host = BufferFromHost;
  api->buffer_to_host = BufferToHost;
  api->buffer_read_raw = BufferReadRaw;
  api->buffer_write_raw = BufferWriteRaw;
}

}  // namespace flagos_isolation
