// Element types and dense row-major shapes of buffers.
#ifndef FLAGOS_NATIVE_SHAPE_H_
#define FLAGOS_NATIVE_SHAPE_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "error.h"

namespace flagos {

inline constexpr size_t kMaxRank = 64;

// Bytes of one element, 0 for a token; -1: no such type.
int ElementBytes(int32_t type) noexcept;
const char* ElementName(int32_t type) noexcept;

// Dimensions, without an allocation for the ranks that occur.
class Dims {
 public:
  Dims() = default;
  Dims(const int64_t* dims, size_t rank) : rank_(rank) {
    if (rank > kInline) heap_ = std::make_unique<int64_t[]>(rank);
    if (rank > 0) std::memcpy(data(), dims, rank * sizeof(int64_t));
  }
  Dims(const Dims& other) : Dims(other.data(), other.rank_) {}
  Dims(Dims&&) = default;
  Dims& operator=(Dims&&) = default;
  Dims& operator=(const Dims& other) { return *this = Dims(other); }

  size_t rank() const noexcept { return rank_; }
  const int64_t* data() const noexcept { return heap_ ? heap_.get() : inline_; }
  int64_t* data() noexcept { return heap_ ? heap_.get() : inline_; }
  int64_t operator[](size_t i) const noexcept { return data()[i]; }
  bool operator==(const Dims& other) const noexcept {
    return rank_ == other.rank_ && std::memcmp(data(), other.data(), rank_ * sizeof(int64_t)) == 0;
  }
  bool operator!=(const Dims& other) const noexcept { return !(*this == other); }

 private:
  static constexpr size_t kInline = 6;
  size_t rank_ = 0;
  int64_t inline_[kInline] = {};
  std::unique_ptr<int64_t[]> heap_;
};

struct Shape {
  int32_t type = FLAGOS_TYPE_INVALID;
  Dims dims;
  size_t bytes = 0;

  bool operator==(const Shape& other) const noexcept { return type == other.type && dims == other.dims; }
  bool operator!=(const Shape& other) const noexcept { return !(*this == other); }
};

// Checks what a host gave and computes the size; throws Failure(INVALID_ARGUMENT) that names `function`.
Shape MakeShape(const char* function, int32_t type, const int64_t* dims, size_t rank);

// "f32[2,3]".
std::string ToString(const Shape& shape);

// Byte strides of the dense row-major layout, into strides[rank].
void DenseStrides(const Shape& shape, int64_t* strides) noexcept;
// True when `byte_strides` walk the elements exactly as the dense layout does.
bool IsDense(const Shape& shape, const int64_t* byte_strides) noexcept;
// Throws Failure when the reach of `byte_strides` overflows.
void CheckStrides(const char* function, const Shape& shape, const int64_t* byte_strides);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_SHAPE_H_
