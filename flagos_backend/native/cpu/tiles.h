// Tiles of memory for the registers of one lane of a loop, and moving tiles to and from strided memory.
#ifndef FLAGOS_NATIVE_CPU_TILES_H_
#define FLAGOS_NATIVE_CPU_TILES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/native_program.h"

namespace flagos::cpu {

// An element of at most 8 bytes.
inline void CopyElement(char* to, const char* from, int64_t bytes) {
  switch (bytes) {
    case 1:
      std::memcpy(to, from, 1);
      return;
    case 2:
      std::memcpy(to, from, 2);
      return;
    case 4:
      std::memcpy(to, from, 4);
      return;
    default:
      std::memcpy(to, from, 8);
  }
}
// Elements of `bytes` bytes each.
void MoveElements(char* to, const char* from, const Plane& plane, int64_t bytes);
// n elements of `bytes` bytes each: to[i] = from[i * stride], and to[i * stride] = from[i].
void Gather(void* to, const char* from, int64_t stride, int64_t n, int64_t bytes);
void Scatter(char* to, const void* from, int64_t stride, int64_t n, int64_t bytes);
// Contiguous memory that is too much to stay in a cache is written around it. Others see it after FlushStreams by the
// same thread.
void Stream(char* to, const void* from, int64_t bytes);
void FlushStreams();

// Where the tile of each register lies. Backed by memory that a thread keeps from loop to loop: a thread runs one loop at
// a time, so it has one of these at a time.
class Tiles {
 public:
  // bytes: what Take and the registers need together, with 64 for each taking and 64 more.
  Tiles(size_t bytes, size_t num_registers, size_t num_indices);

  char* Take(int64_t bytes);  // aligned to 64

  char** buffer;   // of each register: its own memory
  char** place;    // of each register: where it lies now
  int64_t* index;  // of each dimension

 private:
  char* cursor_;
};

// Fills the tiles of what is the same in all of a loop: its constants, and its inputs of one element. Registers of arrays
// get their addresses.
void FillInvariant(const LoopBase& loop, char* const* slots, const Tiles& tiles);

// Brings what is read and written next into the second-level cache, or the first-level one if it is little, while a tile
// or a row is computed: a few lines with each step, because a processor waits for few at a time. Addresses may lie outside
// any buffer: nothing is read there.
class Ahead {
 public:
  // Bytes of arrays that caches may not hold: from here on looking ahead pays, on some processors. What they do hold is
  // there as soon without.
  static constexpr int64_t kFar = int64_t{16} << 20;

  void Clear() { count_ = 0, lines_ = 0; }
  void Add(const char* begin, int64_t bytes) {
    if (count_ == kMax) return;
    ranges_[count_++] = {begin, begin + bytes};
    lines_ += (bytes + kLine - 1) / kLine;
  }
  // Once all is added: the number of calls of Step that follow.
  void Start(int64_t steps) {
    range_ = 0;
    each_ = steps == 0 ? 0 : (lines_ + steps - 1) / steps;
  }
  void Step() {
    for (int64_t left = each_; left > 0 && range_ < count_; --left) {
      Range& range = ranges_[range_];
      if (lines_ <= kLittle) {
        __builtin_prefetch(range.next, /*rw=*/0, /*locality=*/3);
      } else {
        __builtin_prefetch(range.next, /*rw=*/0, /*locality=*/2);
      }
      range.next += kLine;
      if (range.next >= range.end) ++range_;
    }
  }

 private:
  static constexpr int64_t kLine = 64, kLittle = 128;  // bytes, lines
  static constexpr int kMax = 8;
  struct Range {
    const char *next, *end;
  };
  Range ranges_[kMax];
  int count_ = 0, range_ = 0;
  int64_t lines_ = 0, each_ = 0;
};

// Runs body over [0, tasks), on all threads if `work` element operations are worth it.
void RunTasks(int64_t tasks, int64_t work, void (*body)(void* user, int64_t begin, int64_t end), void* user);

// As memcpy, on all threads if there is enough to copy.
void CopyArray(char* to, const char* from, int64_t bytes);

// The product of dims[begin] to dims[end - 1].
int64_t Product(const std::vector<int64_t>& dims, size_t begin, size_t end);

// Writes dimensions [begin, end) of index from a flat number over them.
void SetIndex(int64_t* index, int64_t flat, const std::vector<int64_t>& dims, size_t begin, size_t end);

// The next position over dimensions [begin, end), without a division; after the last one, the first.
inline void Advance(int64_t* index, const std::vector<int64_t>& dims, size_t begin, size_t end) {
  for (size_t d = end; d-- > begin;) {
    if (++index[d] < dims[d]) return;
    index[d] = 0;
  }
}

}  // namespace flagos::cpu

#endif  // FLAGOS_NATIVE_CPU_TILES_H_
