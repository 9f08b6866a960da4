#include "client.h"

#include <cstring>
#include <thread>

#include "api.h"
#include "flagos_calls.h"
#include "named_values.h"
#include "topology.h"

namespace flagos_pjrt {
namespace {

thread_local int backend_callback_depth = 0;

std::mutex clients_mutex;
PJRT_Client* clients_head = nullptr;

// ---- Create options ----

struct CreateOptions {
  const FlagosApi* api = nullptr;
  FlagosGraphConverter converter = nullptr;
  FlagosHostCallback host_callback = nullptr;
  int32_t process_index = 0;
  int32_t num_processes = 1;
  bool distributed = false;
  std::vector<FlagosNamedValue> forwarded;
};

PJRT_Error* ReadAddress(const PJRT_NamedValue& option, const char* where, uintptr_t* address) {
  if (option.type != PJRT_NamedValue_kInt64) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": option \"", std::string_view(option.name, option.name_size),
                                               "\" must be an integer, the address of a function or table."});
  }
  *address = static_cast<uintptr_t>(option.int64_value);
  return nullptr;
}

PJRT_Error* CheckApi(const FlagosApi* api, const char* where) {
  if (api == nullptr) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {where,
                      ": option \"flagos_api\", the address of a backend's function table, is missing. The flagos "
                      "loader passes it; start JAX through the flagos entry point."});
  }
  if (api->struct_size < sizeof(FlagosApi) || (api->version >> 16) != FLAGOS_ABI_MAJOR) {
    return MakeError(
        FLAGOS_FAILED_PRECONDITION,
        {where, ": the backend's table speaks ABI ", api->version >> 16, ".", api->version & 0xffff, " in ",
         api->struct_size, " bytes; this adapter needs ABI ", FLAGOS_ABI_MAJOR, ".", FLAGOS_ABI_MINOR, " in at least ",
         sizeof(FlagosApi), " bytes. Update the older of the two packages."});
  }
  return nullptr;
}

PJRT_Error* ParseOptions(const PJRT_NamedValue* options, size_t count, const char* where, CreateOptions* parsed) {
  for (size_t i = 0; i < count; ++i) {
    const PJRT_NamedValue& option = options[i];
    const std::string_view name(option.name, option.name_size);
    uintptr_t address = 0;
    if (name == "flagos_api") {
      FLAGOS_RETURN_IF_ERROR(ReadAddress(option, where, &address));
      parsed->api = reinterpret_cast<const FlagosApi*>(address);
    } else if (name == "flagos_converter") {
      FLAGOS_RETURN_IF_ERROR(ReadAddress(option, where, &address));
      parsed->converter = reinterpret_cast<FlagosGraphConverter>(address);
    } else if (name == "flagos_host_callback") {
      FLAGOS_RETURN_IF_ERROR(ReadAddress(option, where, &address));
      parsed->host_callback = reinterpret_cast<FlagosHostCallback>(address);
    } else {
      if ((name == "node_id" || name == "num_nodes") && option.type == PJRT_NamedValue_kInt64) {
        (name == "node_id" ? parsed->process_index : parsed->num_processes) = static_cast<int32_t>(option.int64_value);
        parsed->distributed = true;
      }
      FLAGOS_RETURN_IF_ERROR(ToFlagosValue(option, &parsed->forwarded.emplace_back()));
    }
  }
  if (parsed->num_processes < 1 || parsed->process_index < 0 || parsed->process_index >= parsed->num_processes) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {where, ": node_id ", parsed->process_index, " is not one of ",
                                               parsed->num_processes, " nodes (num_nodes)."});
  }
  return CheckApi(parsed->api, where);
}

// ---- Key-value store ----

// How PJRT callbacks report failures: through an error that this adapter makes.
PJRT_Error* MakeCallbackError(PJRT_Error_Code code, const char* message, size_t size) {
  return MakeError(code, std::string_view(message, size));
}

int32_t TakeCode(PJRT_Error* error) {
  const int32_t code = ErrorCode(error);
  DestroyError(error);
  return code;
}

template <typename Args, typename Callback>
int32_t GetValue(Args* args, Callback callback, const char* key, size_t key_size, FlagosBytesSink sink,
                 void* sink_data) {
  PJRT_CallbackError make_error = &MakeCallbackError;
  args->key = key;
  args->key_size = key_size;
  args->callback_error = &make_error;
  if (PJRT_Error* error = callback(args)) return TakeCode(error);
  sink(sink_data, args->value, args->value_size);
  if (args->value_deleter_callback != nullptr) args->value_deleter_callback(args->value);
  return FLAGOS_OK;
}

int32_t KeyValueGet(void* user_data, const char* key, size_t key_size, int64_t timeout_ms, FlagosBytesSink sink,
                    void* sink_data) {
  const auto* store = static_cast<const KeyValueStore*>(user_data);
  if (timeout_ms == 0 && store->try_get != nullptr) {
    PJRT_KeyValueTryGetCallback_Args args = {};
    args.struct_size = PJRT_KeyValueTryGetCallback_Args_STRUCT_SIZE;
    args.user_arg = store->try_get_arg;
    return GetValue(&args, store->try_get, key, key_size, sink, sink_data);
  }
  PJRT_KeyValueGetCallback_Args args = {};
  args.struct_size = PJRT_KeyValueGetCallback_Args_STRUCT_SIZE;
  args.user_arg = store->get_arg;
  args.timeout_in_ms = static_cast<int>(timeout_ms > INT32_MAX ? INT32_MAX : timeout_ms);
  return GetValue(&args, store->get, key, key_size, sink, sink_data);
}

int32_t KeyValuePut(void* user_data, const char* key, size_t key_size, const void* value, size_t value_size) {
  const auto* store = static_cast<const KeyValueStore*>(user_data);
  PJRT_CallbackError make_error = &MakeCallbackError;
  PJRT_KeyValuePutCallback_Args args = {};
  args.struct_size = PJRT_KeyValuePutCallback_Args_STRUCT_SIZE;
  args.key = key;
  args.key_size = key_size;
  args.value = static_cast<const char*>(value);
  args.value_size = value_size;
  args.callback_error = &make_error;
  args.user_arg = store->put_arg;
  PJRT_Error* error = store->put(&args);
  return error == nullptr ? FLAGOS_OK : TakeCode(error);
}

// ---- Reading the context ----

bool IsHostKind(std::string_view kind) { return kind == "pinned_host" || kind == "unpinned_host"; }

PJRT_Error* DescribeMemory(const FlagosApi& api, FlagosMemory* handle, Memory* memory) {
  auto described = MakeArgs<FlagosMemoryDescribeArgs>();
  described.memory = handle;
  FLAGOS_RETURN_IF_ERROR(TakeError(api, api.memory_describe(&described)));
  memory->vtable = nullptr;
  memory->handle = handle;
  memory->id = static_cast<int>(described.id);
  memory->kind = described.kind;
  memory->kind_id = described.kind_id;
  memory->debug_string = described.debug_string;
  memory->to_string = described.to_string;
  memory->is_host = IsHostKind(memory->kind);
  return nullptr;
}

// Whether the backend runs in a process of its own: then this one can address none of its memories.
bool IsIsolated(const FlagosNamedValue* attributes, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (std::string_view(attributes[i].name, attributes[i].name_size) == "isolated_process_id") return true;
  }
  return false;
}

PJRT_Error* DescribeDevice(PJRT_Client* client, FlagosDevice* handle, PJRT_Device* device) {
  auto described = MakeArgs<FlagosDeviceDescribeArgs>();
  described.device = handle;
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->device_describe(&described)));
  device->client = client;
  device->handle = handle;
  device->addressable = described.is_addressable != 0;
  device->local_hardware_id = described.local_hardware_id;
  device->is_host_memory = described.is_host_memory != 0;
  PJRT_DeviceDescription& description = device->description;
  description.id = static_cast<int>(described.id);
  description.process_index = described.process_index;
  description.kind = described.kind;
  description.debug_string = described.debug_string;
  description.to_string = described.to_string;
  description.attributes = ToPjrtValues(described.attributes, described.num_attributes);
  const bool is_isolated = IsIsolated(described.attributes, described.num_attributes);
  for (size_t i = 0; i < described.num_memories; ++i) {
    PJRT_Memory* memory = client->FindMemory(described.memories[i]);
    if (memory == nullptr) continue;  // another process's
    if (described.memories[i] == described.default_memory) {
      device->default_memory = memory;
      description.default_memory_index = description.memories.size();
    }
    device->memories.push_back(memory);
    if (is_isolated) AsMemory(memory)->is_host = false;
    AsMemory(memory)->devices.push_back(device);
    description.memories.push_back({AsMemory(memory)->kind, AsMemory(memory)->kind_id});
  }
  for (const PJRT_MemoryDescription& memory : description.memories) description.memory_pointers.push_back(&memory);
  return nullptr;
}

PJRT_Error* DescribeContext(PJRT_Client* client) {
  auto described = MakeArgs<FlagosContextDescribeArgs>();
  described.context = client->context;
  FLAGOS_RETURN_IF_ERROR(TakeError(*client->api, client->api->context_describe(&described)));
  client->platform_name = described.platform_name;
  client->platform_version = described.platform_version;
  for (size_t i = 0; i < described.num_memories; ++i) {
    auto& memory = client->owned_memories.emplace_back(std::make_unique<Memory>());
    FLAGOS_RETURN_IF_ERROR(DescribeMemory(*client->api, described.memories[i], memory.get()));
    client->memories.push_back(memory.get());
  }
  for (size_t i = 0; i < described.num_devices; ++i) {
    auto& device = client->owned_devices.emplace_back(std::make_unique<PJRT_Device>());
    FLAGOS_RETURN_IF_ERROR(DescribeDevice(client, described.devices[i], device.get()));
    client->devices.push_back(device.get());
  }
  for (size_t i = 0; i < described.num_addressable_devices; ++i) {
    PJRT_Device* device = client->FindDevice(described.addressable_devices[i]);
    if (device == nullptr) {
      return MakeError(FLAGOS_INTERNAL, {"The backend's addressable device ", i, " is not among its devices."});
    }
    client->addressable_devices.push_back(device);
  }
  return nullptr;
}

// From here on LiveClients finds it.
void Publish(PJRT_Client* client) {
  const std::lock_guard<std::mutex> lock(clients_mutex);
  client->next_client = clients_head;
  if (clients_head != nullptr) clients_head->previous_client = client;
  clients_head = client;
  client->published = true;
}

}  // namespace

BackendCallbackScope::BackendCallbackScope() { ++backend_callback_depth; }
BackendCallbackScope::~BackendCallbackScope() { --backend_callback_depth; }

PJRT_Error* CreateClient(const PJRT_NamedValue* options, size_t num_options, const PJRT_Client_Create_Args* key_value,
                         const char* where, Ref<PJRT_Client>* client) {
  CreateOptions parsed;
  FLAGOS_RETURN_IF_ERROR(ParseOptions(options, num_options, where, &parsed));
  auto created = Ref<PJRT_Client>::Adopt(new PJRT_Client);
  created->api = parsed.api;
  created->converter = parsed.converter;
  created->process_index = parsed.process_index;
  auto args = MakeArgs<FlagosContextCreateArgs>();
  args.options = parsed.forwarded.data();
  args.num_options = parsed.forwarded.size();
  args.process_index = parsed.process_index;
  args.num_processes = parsed.num_processes;
  args.host_callback = parsed.host_callback;
  // Without node_id and num_nodes jaxlib leaves the callbacks uninitialised, so nothing but these options may say that
  // there is a store.
  if (parsed.distributed && key_value != nullptr && key_value->kv_get_callback != nullptr &&
      key_value->kv_put_callback != nullptr) {
    KeyValueStore& store = created->key_value_store;
    store.get = key_value->kv_get_callback;
    store.get_arg = key_value->kv_get_user_arg;
    store.put = key_value->kv_put_callback;
    store.put_arg = key_value->kv_put_user_arg;
    store.try_get = key_value->kv_try_get_callback;
    store.try_get_arg = key_value->kv_try_get_user_arg;
    args.key_value_get = &KeyValueGet;
    args.key_value_put = &KeyValuePut;
    args.key_value_user_data = &store;
  }
  FLAGOS_RETURN_IF_ERROR(TakeError(*created->api, created->api->context_create(&args)));
  created->context = args.context;
  FLAGOS_RETURN_IF_ERROR(DescribeContext(created.get()));
  created->topology = std::make_unique<PJRT_TopologyDescription>(created.get());
  Publish(created.get());
  *client = std::move(created);
  return nullptr;
}

std::vector<Ref<PJRT_Client>> LiveClients() {
  std::vector<Ref<PJRT_Client>> clients;
  const std::lock_guard<std::mutex> lock(clients_mutex);
  for (PJRT_Client* client = clients_head; client != nullptr; client = client->next_client) {
    if (client->TryRetain()) clients.push_back(Ref<PJRT_Client>::Adopt(client));
  }
  return clients;
}

PJRT_Error* PJRT_Client_Create(PJRT_Client_Create_Args* args) {
  Ref<PJRT_Client> client;
  FLAGOS_RETURN_IF_ERROR(CreateClient(args->create_options, args->num_options, args, "PJRT_Client_Create", &client));
  args->client = client.Leak();
  return nullptr;
}

PJRT_Error* PJRT_Client_Destroy(PJRT_Client_Destroy_Args* args) {
  Release(args->client);
  return nullptr;
}

PJRT_Error* PJRT_Client_PlatformName(PJRT_Client_PlatformName_Args* args) {
  args->platform_name = args->client->platform_name.data();
  args->platform_name_size = args->client->platform_name.size();
  return nullptr;
}

PJRT_Error* PJRT_Client_ProcessIndex(PJRT_Client_ProcessIndex_Args* args) {
  args->process_index = args->client->process_index;
  return nullptr;
}

PJRT_Error* PJRT_Client_PlatformVersion(PJRT_Client_PlatformVersion_Args* args) {
  args->platform_version = args->client->platform_version.data();
  args->platform_version_size = args->client->platform_version.size();
  return nullptr;
}

PJRT_Error* PJRT_Client_TopologyDescription(PJRT_Client_TopologyDescription_Args* args) {
  args->topology = args->client->topology.get();
  return nullptr;
}

PJRT_Error* PJRT_Client_Devices(PJRT_Client_Devices_Args* args) {
  args->devices = args->client->devices.data();
  args->num_devices = args->client->devices.size();
  return nullptr;
}

PJRT_Error* PJRT_Client_AddressableDevices(PJRT_Client_AddressableDevices_Args* args) {
  args->addressable_devices = args->client->addressable_devices.data();
  args->num_addressable_devices = args->client->addressable_devices.size();
  return nullptr;
}

PJRT_Error* PJRT_Client_LookupDevice(PJRT_Client_LookupDevice_Args* args) {
  for (PJRT_Device* device : args->client->devices) {
    if (device->description.id == args->id) {
      args->device = device;
      return nullptr;
    }
  }
  return MakeError(FLAGOS_INVALID_ARGUMENT, {"No matching device found for device_id ", args->id});
}

PJRT_Error* PJRT_Client_LookupAddressableDevice(PJRT_Client_LookupAddressableDevice_Args* args) {
  for (PJRT_Device* device : args->client->addressable_devices) {
    if (device->local_hardware_id == args->local_hardware_id) {
      args->addressable_device = device;
      return nullptr;
    }
  }
  return MakeError(FLAGOS_INVALID_ARGUMENT,
                   {"No matching device found for local_hardware_id ", args->local_hardware_id});
}

PJRT_Error* PJRT_Client_AddressableMemories(PJRT_Client_AddressableMemories_Args* args) {
  args->addressable_memories = args->client->memories.data();
  args->num_addressable_memories = args->client->memories.size();
  return nullptr;
}

PJRT_Error* PJRT_Client_DefaultDeviceAssignment(PJRT_Client_DefaultDeviceAssignment_Args* args) {
  constexpr const char* kWhere = "PJRT_Client_DefaultDeviceAssignment";
  if (args->num_replicas <= 0 || args->num_partitions <= 0) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, {kWhere, ": `num_replicas` and `num_partitions` must be positive, got ",
                                               args->num_replicas, " and ", args->num_partitions});
  }
  const int64_t wanted = static_cast<int64_t>(args->num_replicas) * args->num_partitions;
  if (static_cast<int64_t>(args->default_assignment_size) < wanted) {
    return MakeError(FLAGOS_FAILED_PRECONDITION, {kWhere, ": `default_assignment_size` ", args->default_assignment_size,
                                                  " < `num_replicas * num_partitions`, ", args->num_replicas, " * ",
                                                  args->num_partitions, " = ", wanted});
  }
  const std::vector<PJRT_Device*>& devices = args->client->devices;
  if (wanted > static_cast<int64_t>(devices.size())) {
    return MakeError(FLAGOS_INVALID_ARGUMENT,
                     {kWhere, ": ", args->num_replicas, " replicas of ", args->num_partitions, " partitions need ",
                      wanted, " devices; there are ", devices.size(), "."});
  }
  for (size_t i = 0; i < static_cast<size_t>(wanted); ++i) args->default_assignment[i] = devices[i]->description.id;
  return nullptr;
}

// The backend has no notion of a peer's health: collectives that wait for a lost peer fail on their own.
PJRT_Error* PJRT_Client_UpdateGlobalProcessInfo(PJRT_Client_UpdateGlobalProcessInfo_Args* args) {
  if (args->process_infos == nullptr && args->num_process_infos > 0) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, "PJRT_Client_UpdateGlobalProcessInfo: process_infos is NULL.");
  }
  return nullptr;
}

// A device whose memory is host memory reaches all of it already, so mapping is bookkeeping.
PJRT_Error* PJRT_Client_DmaMap(PJRT_Client_DmaMap_Args* args) {
  for (const PJRT_Device* device : args->client->addressable_devices) {
    if (!device->is_host_memory) {
      return MakeError(FLAGOS_UNIMPLEMENTED, {"PJRT_Client_DmaMap: device ", device->description.to_string,
                                              " cannot map host memory; the backend ABI has no call for it."});
    }
  }
  if (args->data == nullptr || args->size == 0) {
    return MakeError(FLAGOS_INVALID_ARGUMENT, "PJRT_Client_DmaMap: the memory to map is empty.");
  }
  const std::lock_guard<std::mutex> lock(args->client->dma_mutex);
  if (!args->client->dma_mappings.emplace(args->data, args->size).second) {
    return MakeError(FLAGOS_ALREADY_EXISTS, "PJRT_Client_DmaMap: this address is mapped already.");
  }
  return nullptr;
}

PJRT_Error* PJRT_Client_DmaUnmap(PJRT_Client_DmaUnmap_Args* args) {
  const std::lock_guard<std::mutex> lock(args->client->dma_mutex);
  if (args->client->dma_mappings.erase(args->data) == 0) {
    return MakeError(FLAGOS_NOT_FOUND, "PJRT_Client_DmaUnmap: this address is not mapped.");
  }
  return nullptr;
}

}  // namespace flagos_pjrt

using flagos_pjrt::clients_head;
using flagos_pjrt::clients_mutex;

PJRT_Client::PJRT_Client() = default;

PJRT_Client::~PJRT_Client() {
  if (published) {
    const std::lock_guard<std::mutex> lock(clients_mutex);
    (previous_client != nullptr ? previous_client->next_client : clients_head) = next_client;
    if (next_client != nullptr) next_client->previous_client = previous_client;
  }
  if (context == nullptr) return;
  if (flagos_pjrt::backend_callback_depth == 0) {
    api->context_destroy(context);
  } else {
    // A backend joins its threads here, and this is one of them.
    std::thread([api = api, context = context] { api->context_destroy(context); }).detach();
  }
}

PJRT_Device* PJRT_Client::FindDevice(const FlagosDevice* handle) const {
  for (PJRT_Device* device : devices) {
    if (device->handle == handle) return device;
  }
  return nullptr;
}

PJRT_Memory* PJRT_Client::FindMemory(const FlagosMemory* handle) const {
  for (PJRT_Memory* memory : memories) {
    if (flagos_pjrt::AsMemory(memory)->handle == handle) return memory;
  }
  return nullptr;
}
