#include "memory.h"

#include "accelerator.h"
#include "block_cache.h"
#include "error.h"

namespace flagos {
namespace {

// Empty arrays have an address too.
alignas(kBlockAlignment) char g_empty[kBlockAlignment];

void RaiseTo(std::atomic<int64_t>& peak, int64_t value) noexcept {
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

Ref<Block> Block::Allocate(Memory* memory, size_t bytes) {
  if (bytes == 0) return Ref<Block>::Adopt(new Block(memory, g_empty, 0));
  if (memory->accelerator != nullptr) return memory->accelerator->Allocate(memory, bytes, Stream::kCompute);
  if (memory->pinned_by != nullptr) return memory->pinned_by->AllocatePinned(memory, bytes);
  memory->Reserve(bytes);
  void* data = AllocateBytes(bytes);
  if (data == nullptr) {
    memory->Unreserve(bytes);
    Fail(FLAGOS_RESOURCE_EXHAUSTED, "the host has no memory for %zu bytes in %s; free buffers or use smaller ones",
         bytes, memory->debug_string.c_str());
  }
  try {
    auto block = Ref<Block>::Adopt(new Block(memory, data, bytes));
    block->owned_ = block->counted_ = true;
    return block;
  } catch (...) {
    FreeBytes(data, bytes);
    memory->Unreserve(bytes);
    throw;
  }
}

Ref<Block> Block::Wrap(Memory* memory, void* data, size_t bytes, bool writable) {
  auto block = Ref<Block>::Adopt(new Block(memory, bytes ? data : g_empty, bytes));
  block->writable_ = writable;
  return block;
}

Ref<Block> Block::Hold(Memory* memory, void* data, const Shape& shape, PyObject* tensor) {
  auto block = Ref<Block>::Adopt(new Block(memory, shape.bytes ? data : g_empty, shape.bytes));
  block->tensor_shape_ = shape;
  if (shape.bytes != 0 && memory != nullptr) {
    memory->Reserve(shape.bytes);
    block->counted_ = true;
  }
  python::Known()->Py_IncRef(tensor);
  block->tensor_ = tensor;
  return block;
}

Ref<Block> Block::Recycled(Memory* memory, void* data, size_t bytes, PyObject* tensor, size_t capacity) {
  auto block = Ref<Block>::Adopt(new Block(memory, data, bytes));
  block->tensor_ = tensor;  // of another shape than any array's
  block->capacity_ = capacity;
  memory->Reserve(bytes);
  block->counted_ = true;
  return block;
}

Block::~Block() {
  if (owned_) FreeBytes(data_, bytes_);
  if (counted_) memory_->Unreserve(bytes_);
  if (capacity_ > 0) {
    memory_->accelerator->Recycle(tensor_, data_, capacity_);
  } else if (tensor_ != nullptr) {
    python::Discard(tensor_, bytes_);
  }
  if (release_ == nullptr) return;
  if (memory_->accelerator == nullptr) {
    release_(release_user_data_);
  } else {
    memory_->accelerator->ReleaseLater(release_, release_user_data_);
  }
}

}  // namespace flagos

void FlagosMemory::Reserve(size_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  int64_t used = in_use_.load(std::memory_order_relaxed);
  do {
    if (size > limit - used) {
      flagos::Fail(
          FLAGOS_RESOURCE_EXHAUSTED,
          "%s: %zu bytes do not fit: %lld of %lld bytes are in use; free buffers, use smaller ones, or raise the "
          "context option 'memory_limit_bytes'",
          debug_string.c_str(), bytes, static_cast<long long>(used), static_cast<long long>(limit));
    }
  } while (!in_use_.compare_exchange_weak(used, used + size, std::memory_order_relaxed));
  live_.fetch_add(1, std::memory_order_relaxed);
  flagos::RaiseTo(peak_, used + size);
  flagos::RaiseTo(largest_, size);
}

void FlagosMemory::Unreserve(size_t bytes) noexcept {
  in_use_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  live_.fetch_sub(1, std::memory_order_relaxed);
}

void FlagosMemory::ReadStats(FlagosDeviceMemoryStatsArgs& args) noexcept {
  args.bytes_in_use = in_use_.load(std::memory_order_relaxed);
  args.peak_bytes_in_use = peak_.load(std::memory_order_relaxed);
  args.num_allocations = live_.load(std::memory_order_relaxed);
  args.largest_allocation = largest_.load(std::memory_order_relaxed);
  args.bytes_limit = limit;
  if (args.clear_peaks != 0) {
    peak_.store(args.bytes_in_use, std::memory_order_relaxed);
    largest_.store(0, std::memory_order_relaxed);
  }
}
