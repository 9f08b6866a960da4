// Compiled programs. PJRT_Executable and PJRT_LoadedExecutable are two handles on one Program.
#ifndef FLAGOS_PJRT_EXECUTABLE_H_
#define FLAGOS_PJRT_EXECUTABLE_H_

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "client.h"
#include "flagos_calls.h"

namespace flagos_pjrt {

// What the backend says of a compiled program, in PJRT's terms, fetched once.
class Program : public RefCounted {
 public:
  // Takes over handle.
  [[nodiscard]] static PJRT_Error* Create(PJRT_Client* client, OwnedExecutable handle, Ref<Program>* program);

  // The optimized module as xla.HloModuleProtoWithConfig; made at the first call.
  [[nodiscard]] PJRT_Error* OptimizedModule(std::string_view* module);
  [[nodiscard]] PJRT_Error* Artifact(int32_t kind, std::string* bytes) const;

  Ref<PJRT_Client> client;
  OwnedExecutable handle;
  FlagosExecutableDescribeArgs described;  // its pointers live as long as handle
  std::string_view name;
  std::string_view fingerprint;
  std::vector<PJRT_Device*> devices;
  std::vector<PJRT_LogicalDeviceIds> logical_ids;
  std::string device_assignment;  // serialized xla.DeviceAssignmentProto
  std::vector<PJRT_Buffer_Type> output_types;
  std::vector<size_t> output_memory_kind_sizes;
  std::vector<size_t> argument_memory_kind_sizes;
  std::vector<const int64_t*> output_dims;  // of each output
  std::vector<Memory*> output_memories;     // [devices][outputs]
  std::vector<const char*> output_shardings, argument_shardings;
  std::vector<size_t> output_sharding_sizes, argument_sharding_sizes;
  std::vector<PJRT_NamedValue> cost_analysis;

 private:
  Program(PJRT_Client* client, OwnedExecutable handle);
  [[nodiscard]] PJRT_Error* ReadDevices();
  [[nodiscard]] PJRT_Error* ReadOutputs();

  std::mutex optimized_mutex_;
  std::string optimized_;
};

// Converts and compiles; format, code and options as PJRT gives them.
[[nodiscard]] PJRT_Error* Compile(PJRT_Client* client, const PJRT_Program* source, std::string_view options,
                                  const char* where, Ref<Program>* program);
// Refuses, instead of waiting for ever, when the converter cannot run as long as the caller waits.
[[nodiscard]] PJRT_Error* CheckConverterAnswers(PJRT_Client* client, const char* where);
// Loads what Artifact(FLAGOS_ARTIFACT_SERIALIZED) gave, on the devices that options assign, if they assign any.
[[nodiscard]] PJRT_Error* Load(PJRT_Client* client, std::string_view serialized, std::string_view options,
                               const char* where, Ref<Program>* program);

}  // namespace flagos_pjrt

struct PJRT_Executable {
  flagos_pjrt::Ref<flagos_pjrt::Program> program;
};

struct PJRT_LoadedExecutable {
  flagos_pjrt::Ref<flagos_pjrt::Program> program;
  std::atomic<bool> deleted{false};
};

#endif  // FLAGOS_PJRT_EXECUTABLE_H_
