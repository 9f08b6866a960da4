// Moving bytes between buffers and the host, at once when it is little, on the transfer threads when it is much.
#ifndef FLAGOS_NATIVE_TRANSFER_H_
#define FLAGOS_NATIVE_TRANSFER_H_

#include "buffer.h"

namespace flagos {

// Up to here a copy costs less than telling another thread to do it.
inline constexpr size_t kInlineBytes = size_t{64} << 10;

// Strides of the host, copied: the array lives only during the call.
struct Strides {
  bool given = false;
  int64_t values[kMaxRank];
  Strides() = default;
  Strides(const int64_t* strides, size_t rank) : given(strides != nullptr) {
    if (given) std::memcpy(values, strides, rank * sizeof(int64_t));
  }
  const int64_t* get() const noexcept { return given ? values : nullptr; }
};

// Does `work` now if it is little and `after` is done, else on a transfer thread after `after`. The event completes
// with work; it fails, and work is not done, when `after` failed.
Ref<Event> Transfer(Device* device, const Ref<Event>& after, size_t bytes, const char* name,
                    std::function<void()> work);

// Throws Failure(INVALID_ARGUMENT) unless `memory` is of `context`.
void CheckMemory(const char* function, Context* context, Memory* memory);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_TRANSFER_H_
