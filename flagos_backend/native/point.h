// A place in a stream of an accelerator: reached once everything that was enqueued before it is done.
#ifndef FLAGOS_NATIVE_POINT_H_
#define FLAGOS_NATIVE_POINT_H_

#include "error.h"
#include "ref.h"

namespace flagos {

class Accelerator;
class DeviceQueue;

// The numbers of StreamKind in devices/accelerator.py.
enum class Stream : int32_t { kCompute = 0, kToDevice = 1, kFromDevice = 2 };
inline constexpr int kNumStreams = 3;

class Point : public RefCounted<Point> {
 public:
  Point(const Accelerator* accelerator, Stream stream, DeviceQueue* completions)
      : accelerator_(accelerator), stream_(stream), completions_(completions) {}
  virtual ~Point() = default;

  // Both throw Failure when the device reports an error.
  virtual bool Reached() = 0;
  virtual void Wait() = 0;

  // Whether work on `stream` of `accelerator` comes after this place without being told to.
  bool Precedes(const Accelerator* accelerator, Stream stream) const noexcept {
    return accelerator_ == accelerator && stream_ == stream;
  }
  // A thread that may wait for this.
  DeviceQueue* completions() const noexcept { return completions_; }

 private:
  const Accelerator* const accelerator_;
  const Stream stream_;
  DeviceQueue* const completions_;
};

}  // namespace flagos

#endif  // FLAGOS_NATIVE_POINT_H_
