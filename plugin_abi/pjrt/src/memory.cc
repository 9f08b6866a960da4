// Memories: where on a device, or beside it, a buffer lies.
#include "api.h"
#include "client.h"

namespace flagos_pjrt {

PJRT_Error* PJRT_Memory_Id(PJRT_Memory_Id_Args* args) {
  args->id = AsMemory(args->memory)->id;
  return nullptr;
}

PJRT_Error* PJRT_Memory_Kind(PJRT_Memory_Kind_Args* args) {
  args->kind = AsMemory(args->memory)->kind.data();
  args->kind_size = AsMemory(args->memory)->kind.size();
  return nullptr;
}

PJRT_Error* PJRT_Memory_Kind_Id(PJRT_Memory_Kind_Id_Args* args) {
  args->kind_id = AsMemory(args->memory)->kind_id;
  return nullptr;
}

PJRT_Error* PJRT_Memory_DebugString(PJRT_Memory_DebugString_Args* args) {
  args->debug_string = AsMemory(args->memory)->debug_string.data();
  args->debug_string_size = AsMemory(args->memory)->debug_string.size();
  return nullptr;
}

PJRT_Error* PJRT_Memory_ToString(PJRT_Memory_ToString_Args* args) {
  args->to_string = AsMemory(args->memory)->to_string.data();
  args->to_string_size = AsMemory(args->memory)->to_string.size();
  return nullptr;
}

PJRT_Error* PJRT_Memory_AddressableByDevices(PJRT_Memory_AddressableByDevices_Args* args) {
  args->devices = AsMemory(args->memory)->devices.data();
  args->num_devices = AsMemory(args->memory)->devices.size();
  return nullptr;
}

}  // namespace flagos_pjrt
