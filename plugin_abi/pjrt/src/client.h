// The client, its devices and its memories: the wrappers around one FlagosContext. Everything immutable is fetched
// once.
#ifndef FLAGOS_PJRT_CLIENT_H_
#define FLAGOS_PJRT_CLIENT_H_

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../converter.h"
#include "error.h"
#include "ref.h"

struct PJRT_MemoryDescription {
  std::string kind;
  int kind_id = 0;
};

struct PJRT_DeviceDescription {
  int id = 0;
  int process_index = 0;
  std::string kind;
  std::string debug_string;
  std::string to_string;
  std::vector<PJRT_NamedValue> attributes;
  std::vector<PJRT_MemoryDescription> memories;
  std::vector<const PJRT_MemoryDescription*> memory_pointers;
  size_t default_memory_index = static_cast<size_t>(-1);
};

namespace flagos_pjrt {

// PJRT_Memory itself is only its first word, a function table that stays null.
struct Memory : PJRT_Memory {
  FlagosMemory* handle = nullptr;
  int id = 0;
  std::string kind;
  int kind_id = 0;
  std::string debug_string;
  std::string to_string;
  std::vector<PJRT_Device*> devices;
  bool is_host = false;  // its kind says that the process can address it
};
inline Memory* AsMemory(PJRT_Memory* memory) { return static_cast<Memory*>(memory); }

// The distributed key-value store that PJRT_Client_Create was given.
struct KeyValueStore {
  PJRT_KeyValueGetCallback get = nullptr;
  void* get_arg = nullptr;
  PJRT_KeyValueTryGetCallback try_get = nullptr;
  void* try_get_arg = nullptr;
  PJRT_KeyValuePutCallback put = nullptr;
  void* put_arg = nullptr;
};

// While one lives, this thread runs a callback of the backend, and a context must not be destroyed here.
class BackendCallbackScope {
 public:
  BackendCallbackScope();
  ~BackendCallbackScope();
  BackendCallbackScope(const BackendCallbackScope&) = delete;
  BackendCallbackScope& operator=(const BackendCallbackScope&) = delete;
};

// Makes a client from create options; key_value may be null. Shared with topologies, which are created the same way.
[[nodiscard]] PJRT_Error* CreateClient(const PJRT_NamedValue* options, size_t num_options,
                                       const PJRT_Client_Create_Args* key_value, const char* where,
                                       Ref<PJRT_Client>* client);

// The clients that exist now.
std::vector<Ref<PJRT_Client>> LiveClients();

}  // namespace flagos_pjrt

struct PJRT_Device {
  PJRT_Client* client = nullptr;
  FlagosDevice* handle = nullptr;
  PJRT_DeviceDescription description;
  bool addressable = false;
  int local_hardware_id = -1;
  bool is_host_memory = false;
  std::vector<PJRT_Memory*> memories;
  PJRT_Memory* default_memory = nullptr;

  // Null when the device has no memory of that kind.
  flagos_pjrt::Memory* FindMemory(std::string_view kind) const;
};

struct PJRT_Client : flagos_pjrt::RefCounted {
  const FlagosApi* api = nullptr;
  FlagosGraphConverter converter = nullptr;
  flagos_pjrt::KeyValueStore key_value_store;
  FlagosContext* context = nullptr;
  int process_index = 0;
  std::string platform_name;
  std::string platform_version;
  std::vector<std::unique_ptr<PJRT_Device>> owned_devices;
  std::vector<std::unique_ptr<flagos_pjrt::Memory>> owned_memories;
  std::vector<PJRT_Device*> devices;
  std::vector<PJRT_Device*> addressable_devices;
  std::vector<PJRT_Memory*> memories;
  std::unique_ptr<PJRT_TopologyDescription> topology;
  std::mutex dma_mutex;
  std::map<const void*, size_t> dma_mappings;

  PJRT_Client();
  ~PJRT_Client();

  PJRT_Device* FindDevice(const FlagosDevice* handle) const;
  PJRT_Memory* FindMemory(const FlagosMemory* handle) const;

  // The list behind LiveClients.
  bool published = false;
  PJRT_Client* previous_client = nullptr;
  PJRT_Client* next_client = nullptr;
};

#endif  // FLAGOS_PJRT_CLIENT_H_
