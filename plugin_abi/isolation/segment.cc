#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace flagos_isolation {
namespace {

constexpr size_t kMinSize = size_t{1} << 16;
// What is kept for the next array; more is given back to the system.
constexpr size_t kMaxFreeBytes = size_t{256} << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

char* MapShared(int descriptor, size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

// An eighth of it at most is unused.
size_t RoundUp(size_t size) {
  size_t step = kMinSize;
  while (step * 8 < size) step *= 2;
  return (size + step - 1) / step * step;
}

}  // namespace

std::shared_ptr<Segment> Segment::Make(uint64_t id, size_t size) {
  Descriptor descriptor(memfd_create("flagos", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor.valid() || ftruncate(descriptor.get(), static_cast<off_t>(size)) != 0) return nullptr;
  if (fcntl(descriptor.get(), F_ADD_SEALS, kSeals) != 0) return nullptr;
  char* data = MapShared(descriptor.get(), size);
  if (data == nullptr) return nullptr;
  return std::shared_ptr<Segment>(new Segment(id, std::move(descriptor), data, size));
}

std::shared_ptr<Segment> Segment::Map(uint64_t id, Descriptor descriptor) {
  if (fcntl(descriptor.get(), F_GET_SEALS) != kSeals) return nullptr;
  const off_t end = lseek(descriptor.get(), 0, SEEK_END);
  if (end <= 0) return nullptr;
  const auto size = static_cast<size_t>(end);
  char* data = MapShared(descriptor.get(), size);
  if (data == nullptr) return nullptr;
  return std::shared_ptr<Segment>(new Segment(id, std::move(descriptor), data, size));
}

Segment::~Segment() { munmap(data_, size_); }

std::shared_ptr<Segment> SegmentPool::Take(size_t size) {
  if (size > SIZE_MAX / 2) return nullptr;
  size = RoundUp(std::max(size, kMinSize));
  uint64_t id = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = free_.rbegin(); at != free_.rend(); ++at) {
      if ((*at)->size() < size || (*at)->size() / 2 > size) continue;
      std::shared_ptr<Segment> found = std::move(*at);
      free_.erase(std::next(at).base());
      free_bytes_ -= found->size();
      return found;
    }
    id = next_id_++;
  }
  return Segment::Make(id, size);
}

void SegmentPool::Give(std::shared_ptr<Segment> segment) {
  std::vector<std::shared_ptr<Segment>> let_go;  // unmapped without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  free_bytes_ += segment->size();
  free_.push_back(std::move(segment));
  while (free_bytes_ > kMaxFreeBytes) {
    free_bytes_ -= free_.front()->size();
    if (free_.front()->announced) forgotten_.push_back(static_cast<int64_t>(free_.front()->id()));
    let_go.push_back(std::move(free_.front()));
    free_.erase(free_.begin());
  }
  has_forgotten_ = !forgotten_.empty();
}

std::vector<int64_t> SegmentPool::TakeForgotten() {
  if (!has_forgotten_) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  has_forgotten_ = false;
  return std::exchange(forgotten_, {});
}

}  // namespace flagos_isolation
