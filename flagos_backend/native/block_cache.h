// Host memory of blocks. Large ones come from the system and go back to it; for a while they are kept for reuse, which
// saves touching fresh pages.
#ifndef FLAGOS_NATIVE_BLOCK_CACHE_H_
#define FLAGOS_NATIVE_BLOCK_CACHE_H_

#include <cstddef>

namespace flagos {

// What our own allocations have: a cache line, and a full vector register.
inline constexpr size_t kBlockAlignment = 64;

// NULL: the system has none.
void* AllocateBytes(size_t bytes) noexcept;
// `bytes` as given to AllocateBytes.
void FreeBytes(void* data, size_t bytes) noexcept;

// Sets how many bytes of freed large blocks are kept at most. What nobody has used for a second goes back to the system
// all the same, down to a remainder of 32 MiB.
void SetCacheLimit(size_t bytes) noexcept;

}  // namespace flagos

#endif  // FLAGOS_NATIVE_BLOCK_CACHE_H_
