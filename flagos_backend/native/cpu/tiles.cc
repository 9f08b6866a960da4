#include "cpu/tiles.h"

#include <algorithm>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace flagos::cpu {
namespace {

constexpr int64_t kParallelWork = 1 << 16;  // element operations below which threads cost more than they bring
constexpr int64_t kCopied = 1 << 16;        // bytes of an array that one thread copies at a time

struct LaneMemory {
  std::vector<char> tiles;
  std::vector<char*> pointers;
  std::vector<int64_t> index;
};

}  // namespace

void MoveElements(char* to, const char* from, const Plane& plane, int64_t bytes) {
  static const Kernels& kernels = SelectKernels();
  kernels.move[__builtin_ctzll(static_cast<uint64_t>(bytes))](to, from, plane);
}

void Gather(void* to, const char* from, int64_t stride, int64_t n, int64_t bytes) {
  MoveElements(static_cast<char*>(to), from, {1, n, 0, 1, 0, stride}, bytes);
}

void Scatter(char* to, const void* from, int64_t stride, int64_t n, int64_t bytes) {
  MoveElements(to, static_cast<const char*>(from), {1, n, 0, stride, 0, 1}, bytes);
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
  buffer = memory.pointers.data();
  place = buffer + num_registers;
  index = memory.index.data();
  cursor_ = memory.tiles.data();
}

char* Tiles::Take(int64_t bytes) {
  char* const aligned = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(cursor_) + 63) & ~uintptr_t{63});
  cursor_ = aligned + bytes;
  return aligned;
}

void FillInvariant(const LoopBase& loop, char* const* slots, const Tiles& tiles) {
  const auto fill = [&](int64_t reg, const char* element) {
    const size_t number = static_cast<size_t>(reg);
    Gather(tiles.buffer[number], element, 0, loop.tile, TypeBytes(loop.registers[number]));
  };
  for (const LoopBase::Constant& constant : loop.constants) {
    fill(constant.reg, reinterpret_cast<const char*>(&constant.bits));
  }
  for (const LoopBase::Input& input : loop.inputs) {
    if (!input.invariant) continue;
    const int64_t offset = input.offset * TypeBytes(loop.registers[static_cast<size_t>(input.reg)]);
    fill(input.reg, slots[static_cast<size_t>(input.slot)] + offset);
  }
  for (const LoopBase::Array& array : loop.arrays) {
    const size_t number = static_cast<size_t>(array.reg);
    tiles.buffer[number] = tiles.place[number] = slots[static_cast<size_t>(array.slot)];
  }
}

void RunTasks(int64_t tasks, int64_t work, void (*body)(void* user, int64_t begin, int64_t end), void* user) {
  if (work < kParallelWork || tasks < 2) {
    body(user, 0, tasks);
  } else {
    ThreadPool::Shared().ParallelFor(tasks, std::max<int64_t>(1, tasks * (kParallelWork / 4) / work), body, user);
  }
}

void CopyArray(char* to, const char* from, int64_t bytes) {
  struct Job {
    char* to;
    const char* from;
    int64_t bytes;
  } job{to, from, bytes};
  const auto body = [](void* user, int64_t begin, int64_t end) {
    const Job& copy = *static_cast<Job*>(user);
    begin *= kCopied;
    end = std::min(end * kCopied, copy.bytes);
    std::memcpy(copy.to + begin, copy.from + begin, static_cast<size_t>(end - begin));
  };
  RunTasks((bytes + kCopied - 1) / kCopied, bytes / 8, body, &job);
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
