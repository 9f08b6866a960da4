// Buffers. What never changes is kept here, so that only contents, readiness and deletion are asked of the backend.
#ifndef FLAGOS_PJRT_BUFFER_H_
#define FLAGOS_PJRT_BUFFER_H_

#include <atomic>

#include "client.h"
#include "flagos_calls.h"
#include "layout.h"

struct PJRT_Buffer : flagos_pjrt::RefCounted {
  PJRT_Buffer(PJRT_Client* client, PJRT_Device* device, flagos_pjrt::Memory* memory, PJRT_Buffer_Type type,
              const int64_t* dims, size_t rank, flagos_pjrt::OwnedBuffer&& handle);

  const FlagosApi& api() const { return *client->api; }
  FlagosBuffer* get() const { return handle.get(); }
  size_t size_bytes() const { return flagos_pjrt::ArraySizeBytes(type, dims.data(), dims.size()); }

  flagos_pjrt::Ref<PJRT_Client> client;
  flagos_pjrt::OwnedBuffer handle;
  PJRT_Device* const device;
  flagos_pjrt::Memory* const memory;
  const PJRT_Buffer_Type type;
  const flagos_pjrt::Dims dims;
  std::atomic<int64_t> external_references{0};
};

namespace flagos_pjrt {

// Where a new buffer shall lie: memory if given, else device's default memory. The pair is of one client.
struct Placement {
  PJRT_Device* device = nullptr;
  Memory* memory = nullptr;
};
[[nodiscard]] PJRT_Error* Place(PJRT_Client* client, PJRT_Device* device, PJRT_Memory* memory, const char* where,
                                Placement* placement);

// One hold more on the storage, or one less.
[[nodiscard]] PJRT_Error* HoldBuffer(const PJRT_Buffer& buffer, int32_t delta);
// For FlagosPjrtLend (../lend.h) in this thread.
void RememberPointer(PJRT_Buffer* buffer, uintptr_t pointer);

// Takes over handle, also when it throws.
PJRT_Buffer* NewBuffer(PJRT_Client* client, PJRT_Device* device, Memory* memory, PJRT_Buffer_Type type,
                       const int64_t* dims, size_t rank, FlagosBuffer* handle);

// An unfulfilled buffer (error null), or a failed one; error is taken over.
[[nodiscard]] PJRT_Error* MakePromise(PJRT_Client* client, const Placement& placement, PJRT_Buffer_Type type,
                                      const int64_t* dims, size_t rank, FlagosError* error, Ref<PJRT_Buffer>* promise);
// source's contents become promise's, or error its failure; error is taken over.
[[nodiscard]] PJRT_Error* Fulfill(const PJRT_Buffer& promise, FlagosBuffer* source, FlagosError* error);

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_BUFFER_H_
