// The streams of a CUDA device, driven without the interpreter.
#ifndef FLAGOS_NATIVE_CUDA_STREAMS_H_
#define FLAGOS_NATIVE_CUDA_STREAMS_H_

#include <memory>
#include <mutex>
#include <vector>

#include "accelerator.h"
#include "cuda/driver.h"

namespace flagos::cuda {

// Events for points, used again.
struct EventPool {
  EventPool(const Driver& d, ContextHandle c) : driver(d), context(c) {}
  EventHandle Take();
  void GiveBack(EventHandle event) noexcept;

  const Driver& driver;
  const ContextHandle context;
  std::mutex mutex;
  std::vector<EventHandle> free;
};

class CudaStreams final : public Streams {
 public:
  CudaStreams(const Driver& driver, const Accelerator& accelerator, DeviceQueue* completions);

  void Await(Stream stream, Point& point) override;
  void Copy(Stream stream, Location to, Location from, size_t bytes) override;
  std::unique_ptr<Proof> Compare(const Captures& captures) override;
  Conditionals& conditionals() override;

  const Driver& driver() const noexcept { return driver_; }
  ContextHandle context() const noexcept { return context_; }
  StreamHandle handle(Stream stream) const noexcept { return handles_[static_cast<size_t>(stream)]; }

 private:
  Ref<Point> MakePoint(Stream stream) override;

  const Driver& driver_;
  const Accelerator& accelerator_;
  DeviceQueue* const completions_;
  ContextHandle context_ = nullptr;
  StreamHandle handles_[kNumStreams];
  std::shared_ptr<EventPool> events_;
  std::once_flag conditionals_made_;
  std::unique_ptr<Conditionals> conditionals_;
};

}  // namespace flagos::cuda

#endif  // FLAGOS_NATIVE_CUDA_STREAMS_H_
