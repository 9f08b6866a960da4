// Buffers: what they are, their readiness, deletion and external references.
#include "buffer.h"

#include <utility>

#include "api.h"
#include "event.h"

namespace flagos_pjrt {
namespace {

PJRT_Error* Pointer(const PJRT_Buffer& buffer, void** pointer) {
  auto args = MakeArgs<FlagosBufferPointerArgs>();
  args.buffer = buffer.get();
  FLAGOS_RETURN_IF_ERROR(TakeError(buffer.api(), buffer.api().buffer_pointer(&args)));
  *pointer = args.pointer;
  return nullptr;
}

}  // namespace

PJRT_Error* HoldBuffer(const PJRT_Buffer& buffer, int32_t delta) {
  auto args = MakeArgs<FlagosBufferHoldArgs>();
  args.buffer = buffer.get();
  args.delta = delta;
  return TakeError(buffer.api(), buffer.api().buffer_hold(&args));
}

PJRT_Buffer* NewBuffer(PJRT_Client* client, PJRT_Device* device, Memory* memory, PJRT_Buffer_Type type,
                       const int64_t* dims, size_t rank, FlagosBuffer* handle) {
  OwnedBuffer owned(handle, Destroyer{client->api});
  return new PJRT_Buffer(client, device, memory, type, dims, rank, std::move(owned));
}

PJRT_Error* PJRT_Buffer_Destroy(PJRT_Buffer_Destroy_Args* args) {
  Release(args->buffer);
  return nullptr;
}

PJRT_Error* PJRT_Buffer_ElementType(PJRT_Buffer_ElementType_Args* args) {
  args->type = args->buffer->type;
  return nullptr;
}

PJRT_Error* PJRT_Buffer_Dimensions(PJRT_Buffer_Dimensions_Args* args) {
  args->dims = args->buffer->dims.data();
  args->num_dims = args->buffer->dims.size();
  return nullptr;
}

PJRT_Error* PJRT_Buffer_UnpaddedDimensions(PJRT_Buffer_UnpaddedDimensions_Args* args) {
  args->unpadded_dims = args->buffer->dims.data();
  args->num_dims = args->buffer->dims.size();
  return nullptr;
}

PJRT_Error* PJRT_Buffer_DynamicDimensionIndices(PJRT_Buffer_DynamicDimensionIndices_Args* args) {
  args->dynamic_dim_indices = nullptr;
  args->num_dynamic_dims = 0;
  return nullptr;
}

PJRT_Error* PJRT_Buffer_GetMemoryLayout(PJRT_Buffer_GetMemoryLayout_Args* args) {
  args->layout = {};
  args->layout.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE;
  args->layout.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
  args->layout.tiled.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE;
  args->layout.tiled.minor_to_major = RowMajorOrder(args->buffer->dims.size());
  args->layout.tiled.minor_to_major_size = args->buffer->dims.size();
  return nullptr;
}

PJRT_Error* PJRT_Buffer_OnDeviceSizeInBytes(PJRT_Buffer_OnDeviceSizeInBytes_Args* args) {
  args->on_device_size_in_bytes = args->buffer->size_bytes();
  return nullptr;
}

PJRT_Error* PJRT_Buffer_Device(PJRT_Buffer_Device_Args* args) {
  args->device = args->buffer->device;
  return nullptr;
}

PJRT_Error* PJRT_Buffer_Memory(PJRT_Buffer_Memory_Args* args) {
  args->memory = args->buffer->memory;
  return nullptr;
}

PJRT_Error* PJRT_Buffer_IsOnCpu(PJRT_Buffer_IsOnCpu_Args* args) {
  args->is_on_cpu = args->buffer->device->is_host_memory || args->buffer->memory->is_host;
  return nullptr;
}

PJRT_Error* PJRT_Buffer_Delete(PJRT_Buffer_Delete_Args* args) {
  auto deletion = MakeArgs<FlagosBufferDeleteArgs>();
  deletion.buffer = args->buffer->get();
  return TakeError(args->buffer->api(), args->buffer->api().buffer_delete(&deletion));
}

PJRT_Error* PJRT_Buffer_IsDeleted(PJRT_Buffer_IsDeleted_Args* args) {
  // A launch may have donated it, so only the backend knows.
  auto described = MakeArgs<FlagosBufferDescribeArgs>();
  described.buffer = args->buffer->get();
  FLAGOS_RETURN_IF_ERROR(TakeError(args->buffer->api(), args->buffer->api().buffer_describe(&described)));
  args->is_deleted = described.is_deleted != 0;
  return nullptr;
}

PJRT_Error* PJRT_Buffer_ReadyEvent(PJRT_Buffer_ReadyEvent_Args* args) {
  auto ready = MakeArgs<FlagosBufferReadyEventArgs>();
  ready.buffer = args->buffer->get();
  FLAGOS_RETURN_IF_ERROR(TakeError(args->buffer->api(), args->buffer->api().buffer_ready_event(&ready)));
  args->event = WrapEvent(args->buffer->client.get(), ready.event);
  return nullptr;
}

PJRT_Error* PJRT_Buffer_UnsafePointer(PJRT_Buffer_UnsafePointer_Args* args) {
  void* pointer = nullptr;
  FLAGOS_RETURN_IF_ERROR(Pointer(*args->buffer, &pointer));
  args->buffer_pointer = reinterpret_cast<uintptr_t>(pointer);
  RememberPointer(args->buffer, args->buffer_pointer);
  return nullptr;
}

PJRT_Error* PJRT_Buffer_OpaqueDeviceMemoryDataPointer(PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args* args) {
  return Pointer(*args->buffer, &args->device_memory_ptr);
}

PJRT_Error* PJRT_Buffer_IncreaseExternalReferenceCount(PJRT_Buffer_IncreaseExternalReferenceCount_Args* args) {
  FLAGOS_RETURN_IF_ERROR(HoldBuffer(*args->buffer, 1));
  args->buffer->external_references.fetch_add(1, std::memory_order_relaxed);
  return nullptr;
}

PJRT_Error* PJRT_Buffer_DecreaseExternalReferenceCount(PJRT_Buffer_DecreaseExternalReferenceCount_Args* args) {
  std::atomic<int64_t>& references = args->buffer->external_references;
  int64_t count = references.load(std::memory_order_relaxed);
  do {
    if (count == 0) {
      return MakeError(FLAGOS_INVALID_ARGUMENT,
                       "Attempting to decrease reference on a buffer with zero reference count.");
    }
  } while (!references.compare_exchange_weak(count, count - 1, std::memory_order_relaxed));
  return HoldBuffer(*args->buffer, -1);
}

}  // namespace flagos_pjrt

PJRT_Buffer::PJRT_Buffer(PJRT_Client* client, PJRT_Device* device, flagos_pjrt::Memory* memory, PJRT_Buffer_Type type,
                         const int64_t* dims, size_t rank, flagos_pjrt::OwnedBuffer&& handle)
    : client(flagos_pjrt::Ref<PJRT_Client>::Share(client)),
      handle(std::move(handle)),
      device(device),
      memory(memory),
      type(type),
      dims(dims, rank) {}
