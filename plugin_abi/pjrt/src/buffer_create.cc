// Buffers: where they come from - host memory, foreign memory, nothing, an error, or a promise.
#include <memory>
#include <utility>

#include "api.h"
#include "buffer.h"
#include "element_type.h"
#include "event.h"

// What PJRT_Client_CreateAliasBuffer gives out beside the buffer; the buffer may be destroyed before it is fulfilled.
struct PJRT_FulfillAliasBufferCallback {
  flagos_pjrt::Ref<PJRT_Buffer> promise;
};

namespace flagos_pjrt {
namespace {

// The fields that the argument structs of all ways to make a buffer share.
template <typename Args>
Args ShapeArgs(PJRT_Client* client, const Placement& placement, PJRT_Buffer_Type type, const int64_t* dims,
               size_t rank) {
  auto args = MakeArgs<Args>();
  args.context = client->context;
  args.memory = placement.memory->handle;
  args.dims = dims;
  args.rank = rank;
  args.element_type = ToFlagosType(type);
  return args;
}

PJRT_Error* CheckShapeAndLayout(PJRT_Buffer_Type type, const int64_t* dims, size_t rank,
                                const PJRT_Buffer_MemoryLayout* layout, const char* where) {
  FLAGOS_RETURN_IF_ERROR(CheckShape(type, dims, rank, where));
  return CheckDeviceLayout(layout, type, dims, rank, where);
}

struct ForeignMemory {
  void (*on_delete)(void* pointer, void* arg);
  void* pointer;
  void* arg;
};

void ReleaseForeignMemory(void* data) {
  const std::unique_ptr<ForeignMemory> memory(static_cast<ForeignMemory*>(data));
  const BackendCallbackScope scope;
  memory->on_delete(memory->pointer, memory->arg);
}

}  // namespace

PJRT_Error* Place(PJRT_Client* client, PJRT_Device* device, PJRT_Memory* memory, const char* where,
                  Placement* placement) {
  if (memory == nullptr && device == nullptr) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": neither a device nor a memory is given."});
  }
  if (memory == nullptr) memory = device->default_memory;
  if (memory == nullptr || AsMemory(memory)->devices.empty()) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {where, ": the device belongs to another process and has no memory that this one reaches."});
  }
  const Memory* chosen = AsMemory(memory);
  bool addresses = false;
  for (const PJRT_Device* candidate : chosen->devices) addresses = addresses || candidate == device;
  placement->device = addresses ? device : chosen->devices.front();
  placement->memory = AsMemory(memory);
  if (placement->device->client != client) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": memory ", chosen->to_string, " belongs to another client."});
  }
  return nullptr;
}

PJRT_Error* MakePromise(PJRT_Client* client, const Placement& placement, PJRT_Buffer_Type type, const int64_t* dims,
                        size_t rank, FlagosError* error, Ref<PJRT_Buffer>* promise) {
  auto args = ShapeArgs<FlagosBufferPromiseArgs>(client, placement, type, dims, rank);
  args.error = error;
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->buffer_promise(&args)));
  *promise =
      Ref<PJRT_Buffer>::Adopt(NewBuffer(client, placement.device, placement.memory, type, dims, rank, args.buffer));
  return nullptr;
}

PJRT_Error* Fulfill(const PJRT_Buffer& promise, FlagosBuffer* source, FlagosError* error) {
  auto args = MakeArgs<FlagosBufferFulfillArgs>();
  args.promise = promise.get();
  args.source = source;
  args.error = error;
  return TakeError(promise.api(), promise.api().buffer_fulfill(&args));
}

PJRT_Error* PJRT_Client_BufferFromHostBuffer(PJRT_Client_BufferFromHostBuffer_Args* args) {
  constexpr const char* kWhere = "PJRT_Client_BufferFromHostBuffer";
  PJRT_Client* client = args->client;
  Placement placement;
  FLAGOS_RETURN_IF_ERROR(Place(client, args->device, args->memory, kWhere, &placement));
  FLAGOS_RETURN_IF_ERROR(CheckShapeAndLayout(args->type, args->dims, args->num_dims, args->device_layout, kWhere));
  const bool strided = args->byte_strides != nullptr && args->num_byte_strides != 0;
  if (strided && args->num_byte_strides != args->num_dims) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": ", args->num_byte_strides, " byte strides were given for ",
                                               args->num_dims, " dimensions."});
  }
  if (args->data == nullptr && ArraySizeBytes(args->type, args->dims, args->num_dims) > 0) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": data is NULL."});
  }
  if (args->host_buffer_semantics < PJRT_HostBufferSemantics_kImmutableOnlyDuringCall ||
      args->host_buffer_semantics > PJRT_HostBufferSemantics_kMutableZeroCopy) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": host buffer semantics ",
                                               static_cast<int>(args->host_buffer_semantics), " are unknown."});
  }
  auto transfer = ShapeArgs<FlagosBufferFromHostArgs>(client, placement, args->type, args->dims, args->num_dims);
  transfer.data = args->data;
  transfer.byte_strides = strided ? args->byte_strides : nullptr;
  transfer.semantics = args->host_buffer_semantics;  // the same numbers
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->buffer_from_host(&transfer)));
  OwnedEvent done(transfer.done_with_host, Destroyer{client->api});
  auto buffer = Ref<PJRT_Buffer>::Adopt(
      NewBuffer(client, placement.device, placement.memory, args->type, args->dims, args->num_dims, transfer.buffer));
  args->done_with_host_buffer = WrapEvent(client, done.release());
  args->buffer = buffer.Leak();
  return nullptr;
}

static_assert(static_cast<int>(PJRT_HostBufferSemantics_kImmutableOnlyDuringCall) ==
              FLAGOS_HOST_IMMUTABLE_ONLY_DURING_CALL);
static_assert(static_cast<int>(PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes) ==
              FLAGOS_HOST_IMMUTABLE_UNTIL_TRANSFER);
static_assert(static_cast<int>(PJRT_HostBufferSemantics_kImmutableZeroCopy) == FLAGOS_HOST_IMMUTABLE_ZERO_COPY);
static_assert(static_cast<int>(PJRT_HostBufferSemantics_kMutableZeroCopy) == FLAGOS_HOST_MUTABLE_ZERO_COPY);

PJRT_Error* PJRT_Client_CreateViewOfDeviceBuffer(PJRT_Client_CreateViewOfDeviceBuffer_Args* args) {
  constexpr const char* kWhere = "PJRT_Client_CreateViewOfDeviceBuffer";
  PJRT_Client* client = args->client;
  Placement placement;
  FLAGOS_RETURN_IF_ERROR(Place(client, args->device, args->memory, kWhere, &placement));
  FLAGOS_RETURN_IF_ERROR(CheckShapeAndLayout(args->element_type, args->dims, args->num_dims, args->layout, kWhere));
  if (args->stream != 0 && !placement.device->is_host_memory) {
    return MakeError(FLAGOS_UNIMPLEMENTED,
                     {kWhere, ": waiting for the foreign stream ", static_cast<int64_t>(args->stream),
                      " is not possible through the backend ABI. Synchronize that stream and pass 0."});
  }
  auto view = ShapeArgs<FlagosBufferViewArgs>(client, placement, args->element_type, args->dims, args->num_dims);
  view.data = args->device_buffer_ptr;
  std::unique_ptr<ForeignMemory> memory;
  if (args->on_delete_callback != nullptr) {
    memory.reset(new ForeignMemory{args->on_delete_callback, args->device_buffer_ptr, args->on_delete_callback_arg});
    view.release = &ReleaseForeignMemory;
    view.release_user_data = memory.get();
  }
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->buffer_view(&view)));
  memory.release();  // the view's now
  args->buffer = NewBuffer(client, placement.device, placement.memory, args->element_type, args->dims, args->num_dims,
                           view.buffer);
  return nullptr;
}

PJRT_Error* PJRT_Client_CreateUninitializedBuffer(PJRT_Client_CreateUninitializedBuffer_Args* args) {
  constexpr const char* kWhere = "PJRT_Client_CreateUninitializedBuffer";
  PJRT_Client* client = args->client;
  Placement placement;
  FLAGOS_RETURN_IF_ERROR(Place(client, args->device, args->memory, kWhere, &placement));
  FLAGOS_RETURN_IF_ERROR(CheckShapeAndLayout(args->shape_element_type, args->shape_dims, args->shape_num_dims,
                                             args->shape_layout, kWhere));
  auto allocation = ShapeArgs<FlagosBufferAllocateArgs>(client, placement, args->shape_element_type, args->shape_dims,
                                                        args->shape_num_dims);
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->buffer_allocate(&allocation)));
  args->buffer = NewBuffer(client, placement.device, placement.memory, args->shape_element_type, args->shape_dims,
                           args->shape_num_dims, allocation.buffer);
  return nullptr;
}

PJRT_Error* PJRT_Client_CreateErrorBuffer(PJRT_Client_CreateErrorBuffer_Args* args) {
  constexpr const char* kWhere = "PJRT_Client_CreateErrorBuffer";
  if (args->error_code == PJRT_Error_Code_OK) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": the error code is OK."});
  }
  PJRT_Client* client = args->client;
  Placement placement;
  FLAGOS_RETURN_IF_ERROR(Place(client, /*device=*/nullptr, args->memory, kWhere, &placement));
  FLAGOS_RETURN_IF_ERROR(CheckShapeAndLayout(args->shape_element_type, args->shape_dims, args->shape_num_dims,
                                             args->shape_layout, kWhere));
  FlagosError* error =
      ToFlagosError(*client->api, args->error_code, std::string_view(args->error_message, args->error_message_size));
  Ref<PJRT_Buffer> buffer;
  FLAGOS_RETURN_IF_ERROR(
      MakePromise(client, placement, args->shape_element_type, args->shape_dims, args->shape_num_dims, error, &buffer));
  args->buffer = buffer.Leak();
  return nullptr;
}

PJRT_Error* PJRT_Client_CreateAliasBuffer(PJRT_Client_CreateAliasBuffer_Args* args) {
  constexpr const char* kWhere = "PJRT_Client_CreateAliasBuffer";
  Placement placement;
  FLAGOS_RETURN_IF_ERROR(Place(args->client, /*device=*/nullptr, args->memory, kWhere, &placement));
  FLAGOS_RETURN_IF_ERROR(CheckShapeAndLayout(args->shape_element_type, args->shape_dims, args->shape_num_dims,
                                             args->shape_layout, kWhere));
  Ref<PJRT_Buffer> promise;
  FLAGOS_RETURN_IF_ERROR(MakePromise(args->client, placement, args->shape_element_type, args->shape_dims,
                                     args->shape_num_dims, /*error=*/nullptr, &promise));
  args->fulfill_alias_buffer_cb = new PJRT_FulfillAliasBufferCallback{promise};
  args->alias_buffer = promise.Leak();
  return nullptr;
}

// jaxlib leaves args->client uninitialised here.
PJRT_Error* PJRT_Client_FulfillAliasBuffer(PJRT_Client_FulfillAliasBuffer_Args* args) {
  constexpr const char* kWhere = "PJRT_Client_FulfillAliasBuffer";
  if (args->fulfill_alias_buffer_cb == nullptr) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": fulfill_alias_buffer_cb is NULL."});
  }
  if (args->status_code == PJRT_Error_Code_OK && args->buffer == nullptr) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": neither a buffer nor an error is given."});
  }
  // It is used up, whatever comes of it.
  const std::unique_ptr<PJRT_FulfillAliasBufferCallback> callback(args->fulfill_alias_buffer_cb);
  const PJRT_Buffer& promise = *callback->promise;
  if (args->status_code != PJRT_Error_Code_OK) {
    return Fulfill(promise, nullptr,
                   ToFlagosError(promise.api(), args->status_code,
                                 std::string_view(args->error_message, args->error_message_size)));
  }
  return Fulfill(promise, args->buffer->get(), nullptr);
}

}  // namespace flagos_pjrt
