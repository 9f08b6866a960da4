// Shared memory for the contents of arrays. The host makes each segment, and seals it: neither side can make it smaller,
// which would end the other with SIGBUS.
#ifndef FLAGOS_ISOLATION_SEGMENT_H_
#define FLAGOS_ISOLATION_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "frames.h"

namespace flagos_isolation {

class Segment {
 public:
  // NULL where the system has no memory or no memfd_create.
  static std::shared_ptr<Segment> Make(uint64_t id, size_t size);
  // NULL for a descriptor that is no sealed shared memory.
  static std::shared_ptr<Segment> Map(uint64_t id, Descriptor descriptor);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  uint64_t id() const { return id_; }
  char* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return descriptor_.get(); }
  // The memory stays; nobody can be given it any more.
  void CloseDescriptor() { descriptor_.Reset(); }
  bool announced = false;  // whether the child has it; only who holds the segment looks

 private:
  Segment(uint64_t id, Descriptor descriptor, char* data, size_t size)
      : id_(id), descriptor_(std::move(descriptor)), data_(data), size_(size) {}
  uint64_t id_;
  Descriptor descriptor_;
  char* data_;
  size_t size_;
};

// The host's segments that hold nothing at the moment. Sizes are rounded up, so that one serves the next array as well.
class SegmentPool {
 public:
  // At least `size` bytes; NULL where there is no memory.
  std::shared_ptr<Segment> Take(size_t size);
  void Give(std::shared_ptr<Segment> segment);
  // Ids of segments that were let go since the last call.
  std::vector<int64_t> TakeForgotten();

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Segment>> free_;
  size_t free_bytes_ = 0;
  uint64_t next_id_ = 1;
  std::vector<int64_t> forgotten_;
  std::atomic<bool> has_forgotten_{false};
};

}  // namespace flagos_isolation

#endif  // FLAGOS_ISOLATION_SEGMENT_H_
