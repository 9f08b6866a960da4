#include "cpu/tiles.h"

#include <algorithm>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kParallelWork = 1 << 16;  // element operations below which threads cost more than they bring

template <class T>
void CopyStrided(void* to, const char* from, int64_t stride, int64_t n) {
  T* d = static_cast<T*>(to);
  const T* x = reinterpret_cast<const T*>(from);
  for (int64_t i = 0; i < n; ++i) d[i] = x[i * stride];
}
template <class T>
void CopyShortRows(void* to, const char* from, int64_t rows, int64_t row_stride, int64_t stride, int64_t n) {
  T* d = static_cast<T*>(to);
  const T* x = reinterpret_cast<const T*>(from);
  for (int64_t row = 0; row < rows; ++row, x += row_stride) {
    for (int64_t i = 0; i < n; ++i) *d++ = x[i * stride];
  }
}
template <class T>
void StoreStrided(char* to, const void* from, int64_t stride, int64_t n) {
  T* d = reinterpret_cast<T*>(to);
  const T* x = static_cast<const T*>(from);
  for (int64_t i = 0; i < n; ++i) d[i * stride] = x[i];
}

struct LaneMemory {
  std::vector<char> tiles;
  std::vector<char*> pointers;
  std::vector<int64_t> index;
};

}  // namespace

void Gather(void* to, const char* from, int64_t stride, int64_t n, int64_t bytes) {
  static const Kernels& kernels = SelectKernels();
  if (stride == 0) return kernels.fill[__builtin_ctzll(static_cast<uint64_t>(bytes))](to, from, n);
  switch (bytes) {
    case 1:
      return CopyStrided<uint8_t>(to, from, stride, n);
    case 2:
      return CopyStrided<uint16_t>(to, from, stride, n);
    case 4:
      return CopyStrided<uint32_t>(to, from, stride, n);
    default:
      return CopyStrided<uint64_t>(to, from, stride, n);
  }
}

void GatherRows(void* to, const char* from, int64_t rows, int64_t row_stride, int64_t stride, int64_t n,
                int64_t bytes) {
  constexpr int64_t kShort = 16;
  if (n >= kShort) {
    for (int64_t row = 0; row < rows; ++row) {
      Gather(static_cast<char*>(to) + row * n * bytes, from + row * row_stride * bytes, stride, n, bytes);
    }
    return;
  }
  switch (bytes) {
    case 1:
      return CopyShortRows<uint8_t>(to, from, rows, row_stride, stride, n);
    case 2:
      return CopyShortRows<uint16_t>(to, from, rows, row_stride, stride, n);
    case 4:
      return CopyShortRows<uint32_t>(to, from, rows, row_stride, stride, n);
    default:
      return CopyShortRows<uint64_t>(to, from, rows, row_stride, stride, n);
  }
}

void Scatter(char* to, const void* from, int64_t stride, int64_t n, int64_t bytes) {
  if (stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(n * bytes));
    return;
  }
  switch (bytes) {
    case 1:
      return StoreStrided<uint8_t>(to, from, stride, n);
    case 2:
      return StoreStrided<uint16_t>(to, from, stride, n);
    case 4:
      return StoreStrided<uint32_t>(to, from, stride, n);
    default:
      return StoreStrided<uint64_t>(to, from, stride, n);
  }
}

void Stream(char* to, const void* from, int64_t bytes) {
  static const Kernels& kernels = SelectKernels();
  kernels.stream(to, static_cast<const char*>(from), bytes);
}

void FlushStreams() {
  static const Kernels& kernels = SelectKernels();
  kernels.flush();
}

Tiles::Tiles(size_t bytes, size_t num_registers, size_t num_indices) {
  thread_local LaneMemory memory;
  if (memory.tiles.size() < bytes) memory.tiles.resize(bytes);
  if (memory.pointers.size() < 2 * num_registers) memory.pointers.resize(2 * num_registers);
  memory.index.assign(num_indices, 0);
  home = memory.pointers.data();
  place = home + num_registers;
  index = memory.index.data();
  cursor_ = memory.tiles.data();
}

char* Tiles::Take(int64_t bytes) {
  char* const aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(cursor_) + 63) & ~uintptr_t{63});
  cursor_ = aligned + bytes;
  return aligned;
}

void RunTasks(int64_t tasks, int64_t work, void (*body)(void* user, int64_t begin, int64_t end), void* user) {
  if (work < kParallelWork || tasks < 2) {
    body(user, 0, tasks);
  } else {
    ThreadPool::Shared().ParallelFor(tasks, std::max<int64_t>(1, tasks * (kParallelWork / 4) / work), body, user);
  }
}

int64_t Product(const std::vector<int64_t>& dims, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t d = begin; d < end; ++d) product *= dims[d];
  return product;
}

void SetIndex(int64_t* index, int64_t flat, const std::vector<int64_t>& dims, size_t begin, size_t end) {
  for (size_t d = end; d-- > begin;) {
    index[d] = flat % dims[d];
    flat /= dims[d];
  }
}

}  // namespace flagos::cpu
