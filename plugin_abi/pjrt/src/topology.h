// Topologies: the devices of a client described apart from it, for compiling ahead of time.
#ifndef FLAGOS_PJRT_TOPOLOGY_H_
#define FLAGOS_PJRT_TOPOLOGY_H_

#include <memory>
#include <string>
#include <vector>

#include "client.h"

struct PJRT_TopologyDescription {
  // Of a client: shares its descriptions.
  explicit PJRT_TopologyDescription(PJRT_Client* client);
  // Of a serialized topology, which has no client to compile with.
  PJRT_TopologyDescription() = default;

  // Call after the fields below are filled.
  void Finish();

  PJRT_Client* client = nullptr;
  flagos_pjrt::Ref<PJRT_Client> owner;  // of a topology that was created on its own: keeps client
  std::vector<std::unique_ptr<PJRT_DeviceDescription>> owned_descriptions;
  std::string platform_name;
  std::string platform_version;
  std::vector<PJRT_DeviceDescription*> descriptions;

  std::vector<int> memory_kind_ids;
  std::string serialized;
  uint64_t fingerprint = 0;
};

#endif  // FLAGOS_PJRT_TOPOLOGY_H_
