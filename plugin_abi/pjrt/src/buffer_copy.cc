// Buffers: copies to the host, to other memories, and new views and owners of the same contents.
#include <memory>
#include <utility>

#include "api.h"
#include "buffer.h"
#include "element_type.h"
#include "event.h"

namespace flagos_pjrt {
namespace {

PJRT_Error* ReadRaw(const PJRT_Buffer& buffer, void* data, int64_t offset, int64_t size, FlagosEvent** done) {
  auto read = MakeArgs<FlagosBufferReadRawArgs>();
  read.buffer = buffer.get();
  read.data = data;
  read.offset = offset;
  read.size = size;
  FLAGOS_RETURN_IF_ERROR(TakeError(buffer.api(), buffer.api().buffer_read_raw(&read)));
  *done = read.done;
  return nullptr;
}

PJRT_Error* CheckRange(const PJRT_Buffer& buffer, int64_t offset, int64_t size, const char* where) {
  const auto total = static_cast<int64_t>(buffer.size_bytes());
  if (offset < 0 || size < 0 || offset > total || size > total - offset) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": ", size, " bytes from offset ", offset,
                                               " lie outside of the buffer's ", total, " bytes."});
  }
  return nullptr;
}

PJRT_Error* Copy(const PJRT_Buffer& buffer, PJRT_Device* device, Memory* memory, PJRT_Buffer** copy) {
  auto args = MakeArgs<FlagosBufferCopyArgs>();
  args.buffer = buffer.get();
  args.memory = memory->handle;
  FLAGOS_RETURN_IF_ERROR(TakeError(buffer.api(), buffer.api().buffer_copy(&args)));
  *copy =
      NewBuffer(buffer.client.get(), device, memory, buffer.type, buffer.dims.data(), buffer.dims.size(), args.copy);
  return nullptr;
}

// ---- CopyRawToHostFuture: a read whose destination comes later ----

struct RawCopy {
  Ref<PJRT_Buffer> buffer;
  Ref<HostEvent> done;
  int64_t offset;
  int64_t size;
};

// Completes done as error says, and takes error over.
void Complete(HostEvent& done, PJRT_Error* error) {
  PJRT_Error* failure = error == nullptr ? done.Set(FLAGOS_OK, {}) : done.Set(ErrorCode(error), ErrorMessage(error));
  if (error != nullptr) DestroyError(error);
  if (failure != nullptr) DestroyError(failure);  // complete already: nothing waits for this any more
}

void OnRawCopyDone(void* data, FlagosError* error) {
  const std::unique_ptr<RawCopy> copy(static_cast<RawCopy*>(data));
  const BackendCallbackScope scope;
  Complete(*copy->done, TakeError(copy->buffer->api(), error));
}

// Ends with a call of OnRawCopyDone or Complete, and takes copy over.
void StartRawCopy(std::unique_ptr<RawCopy> copy, void* destination) {
  const FlagosApi& api = copy->buffer->api();
  FlagosEvent* event = nullptr;
  if (PJRT_Error* error = ReadRaw(*copy->buffer, destination, copy->offset, copy->size, &event)) {
    Complete(*copy->done, error);
    return;
  }
  const OwnedEvent read(event, Destroyer{&api});
  auto on_ready = MakeArgs<FlagosEventOnReadyArgs>();
  on_ready.event = event;
  on_ready.callback = &OnRawCopyDone;
  on_ready.user_data = copy.get();
  RawCopy* registered = copy.release();
  if (PJRT_Error* error = TakeError(api, api.event_on_ready(&on_ready))) {
    copy.reset(registered);
    Complete(*copy->done, error);
  }
}

void OnRawCopyDestination(PJRT_Buffer_CopyRawToHostFuture_Callback_Args* args) {
  std::unique_ptr<RawCopy> copy(static_cast<RawCopy*>(args->callback_data));
  if (args->error_code != PJRT_Error_Code_OK) {
    Complete(*copy->done, MakeError(args->error_code, std::string_view(args->error_message, args->error_message_size)));
    return;
  }
  StartRawCopy(std::move(copy), args->dst);
}

// ---- DonateWithControlDependency: a donation that waits for the host ----

struct Dependency {
  Ref<PJRT_Client> client;
  OwnedEvent event;
};

void OnDependencyReady(PJRT_Buffer_DonateWithControlDependency_Callback_Args* args) {
  const std::unique_ptr<Dependency> dependency(static_cast<Dependency*>(args->callback_data));
  const FlagosApi& api = *dependency->client->api;
  auto set = MakeArgs<FlagosEventSetArgs>();
  set.event = dependency->event.get();
  if (args->error_code != PJRT_Error_Code_OK) {
    set.error = ToFlagosError(api, args->error_code, std::string_view(args->error_message, args->error_message_size));
  }
  // PJRT gives this callback no way to report a failure; the donated buffer would stay pending.
  if (FlagosError* error = api.event_set(&set)) api.error_destroy(error);
}

}  // namespace

PJRT_Error* PJRT_Buffer_ToHostBuffer(PJRT_Buffer_ToHostBuffer_Args* args) {
  constexpr const char* kWhere = "PJRT_Buffer_ToHostBuffer";
  const PJRT_Buffer& buffer = *args->src;
  const int64_t* dims = buffer.dims.data();
  const size_t rank = buffer.dims.size();
  const size_t available = args->dst == nullptr ? SIZE_MAX : args->dst_size;
  Dims storage(rank);
  const int64_t* strides = nullptr;
  FLAGOS_RETURN_IF_ERROR(
      HostStrides(args->host_layout, buffer.type, dims, rank, available, kWhere, &storage, &strides));
  size_t needed = buffer.size_bytes();
  if (strides != nullptr && needed > 0) {
    needed = ElementSize(buffer.type);
    for (size_t i = 0; i < rank; ++i) needed += static_cast<size_t>(strides[i] * (dims[i] - 1));
  }
  if (args->dst == nullptr) {
    args->dst_size = needed;
    args->event = nullptr;
    return nullptr;
  }
  if (args->dst_size < needed) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {kWhere, ": the destination has ", args->dst_size, " bytes, the array ",
                      ElementTypeName(buffer.type), FormatList(dims, rank), " needs ", needed, "."});
  }
  auto transfer = MakeArgs<FlagosBufferToHostArgs>();
  transfer.buffer = buffer.get();
  transfer.data = args->dst;
  transfer.size = args->dst_size;
  transfer.byte_strides = strides;
  FLAGOS_RETURN_IF_ERROR(TakeError(buffer.api(), buffer.api().buffer_to_host(&transfer)));
  args->event = WrapEvent(buffer.client.get(), transfer.done);
  return nullptr;
}

PJRT_Error* PJRT_Buffer_CopyRawToHost(PJRT_Buffer_CopyRawToHost_Args* args) {
  constexpr const char* kWhere = "PJRT_Buffer_CopyRawToHost";
  FLAGOS_RETURN_IF_ERROR(CheckRange(*args->buffer, args->offset, args->transfer_size, kWhere));
  if (args->dst == nullptr && args->transfer_size > 0) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": dst is NULL."});
  }
  FlagosEvent* done = nullptr;
  FLAGOS_RETURN_IF_ERROR(ReadRaw(*args->buffer, args->dst, args->offset, args->transfer_size, &done));
  args->event = WrapEvent(args->buffer->client.get(), done);
  return nullptr;
}

PJRT_Error* PJRT_Buffer_CopyRawToHostFuture(PJRT_Buffer_CopyRawToHostFuture_Args* args) {
  FLAGOS_RETURN_IF_ERROR(
      CheckRange(*args->buffer, args->offset, args->transfer_size, "PJRT_Buffer_CopyRawToHostFuture"));
  auto done = Ref<HostEvent>::Adopt(new HostEvent);
  auto copy = std::make_unique<RawCopy>(
      RawCopy{Ref<PJRT_Buffer>::Share(args->buffer), done, args->offset, args->transfer_size});
  args->event = WrapEvent(std::move(done));
  args->future_ready_callback = &OnRawCopyDestination;
  args->callback_data = copy.release();
  return nullptr;
}

PJRT_Error* PJRT_Buffer_CopyToDevice(PJRT_Buffer_CopyToDevice_Args* args) {
  constexpr const char* kWhere = "PJRT_Buffer_CopyToDevice";
  if (args->dst_device == nullptr) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": dst_device is NULL."});
  }
  Placement placement;
  FLAGOS_RETURN_IF_ERROR(Place(args->buffer->client.get(), args->dst_device, nullptr, kWhere, &placement));
  return Copy(*args->buffer, placement.device, placement.memory, &args->dst_buffer);
}

PJRT_Error* PJRT_Buffer_CopyToMemory(PJRT_Buffer_CopyToMemory_Args* args) {
  constexpr const char* kWhere = "PJRT_Buffer_CopyToMemory";
  if (args->dst_memory == nullptr) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": dst_memory is NULL."});
  }
  Placement placement;
  FLAGOS_RETURN_IF_ERROR(Place(args->buffer->client.get(), args->buffer->device, args->dst_memory, kWhere, &placement));
  return Copy(*args->buffer, placement.device, placement.memory, &args->dst_buffer);
}

PJRT_Error* PJRT_Buffer_Bitcast(PJRT_Buffer_Bitcast_Args* args) {
  constexpr const char* kWhere = "PJRT_Buffer_Bitcast";
  const PJRT_Buffer& buffer = *args->buffer;
  FLAGOS_RETURN_IF_ERROR(CheckShape(args->element_type, args->dims, args->num_dims, kWhere));
  FLAGOS_RETURN_IF_ERROR(
      CheckDeviceLayout(args->device_layout, args->element_type, args->dims, args->num_dims, kWhere));
  const size_t size = ArraySizeBytes(args->element_type, args->dims, args->num_dims);
  if (size != buffer.size_bytes()) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {kWhere, ": ", ElementTypeName(args->element_type), FormatList(args->dims, args->num_dims),
                      " takes ", size, " bytes, the buffer has ", buffer.size_bytes(), "."});
  }
  auto bitcast = MakeArgs<FlagosBufferBitcastArgs>();
  bitcast.buffer = buffer.get();
  bitcast.dims = args->dims;
  bitcast.rank = args->num_dims;
  bitcast.element_type = ToFlagosType(args->element_type);
  FLAGOS_RETURN_IF_ERROR(TakeError(buffer.api(), buffer.api().buffer_bitcast(&bitcast)));
  args->out_buffer = NewBuffer(buffer.client.get(), buffer.device, buffer.memory, args->element_type, args->dims,
                               args->num_dims, bitcast.view);
  return nullptr;
}

PJRT_Error* PJRT_Buffer_DonateWithControlDependency(PJRT_Buffer_DonateWithControlDependency_Args* args) {
  const PJRT_Buffer& buffer = *args->buffer;
  const FlagosApi& api = buffer.api();
  auto create = MakeArgs<FlagosEventCreateArgs>();
  create.context = buffer.client->context;
  FLAGOS_RETURN_IF_ERROR(TakeError(api, api.event_create(&create)));
  auto dependency = std::make_unique<Dependency>(Dependency{buffer.client, OwnedEvent(create.event, Destroyer{&api})});
  auto donation = MakeArgs<FlagosBufferDonateArgs>();
  donation.buffer = buffer.get();
  donation.dependency = dependency->event.get();
  FLAGOS_RETURN_IF_ERROR(TakeError(api, api.buffer_donate(&donation)));
  args->out_buffer = NewBuffer(buffer.client.get(), buffer.device, buffer.memory, buffer.type, buffer.dims.data(),
                               buffer.dims.size(), donation.donated);
  args->dependency_ready_callback = &OnDependencyReady;
  args->callback_data = dependency.release();
  return nullptr;
}

}  // namespace flagos_pjrt
