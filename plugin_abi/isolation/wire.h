// The messages between host and child: structs, and their form as protobuf (proto/isolation.proto, docs/isolation.md).
// A decoder takes any bytes and returns false for those that are no message.
#ifndef FLAGOS_ISOLATION_WIRE_H_
#define FLAGOS_ISOLATION_WIRE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "status.h"

namespace flagos_isolation {

// Raised when an older side would misread a newer one; both sides refuse another.
constexpr uint32_t kWireVersion = 5;

enum class Method : uint32_t {
  kNone = 0,
  kContextCreate = 1,
  kContextDestroy = 2,
  kDeviceMemoryStats = 3,
  kDeviceSynchronize = 4,
  kEventCreate = 5,
  kEventDestroy = 6,  // no reply
  kEventSet = 7,
  kBufferFromHost = 8,
  kBufferAllocate = 9,
  kBufferPromise = 10,
  kBufferFulfill = 11,
  kBufferDestroy = 12,  // no reply
  kBufferReadyEvent = 13,
  kBufferToHost = 14,
  kBufferReadRaw = 15,
  kBufferWriteRaw = 16,
  kBufferCopy = 17,
  kBufferBitcast = 18,
  kBufferDelete = 19,
  kBufferHold = 20,
  kBufferDonate = 21,
  kCompile = 22,
  kExecutableLoad = 23,
  kExecutableDestroy = 24,  // no reply
  kExecutableArtifact = 25,
  kExecute = 26,
  kBufferUnpin = 27,  // no reply
  kAnswer = 28,       // no reply
  kProfilerStart = 29,
  kProfilerStop = 30,
};

inline bool HasReply(Method method) {
  return method != Method::kEventDestroy && method != Method::kBufferDestroy && method != Method::kExecutableDestroy &&
         method != Method::kBufferUnpin && method != Method::kAnswer;
}

struct NamedValue {
  std::string name;
  int32_t kind = FLAGOS_VALUE_STRING;
  std::string string_value;
  std::vector<int64_t> int64_list;
  int64_t int64_value = 0;  // also of a bool
  double double_value = 0;
};

// What a backend said at its entry, and that it speaks this wire.
struct Hello {
  uint32_t wire_version = 0;
  uint32_t version_min = 0, version_max = 0;  // of the host: its range; of the child: the plugin's
  uint32_t version = 0;                       // the child's: of the table
  std::string name, platform, backend_version, git_revision, compiler, glibc, build_id;
  int64_t cxx11_abi = 0, python_abi = 0;
  std::string refusal;              // the child's: why it serves nothing
  uint64_t probe = 0;               // the child's: an address of its memory
  std::vector<std::string> denied;  // the child's, before all else: calls that its listener hands over
};

struct Device {
  int64_t id = 0, process_index = 0, local_hardware_id = 0, is_addressable = 0;
  std::string kind, debug_string, to_string;
  std::vector<NamedValue> attributes;
  std::vector<int64_t> memories;  // indices
  int64_t default_memory = 0;     // 1 + index, or 0
  bool is_host_memory = false;    // of the child
};

struct Memory {
  int64_t id = 0, kind_id = 0;
  std::string kind, debug_string, to_string;
  std::vector<int64_t> devices;  // indices
};

struct Context {
  std::string platform_name, platform_version;
  std::vector<Device> devices;
  std::vector<int64_t> addressable_devices;  // indices
  std::vector<Memory> memories;
};

struct Buffer {
  int64_t element_type = 0, size_bytes = 0, device = 0, memory = 0;  // 1 + index, or 0
  std::vector<int64_t> dims;
  bool is_ready = false;  // well, so that nobody needs to ask
};

struct Executable {
  std::string name, fingerprint;
  int64_t num_replicas = 0, num_partitions = 0;
  std::vector<int64_t> devices, device_assignment, output_types, output_dims, output_ranks, argument_aliases;
  std::vector<std::string> output_memory_kinds, argument_memory_kinds;
  std::vector<std::string> output_shardings, argument_shardings;  // empty: none has one
  std::vector<int64_t> sizes;                                     // generated code, arguments, outputs, aliases, ...
  std::vector<NamedValue> cost_analysis;
};
constexpr size_t kNumSizes = 6;

struct Call {
  Method method = Method::kNone;
  uint64_t object = 0;             // what the call is about: an id that the host gave, or the index of a device
  uint64_t other = 0;              // the source of fulfill, the dependency of donate
  uint64_t event = 0;              // the id that the host gives the event which the call makes
  uint64_t released = 0;           // the same for the moment from which on a segment is the host's again
  std::vector<int64_t> made;       // ids that the host gives the objects which the call makes
  int64_t memory = 0, device = 0;  // 1 + index, or 0
  int64_t element_type = 0, number = 0, offset = 0, size = 0, launch_id = 0, num_devices = 0;
  std::vector<int64_t> dims, arguments, non_donatable;
  std::string data;
  uint64_t segment = 0;            // shared memory with the contents instead of `data`
  std::vector<int64_t> forgotten;  // segments that the host has given up
  std::vector<NamedValue> options;
  Status error;
  std::vector<int64_t> destroyed;     // buffers that the host has let go of before
  std::vector<std::string> contents;  // of an answer: the results of a callback
  int64_t process_index = 0, num_processes = 0;
};

struct Reply {
  Status error;
  Context context;
  std::vector<Buffer> buffers;
  Executable executable;
  std::vector<int64_t> ready;    // events of this call that have completed well
  std::vector<int64_t> deleted;  // buffers that the call took
  std::vector<int64_t> numbers;
  std::string data;
  uint64_t address = 0;  // in the child: of what was pinned, or is to be written
};

enum class Question : uint32_t { kNone = 0, kHostCallback = 1, kKeyValueGet = 2, kKeyValuePut = 3 };
// What a context's host gives, as `number` of context_create says it.
constexpr int64_t kGivesCallback = 1, kGivesStore = 2;

struct HostArray {
  int64_t element_type = 0;
  std::vector<int64_t> dims;
  std::string data;  // of a result nothing
};

// What a program or the backend asks of its host.
struct Ask {
  uint64_t id = 0;
  Question question = Question::kNone;
  int64_t number = 0;  // of the callback; get: how many ms it may wait
  std::vector<HostArray> arguments, results;
  std::string key, value;
};

// An event that has completed, or something that is asked.
struct Done {
  uint64_t event = 0;
  Status error;
  std::string data;
  uint64_t address = 0;
  Ask ask;
};

std::string Encode(const Hello& hello);
std::string Encode(const Call& call);
std::string Encode(const Reply& reply);
std::string Encode(const Done& done);
bool Decode(std::string_view bytes, Hello* hello);
bool Decode(std::string_view bytes, Call* call);
bool Decode(std::string_view bytes, Reply* reply);
bool Decode(std::string_view bytes, Done* done);

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_WIRE_H_
