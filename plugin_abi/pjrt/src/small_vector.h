// A fixed-length array that stays off the heap while it is short: dimensions, argument lists.
#ifndef FLAGOS_PJRT_SMALL_VECTOR_H_
#define FLAGOS_PJRT_SMALL_VECTOR_H_

#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>

namespace flagos_pjrt {

template <typename T, size_t kInline>
class SmallVector {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit SmallVector(size_t size) : size_(size) {
    if (size > kInline) heap_ = std::make_unique<T[]>(size);
  }
  SmallVector(const T* values, size_t size) : SmallVector(size) {
    if (size > 0) std::memcpy(data(), values, size * sizeof(T));
  }

  T* data() { return heap_ != nullptr ? heap_.get() : inline_; }
  const T* data() const { return heap_ != nullptr ? heap_.get() : inline_; }
  size_t size() const { return size_; }
  T& operator[](size_t index) { return data()[index]; }
  const T& operator[](size_t index) const { return data()[index]; }

 private:
  size_t size_;
  std::unique_ptr<T[]> heap_;
  T inline_[kInline];
};

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_SMALL_VECTOR_H_
