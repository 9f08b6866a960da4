#include "topology.h"

#include <algorithm>
#include <utility>

#include "api.h"
#include "element_type.h"
#include "layout.h"
#include "proto.h"

struct PJRT_SerializedTopology {
  std::string bytes;
};

namespace flagos_pjrt {
namespace {

// The serialized form is a protobuf message of this adapter's own: numbers are only ever added.
constexpr uint32_t kPlatformName = 1, kPlatformVersion = 2, kDevice = 3;
constexpr uint32_t kDeviceId = 1, kDeviceProcess = 2, kDeviceKind = 3, kDeviceDebugString = 4, kDeviceToString = 5,
                   kDeviceMemory = 6, kDeviceDefaultMemory = 7;
constexpr uint32_t kMemoryKind = 1, kMemoryKindId = 2;

std::string SerializeDevice(const PJRT_DeviceDescription& device) {
  ProtoWriter writer;
  writer.Varint(kDeviceId, static_cast<uint64_t>(device.id));
  writer.Varint(kDeviceProcess, static_cast<uint64_t>(device.process_index));
  writer.Bytes(kDeviceKind, device.kind);
  writer.Bytes(kDeviceDebugString, device.debug_string);
  writer.Bytes(kDeviceToString, device.to_string);
  for (const PJRT_MemoryDescription& memory : device.memories) {
    ProtoWriter description;
    description.Bytes(kMemoryKind, memory.kind);
    description.Varint(kMemoryKindId, static_cast<uint64_t>(memory.kind_id));
    writer.Bytes(kDeviceMemory, description.Take());
  }
  writer.Varint(kDeviceDefaultMemory, device.default_memory_index);
  return writer.Take();
}

bool ParseMemory(std::string_view message, PJRT_MemoryDescription* memory) {
  ProtoReader reader(message);
  while (reader.Next()) {
    if (reader.field() == kMemoryKind && reader.is_bytes()) memory->kind = reader.bytes();
    if (reader.field() == kMemoryKindId && reader.is_varint()) memory->kind_id = static_cast<int>(reader.varint());
  }
  return reader.ok();
}

bool ParseDevice(std::string_view message, PJRT_DeviceDescription* device) {
  ProtoReader reader(message);
  while (reader.Next()) {
    if (reader.is_varint()) {
      if (reader.field() == kDeviceId) device->id = static_cast<int>(reader.varint());
      if (reader.field() == kDeviceProcess) device->process_index = static_cast<int>(reader.varint());
      if (reader.field() == kDeviceDefaultMemory) device->default_memory_index = reader.varint();
    } else if (reader.is_bytes()) {
      if (reader.field() == kDeviceKind) device->kind = reader.bytes();
      if (reader.field() == kDeviceDebugString) device->debug_string = reader.bytes();
      if (reader.field() == kDeviceToString) device->to_string = reader.bytes();
      if (reader.field() == kDeviceMemory && !ParseMemory(reader.bytes(), &device->memories.emplace_back()))
        return false;
    }
  }
  for (const PJRT_MemoryDescription& memory : device->memories) device->memory_pointers.push_back(&memory);
  if (device->default_memory_index >= device->memories.size()) device->default_memory_index = static_cast<size_t>(-1);
  return reader.ok();
}

bool ParseTopology(std::string_view message, PJRT_TopologyDescription* topology) {
  ProtoReader reader(message);
  while (reader.Next()) {
    if (!reader.is_bytes()) continue;
    if (reader.field() == kPlatformName) topology->platform_name = reader.bytes();
    if (reader.field() == kPlatformVersion) topology->platform_version = reader.bytes();
    if (reader.field() == kDevice) {
      auto& device = topology->owned_descriptions.emplace_back(std::make_unique<PJRT_DeviceDescription>());
      if (!ParseDevice(reader.bytes(), device.get())) return false;
      topology->descriptions.push_back(device.get());
    }
  }
  return reader.ok() && !topology->platform_name.empty();
}

uint64_t Fnv1a(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : bytes) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
  return hash;
}

}  // namespace

PJRT_Error* PJRT_TopologyDescription_Create(PJRT_TopologyDescription_Create_Args* args) {
  // The devices come from a context of the topology's own, made from the same options as a client's.
  Ref<PJRT_Client> client;
  FLAGOS_RETURN_IF_ERROR(CreateClient(args->create_options, args->num_options, /*key_value=*/nullptr,
                                      "PJRT_TopologyDescription_Create", &client));
  auto topology = std::make_unique<PJRT_TopologyDescription>(client.get());
  topology->owner = std::move(client);
  args->topology = topology.release();
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_Destroy(PJRT_TopologyDescription_Destroy_Args* args) {
  // A client's own topology goes with the client.
  if (args->topology != nullptr && (args->topology->client == nullptr || args->topology->owner)) delete args->topology;
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_PlatformName(PJRT_TopologyDescription_PlatformName_Args* args) {
  args->platform_name = args->topology->platform_name.data();
  args->platform_name_size = args->topology->platform_name.size();
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_PlatformVersion(PJRT_TopologyDescription_PlatformVersion_Args* args) {
  args->platform_version = args->topology->platform_version.data();
  args->platform_version_size = args->topology->platform_version.size();
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_GetDeviceDescriptions(PJRT_TopologyDescription_GetDeviceDescriptions_Args* args) {
  args->descriptions = args->topology->descriptions.data();
  args->num_descriptions = args->topology->descriptions.size();
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_Serialize(PJRT_TopologyDescription_Serialize_Args* args) {
  auto serialized = std::make_unique<PJRT_SerializedTopology>(PJRT_SerializedTopology{args->topology->serialized});
  args->serialized_bytes = serialized->bytes.data();
  args->serialized_bytes_size = serialized->bytes.size();
  args->serialized_topology_deleter = [](PJRT_SerializedTopology* topology) { delete topology; };
  args->serialized_topology = serialized.release();
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_Deserialize(PJRT_TopologyDescription_Deserialize_Args* args) {
  auto topology = std::make_unique<PJRT_TopologyDescription>();
  if (!ParseTopology(std::string_view(args->serialized_topology, args->serialized_topology_size), topology.get())) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {"PJRT_TopologyDescription_Deserialize: the ", args->serialized_topology_size,
                      " bytes are no topology that this adapter serialized."});
  }
  topology->Finish();
  args->topology = topology.release();
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_Attributes(PJRT_TopologyDescription_Attributes_Args* args) {
  args->attributes = nullptr;
  args->num_attributes = 0;
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_Fingerprint(PJRT_TopologyDescription_Fingerprint_Args* args) {
  args->fingerprint = args->topology->fingerprint;
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_MakeCanonicalShapeForMemorySpace(
    PJRT_TopologyDescription_MakeCanonicalShapeForMemorySpace_Args* args) {
  constexpr const char* kWhere = "PJRT_TopologyDescription_MakeCanonicalShapeForMemorySpace";
  const std::vector<int>& kinds = args->topology->memory_kind_ids;
  if (std::find(kinds.begin(), kinds.end(), args->memory_space_kind_id) == kinds.end()) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {kWhere, ": no device has a memory of kind id ", args->memory_space_kind_id, "."});
  }
  FLAGOS_RETURN_IF_ERROR(CheckShape(args->element_type, args->dims, args->num_dims, kWhere));
  FLAGOS_RETURN_IF_ERROR(CheckDeviceLayout(args->layout, args->element_type, args->dims, args->num_dims, kWhere));
  const std::string shape =
      SerializeShape(ToFlagosType(args->element_type), args->dims, args->num_dims, RowMajorOrder(args->num_dims));
  auto bytes = std::make_unique<char[]>(shape.size());
  std::copy(shape.begin(), shape.end(), bytes.get());
  args->serialized_shape = bytes.release();
  args->serialized_shape_size = shape.size();
  args->serialized_shape_deleter = [](const char* serialized) { delete[] serialized; };
  return nullptr;
}

PJRT_Error* PJRT_TopologyDescription_GetMemorySpaceKindIds(PJRT_TopologyDescription_GetMemorySpaceKindIds_Args* args) {
  args->memory_space_kind_ids = args->topology->memory_kind_ids.data();
  args->num_memory_space_kind_ids = args->topology->memory_kind_ids.size();
  return nullptr;
}

}  // namespace flagos_pjrt

PJRT_TopologyDescription::PJRT_TopologyDescription(PJRT_Client* client)
    : client(client), platform_name(client->platform_name), platform_version(client->platform_version) {
  for (PJRT_Device* device : client->devices) descriptions.push_back(&device->description);
  Finish();
}

void PJRT_TopologyDescription::Finish() {
  flagos_pjrt::ProtoWriter writer;
  writer.Bytes(flagos_pjrt::kPlatformName, platform_name);
  writer.Bytes(flagos_pjrt::kPlatformVersion, platform_version);
  for (const PJRT_DeviceDescription* device : descriptions) {
    writer.Bytes(flagos_pjrt::kDevice, flagos_pjrt::SerializeDevice(*device));
    for (const PJRT_MemoryDescription& memory : device->memories) memory_kind_ids.push_back(memory.kind_id);
  }
  std::sort(memory_kind_ids.begin(), memory_kind_ids.end());
  memory_kind_ids.erase(std::unique(memory_kind_ids.begin(), memory_kind_ids.end()), memory_kind_ids.end());
  serialized = writer.Take();
  fingerprint = flagos_pjrt::Fnv1a(serialized);
}
