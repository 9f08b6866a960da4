#include "block_cache.h"

#include <pthread.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace flagos {
namespace {

// From here on a block is worth keeping: below, malloc does as well.
constexpr size_t kLarge = size_t{1} << 20;
constexpr size_t kHugePage = size_t{2} << 20;
// What stays of the cache when nobody uses it.
constexpr size_t kRemainder = size_t{32} << 20;
constexpr auto kTick = std::chrono::milliseconds(250);
// A loop that takes less than so many ticks each time around finds its memory again.
constexpr uint64_t kKeptTicks = 3;

struct Kept {
  void* data;
  uint64_t since;  // tick
};

// Freed large blocks by size; those of one size in the order in which they were freed.
struct Cache {
  std::mutex mutex;
  std::multimap<size_t, Kept> blocks;
  size_t bytes = 0;
  size_t limit = 0;
  uint64_t tick = 0;
  bool is_watched = false;  // a thread counts the ticks
};
Cache& TheCache() {
  static auto* const cache = new Cache;
  return *cache;
}

// Sizes in steps of an eighth of their power of two, so that similar sizes share blocks.
size_t SizeClass(size_t bytes) {
  if (bytes < kLarge) return (bytes + kBlockAlignment - 1) & ~(kBlockAlignment - 1);
  const size_t step = (size_t{1} << (63 - __builtin_clzll(bytes))) / 8;
  return (bytes + step - 1) / step * step;
}

// malloc keeps blocks of up to 32 MiB for itself once it has seen one of their size freed.
void* Map(size_t size) noexcept {
  const size_t slack = size >= 2 * kHugePage ? kHugePage : 0;
  if (size + slack < size) return nullptr;
  void* mapped = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  if (slack == 0) return mapped;
  char* const start = static_cast<char*>(mapped);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
  if (before > 0) munmap(start, before);
  if (slack > before) munmap(start + before + size, slack - before);
  madvise(start + before, size / kHugePage * kHugePage, MADV_HUGEPAGE);  // advice: may fail
  return start + before;
}

// Takes out what has been kept too long. With the mutex.
std::vector<std::pair<void*, size_t>> Expired(Cache& cache) {
  std::vector<std::pair<void*, size_t>> expired;
  for (auto block = cache.blocks.begin(); block != cache.blocks.end() && cache.bytes > kRemainder;) {
    const auto [size, kept] = *block;
    if (cache.tick - kept.since < kKeptTicks) {
      ++block;
      continue;
    }
    expired.emplace_back(kept.data, size);
    cache.bytes -= size;
    block = cache.blocks.erase(block);
  }
  return expired;
}

// Counts ticks until little is kept.
void Watch() noexcept {
  Cache& cache = TheCache();
  for (bool more = true; more;) {
    std::this_thread::sleep_for(kTick);
    std::vector<std::pair<void*, size_t>> expired;
    {
      std::lock_guard<std::mutex> lock(cache.mutex);
      ++cache.tick;
      try {
        expired = Expired(cache);
      } catch (...) {
        // No memory to remember them: at the next tick.
      }
      more = cache.bytes > kRemainder;
      cache.is_watched = more;
    }
    for (const auto& [data, size] : expired) munmap(data, size);
  }
}

// With the mutex.
void StartWatch(Cache& cache) {
  if (cache.is_watched || cache.bytes <= kRemainder) return;
  std::thread thread(Watch);
  pthread_setname_np(thread.native_handle(), "flagos-trim");
  thread.detach();
  cache.is_watched = true;
}

// False: there is no room, or nobody to watch.
bool Keep(void* data, size_t size) noexcept {
  Cache& cache = TheCache();
  std::lock_guard<std::mutex> lock(cache.mutex);
  if (size > cache.limit || cache.bytes > cache.limit - size) return false;
  try {
    const auto kept = cache.blocks.emplace(size, Kept{data, cache.tick});
    cache.bytes += size;
    try {
      StartWatch(cache);
    } catch (...) {
      cache.blocks.erase(kept);
      cache.bytes -= size;
      return false;
    }
    return true;
  } catch (...) {
    return false;
  }
}

void* Reuse(size_t size) noexcept {
  Cache& cache = TheCache();
  std::lock_guard<std::mutex> lock(cache.mutex);
  // The latest: its pages are in the processor's caches, and what is superfluous grows old.
  auto found = cache.blocks.upper_bound(size);
  if (found == cache.blocks.begin() || (--found)->first != size) return nullptr;
  void* data = found->second.data;
  cache.blocks.erase(found);
  cache.bytes -= size;
  return data;
}

}  // namespace

void SetCacheLimit(size_t bytes) noexcept {
  Cache& cache = TheCache();
  std::lock_guard<std::mutex> lock(cache.mutex);
  cache.limit = bytes;
}

void* AllocateBytes(size_t bytes) noexcept {
  const size_t size = SizeClass(bytes);
  if (size < bytes) return nullptr;
  if (size < kLarge) return std::aligned_alloc(kBlockAlignment, size);
  if (void* data = Reuse(size)) return data;
  return Map(size);
}

void FreeBytes(void* data, size_t bytes) noexcept {
  const size_t size = SizeClass(bytes);
  if (size < kLarge) {
    std::free(data);
  } else if (!Keep(data, size)) {
    munmap(data, size);
  }
}

}  // namespace flagos
