// Transfer managers: buffers that the host fills piece by piece, in any order, after they were handed out.
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "api.h"
#include "buffer.h"
#include "element_type.h"
#include "event.h"

namespace flagos_pjrt {
namespace {

// One buffer of a manager: a promise, and the staging buffer in the same memory that becomes its contents. Shared with
// the writes in flight, which may outlive the manager.
struct Slot : RefCounted {
  Ref<PJRT_Buffer> promise;
  OwnedBuffer staging;
  size_t size = 0;
  std::mutex mutex;
  size_t writes_in_flight = 0;
  bool last_seen = false;  // no further transfer may come
  bool resolved = false;   // fulfilled or failed
  bool retrieved = false;
};

// One write in flight.
struct Write {
  Ref<Slot> slot;
  Ref<HostEvent> done;
};

// Fulfils or fails the promise, once. error is taken over.
PJRT_Error* Resolve(Slot& slot, FlagosBuffer* source, FlagosError* error) {
  const FlagosApi& api = slot.promise->api();
  {
    const std::lock_guard<std::mutex> lock(slot.mutex);
    if (std::exchange(slot.resolved, true)) {
      if (error != nullptr) api.error_destroy(error);
      return nullptr;
    }
  }
  return Fulfill(*slot.promise, source, error);
}

void Discard(PJRT_Error* error) {
  if (error != nullptr) DestroyError(error);
}

void OnWritten(void* data, FlagosError* error) {
  const std::unique_ptr<Write> write(static_cast<Write*>(data));
  const BackendCallbackScope scope;
  Slot& slot = *write->slot;
  const FlagosApi& api = slot.promise->api();
  if (PJRT_Error* failure = TakeError(api, error)) {
    Discard(Resolve(slot, nullptr, ToFlagosError(api, ErrorCode(failure), ErrorMessage(failure))));
    Discard(write->done->Set(ErrorCode(failure), ErrorMessage(failure)));
    DestroyError(failure);
    return;
  }
  bool complete = false;
  {
    const std::lock_guard<std::mutex> lock(slot.mutex);
    complete = --slot.writes_in_flight == 0 && slot.last_seen;
  }
  if (complete) {
    if (PJRT_Error* failure = Resolve(slot, slot.staging.get(), nullptr)) {
      Discard(write->done->Set(ErrorCode(failure), ErrorMessage(failure)));
      DestroyError(failure);
      return;
    }
  }
  Discard(write->done->Set(FLAGOS_OK, {}));
}

}  // namespace
}  // namespace flagos_pjrt

struct PJRT_AsyncHostToDeviceTransferManager {
  flagos_pjrt::Ref<PJRT_Client> client;
  PJRT_Device* device = nullptr;
  std::vector<flagos_pjrt::Ref<flagos_pjrt::Slot>> slots;
};

namespace flagos_pjrt {
namespace {

PJRT_Error* FindSlot(PJRT_AsyncHostToDeviceTransferManager* manager, int index, const char* where, Slot** slot) {
  if (index < 0 || static_cast<size_t>(index) >= manager->slots.size()) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": buffer index ", index, " is out of range; there are ",
                                               manager->slots.size(), " buffers."});
  }
  *slot = manager->slots[static_cast<size_t>(index)].get();
  return nullptr;
}

PJRT_Error* MakeSlot(PJRT_Client* client, const Placement& placement, const PJRT_ShapeSpec& spec, const char* where,
                     Ref<Slot>* made) {
  FLAGOS_RETURN_IF_ERROR(CheckShape(spec.element_type, spec.dims, spec.num_dims, where));
  auto slot = Ref<Slot>::Adopt(new Slot);
  slot->size = ArraySizeBytes(spec.element_type, spec.dims, spec.num_dims);
  auto allocation = MakeArgs<FlagosBufferAllocateArgs>();
  allocation.context = client->context;
  allocation.memory = placement.memory->handle;
  allocation.dims = spec.dims;
  allocation.rank = spec.num_dims;
  allocation.element_type = ToFlagosType(spec.element_type);
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->buffer_allocate(&allocation)));
  slot->staging = OwnedBuffer(allocation.buffer, Destroyer{client->api});
  FLAGOS_RETURN_IF_ERROR(MakePromise(client, placement, spec.element_type, spec.dims, spec.num_dims,
                                     /*error=*/nullptr, &slot->promise));
  *made = std::move(slot);
  return nullptr;
}

// Counts a write in; from here on FinishWrite or OnWritten counts it out.
PJRT_Error* BeginWrite(Slot& slot, bool is_last, const char* where) {
  const std::lock_guard<std::mutex> lock(slot.mutex);
  if (slot.resolved || slot.last_seen) {
    return MakeError(FLAGOS_FAILED_PRECONDITION,
                     {where, ": the buffer's last transfer was already made, or the buffer failed."});
  }
  slot.last_seen = is_last;
  ++slot.writes_in_flight;
  return nullptr;
}

// Hooks OnWritten to the backend's event, which may be null: nothing to wait for.
PJRT_Error* TrackWrite(Slot* slot, FlagosEvent* event, PJRT_Event** done) {
  const FlagosApi& api = slot->promise->api();
  const OwnedEvent written(event, Destroyer{&api});
  auto complete = Ref<HostEvent>::Adopt(new HostEvent);
  auto write = std::make_unique<Write>(Write{Ref<Slot>::Share(slot), complete});
  *done = WrapEvent(std::move(complete));
  auto on_ready = MakeArgs<FlagosEventOnReadyArgs>();
  on_ready.event = event;
  on_ready.callback = &OnWritten;
  on_ready.user_data = write.get();
  Write* registered = write.release();
  if (FlagosError* error = api.event_on_ready(&on_ready)) OnWritten(registered, error);
  return nullptr;
}

// Fails slot with the code and message of error, which stays the caller's to return.
PJRT_Error* FailWrite(Slot& slot, PJRT_Error* error) {
  if (error != nullptr) {
    const FlagosApi& api = slot.promise->api();
    Discard(Resolve(slot, nullptr, ToFlagosError(api, ErrorCode(error), ErrorMessage(error))));
  }
  return error;
}

}  // namespace

PJRT_Error* PJRT_Client_CreateBuffersForAsyncHostToDevice(PJRT_Client_CreateBuffersForAsyncHostToDevice_Args* args) {
  constexpr const char* kWhere = "PJRT_Client_CreateBuffersForAsyncHostToDevice";
  Placement placement;
  FLAGOS_RETURN_IF_ERROR(Place(args->client, /*device=*/nullptr, args->memory, kWhere, &placement));
  if (args->num_device_layouts != 0 && args->num_device_layouts != args->num_shape_specs) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": ", args->num_device_layouts, " layouts were given for ",
                                               args->num_shape_specs, " shapes."});
  }
  auto manager = std::make_unique<PJRT_AsyncHostToDeviceTransferManager>();
  manager->client = Ref<PJRT_Client>::Share(args->client);
  manager->device = placement.device;
  for (size_t i = 0; i < args->num_shape_specs; ++i) {
    const PJRT_ShapeSpec& spec = args->shape_specs[i];
    if (args->num_device_layouts != 0) {
      FLAGOS_RETURN_IF_ERROR(CheckShape(spec.element_type, spec.dims, spec.num_dims, kWhere));
      FLAGOS_RETURN_IF_ERROR(
          CheckDeviceLayout(args->device_layouts[i], spec.element_type, spec.dims, spec.num_dims, kWhere));
    }
    FLAGOS_RETURN_IF_ERROR(MakeSlot(args->client, placement, spec, kWhere, &manager->slots.emplace_back()));
  }
  args->transfer_manager = manager.release();
  return nullptr;
}

PJRT_Error* PJRT_AsyncHostToDeviceTransferManager_Destroy(PJRT_AsyncHostToDeviceTransferManager_Destroy_Args* args) {
  const std::unique_ptr<PJRT_AsyncHostToDeviceTransferManager> manager(args->transfer_manager);
  if (manager == nullptr) return nullptr;
  for (const Ref<Slot>& slot : manager->slots) {
    bool abandoned = false;
    {
      const std::lock_guard<std::mutex> lock(slot->mutex);
      abandoned = !slot->resolved && !slot->last_seen;
    }
    if (!abandoned) continue;
    FLAGOS_RETURN_IF_ERROR(Resolve(*slot, nullptr,
                                   ToFlagosError(*manager->client->api, FLAGOS_CANCELLED,
                                                 "The transfer manager was destroyed before the buffer's last "
                                                 "transfer.")));
  }
  return nullptr;
}

PJRT_Error* PJRT_AsyncHostToDeviceTransferManager_TransferData(
    PJRT_AsyncHostToDeviceTransferManager_TransferData_Args* args) {
  constexpr const char* kWhere = "PJRT_AsyncHostToDeviceTransferManager_TransferData";
  Slot* slot = nullptr;
  FLAGOS_RETURN_IF_ERROR(FindSlot(args->transfer_manager, args->buffer_index, kWhere, &slot));
  const auto size = static_cast<int64_t>(slot->size);
  if (args->offset < 0 || args->transfer_size < 0 || args->offset > size || args->transfer_size > size - args->offset) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": ", args->transfer_size, " bytes at offset ", args->offset,
                                               " lie outside of buffer ", args->buffer_index, " of ", size, " bytes."});
  }
  if (args->data == nullptr && args->transfer_size > 0) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": data is NULL."});
  }
  FLAGOS_RETURN_IF_ERROR(BeginWrite(*slot, args->is_last_transfer, kWhere));
  const FlagosApi& api = slot->promise->api();
  auto write = MakeArgs<FlagosBufferWriteRawArgs>();
  write.buffer = slot->staging.get();
  write.data = args->data;
  write.offset = args->offset;
  write.size = args->transfer_size;
  FLAGOS_RETURN_IF_ERROR(FailWrite(*slot, TakeError(api, api.buffer_write_raw(&write))));
  return TrackWrite(slot, write.done, &args->done_with_h2d_transfer);
}

PJRT_Error* PJRT_AsyncHostToDeviceTransferManager_TransferLiteral(
    PJRT_AsyncHostToDeviceTransferManager_TransferLiteral_Args* args) {
  constexpr const char* kWhere = "PJRT_AsyncHostToDeviceTransferManager_TransferLiteral";
  Slot* slot = nullptr;
  FLAGOS_RETURN_IF_ERROR(FindSlot(args->transfer_manager, args->buffer_index, kWhere, &slot));
  const PJRT_Buffer& promise = *slot->promise;
  const int64_t* dims = promise.dims.data();
  const size_t rank = promise.dims.size();
  if (args->shape_element_type != promise.type || args->shape_num_dims != rank ||
      (rank > 0 && std::memcmp(args->shape_dims, dims, rank * sizeof(int64_t)) != 0)) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {kWhere, ": the literal is ", ElementTypeName(args->shape_element_type),
                      FormatList(args->shape_dims, args->shape_num_dims), ", buffer ", args->buffer_index, " is ",
                      ElementTypeName(promise.type), FormatList(dims, rank), "."});
  }
  Dims storage(rank);
  const int64_t* strides = nullptr;
  FLAGOS_RETURN_IF_ERROR(
      HostStrides(args->shape_layout, promise.type, dims, rank, SIZE_MAX, kWhere, &storage, &strides));
  FLAGOS_RETURN_IF_ERROR(BeginWrite(*slot, /*is_last=*/true, kWhere));
  // A literal is a whole array, so it is its own staging buffer, and its layout the backend's to undo.
  const FlagosApi& api = promise.api();
  auto transfer = MakeArgs<FlagosBufferFromHostArgs>();
  transfer.context = promise.client->context;
  transfer.memory = promise.memory->handle;
  transfer.data = args->data;
  transfer.dims = dims;
  transfer.byte_strides = strides;
  transfer.rank = rank;
  transfer.element_type = ToFlagosType(promise.type);
  transfer.semantics = FLAGOS_HOST_IMMUTABLE_UNTIL_TRANSFER;
  FLAGOS_RETURN_IF_ERROR(FailWrite(*slot, TakeError(api, api.buffer_from_host(&transfer))));
  slot->staging.reset(transfer.buffer);
  return TrackWrite(slot, transfer.done_with_host, &args->done_with_h2d_transfer);
}

PJRT_Error* PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer(
    PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer_Args* args) {
  constexpr const char* kWhere = "PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer";
  Slot* slot = nullptr;
  FLAGOS_RETURN_IF_ERROR(FindSlot(args->transfer_manager, args->buffer_index, kWhere, &slot));
  const std::lock_guard<std::mutex> lock(slot->mutex);
  if (std::exchange(slot->retrieved, true)) {
    return MakeError(FLAGOS_FAILED_PRECONDITION,
                     {kWhere, ": buffer ", args->buffer_index, " has been retrieved already."});
  }
  args->buffer_out = Ref<PJRT_Buffer>(slot->promise).Leak();
  return nullptr;
}

PJRT_Error* PJRT_AsyncHostToDeviceTransferManager_Device(PJRT_AsyncHostToDeviceTransferManager_Device_Args* args) {
  args->device_out = args->transfer_manager->device;
  return nullptr;
}

PJRT_Error* PJRT_AsyncHostToDeviceTransferManager_BufferCount(
    PJRT_AsyncHostToDeviceTransferManager_BufferCount_Args* args) {
  args->buffer_count = args->transfer_manager->slots.size();
  return nullptr;
}

PJRT_Error* PJRT_AsyncHostToDeviceTransferManager_BufferSize(
    PJRT_AsyncHostToDeviceTransferManager_BufferSize_Args* args) {
  Slot* slot = nullptr;
  FLAGOS_RETURN_IF_ERROR(
      FindSlot(args->transfer_manager, args->buffer_index, "PJRT_AsyncHostToDeviceTransferManager_BufferSize", &slot));
  args->buffer_size = slot->size;
  return nullptr;
}

PJRT_Error* PJRT_AsyncHostToDeviceTransferManager_SetBufferError(
    PJRT_AsyncHostToDeviceTransferManager_SetBufferError_Args* args) {
  constexpr const char* kWhere = "PJRT_AsyncHostToDeviceTransferManager_SetBufferError";
  Slot* slot = nullptr;
  FLAGOS_RETURN_IF_ERROR(FindSlot(args->transfer_manager, args->buffer_index, kWhere, &slot));
  if (args->error_code == PJRT_Error_Code_OK) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": the error code is OK."});
  }
  return Resolve(*slot, nullptr,
                 ToFlagosError(*args->transfer_manager->client->api, args->error_code,
                               std::string_view(args->error_message, args->error_message_size)));
}

// Metadata describes a transfer to tools; the backend ABI has no place for it.
PJRT_Error* PJRT_AsyncHostToDeviceTransferManager_AddMetadata(
    PJRT_AsyncHostToDeviceTransferManager_AddMetadata_Args* args) {
  if (args->transfer_metadata == nullptr && args->num_metadata > 0) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     "PJRT_AsyncHostToDeviceTransferManager_AddMetadata: transfer_metadata is NULL.");
  }
  return nullptr;
}

}  // namespace flagos_pjrt
