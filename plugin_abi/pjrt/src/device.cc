// Devices and their descriptions.
#include <string>

#include "api.h"
#include "client.h"
#include "flagos_calls.h"

// What PJRT_Device_CreateAsyncTrackingEvent gives out: a label for work in flight, for debuggers.
struct PJRT_AsyncTrackingEvent {
  std::string description;
};

namespace flagos_pjrt {
namespace {

void SetCounter(int64_t value, int64_t* counter, bool* is_set) {
  *is_set = value >= 0;
  *counter = *is_set ? value : 0;
}

PJRT_Error* MemoryStats(PJRT_Device* device, bool clear_peaks, FlagosDeviceMemoryStatsArgs* stats) {
  *stats = MakeArgs<FlagosDeviceMemoryStatsArgs>();
  stats->device = device->handle;
  stats->clear_peaks = clear_peaks ? 1 : 0;
  return TakeError(*device->client->api, device->client->api->device_memory_stats(stats));
}

}  // namespace

PJRT_Error* PJRT_DeviceDescription_Id(PJRT_DeviceDescription_Id_Args* args) {
  args->id = args->device_description->id;
  return nullptr;
}

PJRT_Error* PJRT_DeviceDescription_ProcessIndex(PJRT_DeviceDescription_ProcessIndex_Args* args) {
  args->process_index = args->device_description->process_index;
  return nullptr;
}

PJRT_Error* PJRT_DeviceDescription_Attributes(PJRT_DeviceDescription_Attributes_Args* args) {
  args->attributes = args->device_description->attributes.data();
  args->num_attributes = args->device_description->attributes.size();
  return nullptr;
}

PJRT_Error* PJRT_DeviceDescription_Kind(PJRT_DeviceDescription_Kind_Args* args) {
  args->device_kind = args->device_description->kind.data();
  args->device_kind_size = args->device_description->kind.size();
  return nullptr;
}

PJRT_Error* PJRT_DeviceDescription_DebugString(PJRT_DeviceDescription_DebugString_Args* args) {
  args->debug_string = args->device_description->debug_string.data();
  args->debug_string_size = args->device_description->debug_string.size();
  return nullptr;
}

PJRT_Error* PJRT_DeviceDescription_ToString(PJRT_DeviceDescription_ToString_Args* args) {
  args->to_string = args->device_description->to_string.data();
  args->to_string_size = args->device_description->to_string.size();
  return nullptr;
}

PJRT_Error* PJRT_Device_GetDescription(PJRT_Device_GetDescription_Args* args) {
  args->device_description = &args->device->description;
  return nullptr;
}

PJRT_Error* PJRT_Device_IsAddressable(PJRT_Device_IsAddressable_Args* args) {
  args->is_addressable = args->device->addressable;
  return nullptr;
}

PJRT_Error* PJRT_Device_LocalHardwareId(PJRT_Device_LocalHardwareId_Args* args) {
  args->local_hardware_id = args->device->local_hardware_id;
  return nullptr;
}

PJRT_Error* PJRT_Device_AddressableMemories(PJRT_Device_AddressableMemories_Args* args) {
  args->memories = args->device->memories.data();
  args->num_memories = args->device->memories.size();
  return nullptr;
}

PJRT_Error* PJRT_Device_DefaultMemory(PJRT_Device_DefaultMemory_Args* args) {
  if (args->device->default_memory == nullptr) {
    return MakeError(FLAGOS_FAILED_PRECONDITION,
                     {"PJRT_Device_DefaultMemory: device ", args->device->description.to_string,
                      " belongs to another process; its memories cannot be reached from this one."});
  }
  args->memory = args->device->default_memory;
  return nullptr;
}

PJRT_Error* PJRT_Device_MemoryStats(PJRT_Device_MemoryStats_Args* args) {
  FlagosDeviceMemoryStatsArgs stats;
  FLAGOS_RETURN_IF_ERROR(MemoryStats(args->device, /*clear_peaks=*/false, &stats));
  args->bytes_in_use = stats.bytes_in_use >= 0 ? stats.bytes_in_use : 0;
  SetCounter(stats.peak_bytes_in_use, &args->peak_bytes_in_use, &args->peak_bytes_in_use_is_set);
  SetCounter(stats.num_allocations, &args->num_allocs, &args->num_allocs_is_set);
  SetCounter(stats.largest_allocation, &args->largest_alloc_size, &args->largest_alloc_size_is_set);
  SetCounter(stats.bytes_limit, &args->bytes_limit, &args->bytes_limit_is_set);
  // The backend ABI does not count these.
  args->bytes_reserved_is_set = false;
  args->peak_bytes_reserved_is_set = false;
  args->bytes_reservable_limit_is_set = false;
  args->largest_free_block_bytes_is_set = false;
  args->pool_bytes_is_set = false;
  args->peak_pool_bytes_is_set = false;
  if (FLAGOS_HAS_FIELD(args, PJRT_Device_MemoryStats_Args, peak_allocated_bytes_is_set)) {
    args->peak_allocated_bytes_is_set = false;
  }
  return nullptr;
}

PJRT_Error* PJRT_Device_ClearMemoryStats(PJRT_Device_ClearMemoryStats_Args* args) {
  FlagosDeviceMemoryStatsArgs stats;
  return MemoryStats(args->device, /*clear_peaks=*/true, &stats);
}

PJRT_Error* PJRT_Device_GetAttributes(PJRT_Device_GetAttributes_Args* args) {
  args->attributes = args->device->description.attributes.data();
  args->num_attributes = args->device->description.attributes.size();
  // They live as long as the device.
  args->device_attributes = nullptr;
  args->attributes_deleter = [](PJRT_Device_Attributes*) {};
  return nullptr;
}

PJRT_Error* PJRT_Device_PoisonExecution(PJRT_Device_PoisonExecution_Args* args) {
  return MakeError(FLAGOS_UNIMPLEMENTED,
                   {"PJRT_Device_PoisonExecution: launch ", args->launch_id,
                    " cannot be poisoned; the backend ABI has no way to fail work that is enqueued."});
}

PJRT_Error* PJRT_Device_CreateAsyncTrackingEvent(PJRT_Device_CreateAsyncTrackingEvent_Args* args) {
  args->event = new PJRT_AsyncTrackingEvent{std::string(args->description, args->description_size)};
  return nullptr;
}

PJRT_Error* PJRT_AsyncTrackingEvent_Destroy(PJRT_AsyncTrackingEvent_Destroy_Args* args) {
  delete args->event;
  return nullptr;
}

}  // namespace flagos_pjrt

flagos_pjrt::Memory* PJRT_Device::FindMemory(std::string_view kind) const {
  for (PJRT_Memory* memory : memories) {
    if (flagos_pjrt::AsMemory(memory)->kind == kind) return flagos_pjrt::AsMemory(memory);
  }
  return nullptr;
}
