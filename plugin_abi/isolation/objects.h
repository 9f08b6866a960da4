// What a host's handles are while the backend runs in a process of its own, and what the functions of the table share.
#ifndef FLAGOS_ISOLATION_OBJECTS_H_
#define FLAGOS_ISOLATION_OBJECTS_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "flagos/plugin_abi.h"
#include "link.h"
#include "named_values.h"
#include "status.h"
#include "wire.h"

struct FlagosDevice {
  FlagosContext* context = nullptr;
  int64_t index = 0;
  flagos_isolation::Device described;
  std::vector<FlagosNamedValue> attributes;
  std::vector<FlagosMemory*> memories;
  FlagosMemory* default_memory = nullptr;
};

struct FlagosMemory {
  FlagosContext* context = nullptr;
  int64_t index = 0;
  flagos_isolation::Memory described;
  std::vector<FlagosDevice*> devices;
};

struct FlagosContext {
  std::shared_ptr<flagos_isolation::Link> link;
  std::string platform_name, platform_version;
  std::vector<std::unique_ptr<FlagosDevice>> devices;
  std::vector<std::unique_ptr<FlagosMemory>> memories;
  std::vector<FlagosDevice*> all_devices, addressable_devices;
  std::vector<FlagosMemory*> all_memories;
  void (*give_back)(std::shared_ptr<flagos_isolation::Link> link) = nullptr;  // where the process goes at the end
};

struct FlagosEvent {
  FlagosContext* context = nullptr;
  std::shared_ptr<flagos_isolation::EventState> state;
  uint64_t id = 0;  // 0: the child does not know it
  bool made_by_host = false;
  std::atomic<bool> is_set{false};  // by the host that made it
};

struct FlagosBuffer {
  FlagosContext* context = nullptr;
  uint64_t id = 0;
  flagos_isolation::Buffer described;
  FlagosDevice* device = nullptr;
  FlagosMemory* memory = nullptr;
  std::atomic<bool> is_deleted{false};
  std::atomic<bool> is_promise{false};  // which the host has not kept yet
};

struct FlagosExecutable {
  FlagosContext* context = nullptr;
  uint64_t id = 0;
  flagos_isolation::Executable described;
  std::vector<FlagosDevice*> devices;
  std::vector<int32_t> output_types;
  std::vector<size_t> output_ranks;
  std::vector<const char*> output_memory_kinds, argument_memory_kinds;
  std::vector<FlagosBytes> output_shardings, argument_shardings;
  std::vector<FlagosNamedValue> cost_analysis;
};

namespace flagos_isolation {

inline Status Wrong(const std::string& fact) { return MakeStatus(FLAGOS_INVALID_ARGUMENT, fact); }

// The part of a struct of `full` bytes that both sides know, in whole words: a pointer is never cut.
inline size_t KnownSize(size_t struct_size, size_t full) { return std::min(struct_size, full) & ~(sizeof(void*) - 1); }

// Runs the body of a function of the table, which returns a Status, on a complete copy of the host's struct, to which
// `args` points meanwhile: what an older host has not is zero, and nothing beyond it is written. No exception crosses the
// boundary.
template <typename Args, typename Body>
FlagosError* Enter(const char* function, Args*& args, Body body) noexcept {
  Args* const host = args;
  try {
    if (host == nullptr) return NewError(Wrong(std::string(function) + ": the argument struct is NULL"));
    if (host->struct_size < sizeof(size_t)) {
      return NewError(Wrong(std::string(function) + ": struct_size is " + std::to_string(host->struct_size) +
                            "; set it to sizeof of the struct"));
    }
    Args own{};
    std::memcpy(static_cast<void*>(&own), host, KnownSize(host->struct_size, sizeof(Args)));
    args = &own;
    const Status status = body();
    if (status == nullptr) std::memcpy(static_cast<void*>(host), &own, KnownSize(own.struct_size, sizeof(Args)));
    return NewError(status);
  } catch (const std::bad_alloc&) {
    return NewError(MakeStatus(FLAGOS_RESOURCE_EXHAUSTED, std::string(function) + ": no memory is left"));
  } catch (const std::exception& error) {
    return NewError(MakeStatus(FLAGOS_INTERNAL, std::string(function) + ": " + error.what()));
  }
}

// Refuses a host whose struct has no room for an "out" field that the call cannot do without.
#define FLAGOS_NEED_ROOM(function, field)                                                                        \
  FLAGOS_NEED(args->struct_size >= offsetof(std::remove_pointer_t<decltype(args)>, field) + sizeof(args->field), \
              function ": " #field " lies beyond struct_size; set struct_size to sizeof of the struct")
#define FLAGOS_NEED(condition, fact)      \
  do {                                    \
    if (!(condition)) return Wrong(fact); \
  } while (false)
#define FLAGOS_RETURN_IF_ERROR(expression)                                 \
  do {                                                                     \
    if (Status status_ = (expression); status_ != nullptr) return status_; \
  } while (false)

// A call about a context's memory, with shape and type; INVALID_ARGUMENT for what is no shape.
Status PlaceCall(const std::string& function, Call* call, const FlagosContext* context, const FlagosMemory* memory,
                 const int64_t* dims, size_t rank, int32_t element_type);
// Bytes of an element in a dense array; -1 for what is no element type.
int64_t ElementSize(int32_t element_type);
// Bytes of a dense array; an error for what is no shape or no type.
Status DenseSize(const int64_t* dims, size_t rank, int64_t element_type, int64_t* size);

// Handles for what the child says that it made; an error where it says what cannot be.
Status NewBuffer(FlagosContext* context, uint64_t id, Buffer described, FlagosBuffer** buffer);
void DestroyBuffer(FlagosBuffer* buffer);
FlagosEvent* NewEvent(FlagosContext* context, std::shared_ptr<EventState> state, uint64_t id);
FlagosEvent* ReadyEvent(FlagosContext* context);

// Starts a context in the child of `link`.
Status CreateContext(std::shared_ptr<Link> link, FlagosContextCreateArgs* args,
                     std::unique_ptr<FlagosContext>* context);
// Everything of the table but what depends on the backend: context_create.
FlagosApi CommonTable();
void FillEvents(FlagosApi* api);
void FillBuffers(FlagosApi* api);
void FillTransfers(FlagosApi* api);
void FillExecutables(FlagosApi* api);

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_OBJECTS_H_
