// Memories of a device and the blocks in them. A block frees itself when the last who uses it lets go.
#ifndef FLAGOS_NATIVE_MEMORY_H_
#define FLAGOS_NATIVE_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flagos/plugin_abi.h"
#include "python.h"
#include "ref.h"
#include "shape.h"

namespace flagos {
class Accelerator;
}

struct FlagosMemory {
  int64_t id = 0;
  std::string kind;
  int32_t kind_id = 0;
  std::string debug_string;
  std::string to_string;
  FlagosContext* context = nullptr;
  FlagosDevice* device = nullptr;
  std::vector<FlagosDevice*> devices;
  int64_t limit = 0;                           // bytes
  flagos::Accelerator* accelerator = nullptr;  // whose memory it is; NULL: the host's
  flagos::Accelerator* pinned_by = nullptr;    // host memory that this accelerator copies from and to by itself

  // Accounts for `bytes`; throws Failure(RESOURCE_EXHAUSTED) beyond the limit.
  void Reserve(size_t bytes);
  void Unreserve(size_t bytes) noexcept;
  void ReadStats(FlagosDeviceMemoryStatsArgs& args) noexcept;
  int64_t in_use() const noexcept { return in_use_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> in_use_{0};
  std::atomic<int64_t> peak_{0};
  std::atomic<int64_t> live_{0};
  std::atomic<int64_t> largest_{0};
};

namespace flagos {

using Memory = ::FlagosMemory;

// What zero-copy and every kernel may rely on: the alignment that malloc gives, so that nearly all host arrays qualify.
inline constexpr size_t kHostAlignment = 16;

// Contiguous memory. Who may write is decided by who holds references.
class Block : public RefCounted<Block> {
 public:
  // In the memory of an accelerator: for its compute stream.
  static Ref<Block> Allocate(Memory* memory, size_t bytes);
  // Memory of the host, which hears through SetRelease when nobody uses it any more.
  static Ref<Block> Wrap(Memory* memory, void* data, size_t bytes, bool writable);
  // Memory of a dense tensor of `shape`, which is kept until then; with the GIL. `memory` may be NULL: in no memory's
  // statistics.
  static Ref<Block> Hold(Memory* memory, void* data, const Shape& shape, PyObject* tensor);
  // Memory that goes back to the memory's accelerator, for use by AllocateOutput; takes over the reference to `tensor`.
  static Ref<Block> Recycled(Memory* memory, void* data, size_t bytes, PyObject* tensor, size_t capacity);
  ~Block();

  // The tensor that holds the memory, which the caller now keeps instead.
  PyObject* TakeTensor() noexcept { return std::exchange(tensor_, nullptr); }

  void SetRelease(FlagosReleaseCallback release, void* user_data) noexcept {
    release_ = release;
    release_user_data_ = user_data;
  }

  void* data() const noexcept { return data_; }
  size_t bytes() const noexcept { return bytes_; }
  Memory* memory() const noexcept { return memory_; }
  bool writable() const noexcept { return writable_; }
  // The tensor that owns the memory if it has just this shape, else NULL.
  PyObject* tensor(const Shape& shape) const noexcept { return tensor_ && tensor_shape_ == shape ? tensor_ : nullptr; }

 private:
  Block(Memory* memory, void* data, size_t bytes) : memory_(memory), data_(data), bytes_(bytes) {}

  Memory* memory_;
  void* data_;
  size_t bytes_;
  bool writable_ = true;
  bool owned_ = false;    // by the allocator
  bool counted_ = false;  // in the memory's statistics
  size_t capacity_ = 0;   // of recycled memory
  PyObject* tensor_ = nullptr;
  Shape tensor_shape_;
  FlagosReleaseCallback release_ = nullptr;
  void* release_user_data_ = nullptr;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_MEMORY_H_
