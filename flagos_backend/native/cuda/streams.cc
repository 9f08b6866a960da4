#include "cuda/streams.h"

#include <chrono>
#include <thread>

#include "cuda/conditionals.h"
#include "cuda/proof.h"

namespace flagos {
namespace cuda {
namespace {

// How a thread waits: it asks all the time; then between naps that grow with what it has waited, so that the answer is
// late by a small part of that; then the driver wakes it, which on a virtual machine takes some tenths of a millisecond.
constexpr std::chrono::microseconds kSpin{100};
constexpr std::chrono::milliseconds kNaps{20};
constexpr int kNapsPart = 32;

ContextHandle PrimaryContext(const Driver& driver, int64_t ordinal) {
  Device device = 0;
  ContextHandle context = nullptr;
  driver.Check(driver.DeviceGet(&device, static_cast<int>(ordinal)), "finding the device");
  driver.Check(driver.PrimaryContextRetain(&context, device), "finding the device's context");
  return context;
}

class CudaPoint final : public Point {
 public:
  CudaPoint(const Accelerator* accelerator, Stream stream, DeviceQueue* completions, std::shared_ptr<EventPool> pool,
            EventHandle event)
      : Point(accelerator, stream, completions), pool_(std::move(pool)), event_(event) {}
  ~CudaPoint() override { pool_->GiveBack(event_); }

  bool Reached() override {
    ContextScope current(pool_->driver, pool_->context);
    const Result result = pool_->driver.EventQuery(event_);
    if (result == kNotReady) return false;
    pool_->driver.Check(result, "running on the device");
    return true;
  }

  void Wait() override {
    const auto began = std::chrono::steady_clock::now();
    for (;;) {
      if (Reached()) return;
      const auto waited = std::chrono::steady_clock::now() - began;
      if (waited > kNaps) break;
      if (waited > kSpin) std::this_thread::sleep_for(waited / kNapsPart);
    }
    ContextScope current(pool_->driver, pool_->context);
    pool_->driver.Check(pool_->driver.EventSynchronize(event_), "running on the device");
  }

  EventHandle event() const noexcept { return event_; }

 private:
  const std::shared_ptr<EventPool> pool_;
  const EventHandle event_;
};

}  // namespace

EventHandle EventPool::Take() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!free.empty()) {
      EventHandle event = free.back();
      free.pop_back();
      return event;
    }
  }
  EventHandle event = nullptr;
  driver.Check(driver.EventCreate(&event, kEventBlockingSync | kEventDisableTiming), "making an event");
  return event;
}

void EventPool::GiveBack(EventHandle event) noexcept {
  try {
    std::lock_guard<std::mutex> lock(mutex);
    free.push_back(event);
  } catch (...) {
    // No memory to remember it: the event is lost, and nothing else.
  }
}

CudaStreams::CudaStreams(const Driver& driver, const Accelerator& accelerator, DeviceQueue* completions)
    : driver_(driver),
      accelerator_(accelerator),
      completions_(completions),
      context_(PrimaryContext(driver, accelerator.ordinal())),
      events_(std::make_shared<EventPool>(driver, context_)) {
  for (size_t i = 0; i < kNumStreams; ++i) {
    handles_[i] = reinterpret_cast<StreamHandle>(accelerator.facts().streams.at(i));
  }
}

Ref<Point> CudaStreams::MakePoint(Stream stream) {
  ContextScope current(driver_, context_);
  EventHandle event = events_->Take();
  auto point = Ref<Point>::Adopt(
      new CudaPoint(&accelerator_, stream, &completions_[static_cast<size_t>(stream)], events_, event));
  driver_.Check(driver_.EventRecord(event, handle(stream)), "recording an event");
  return point;
}

void CudaStreams::Await(Stream stream, Point& point) {
  ContextScope current(driver_, context_);
  // All devices of a process are of one kind, and so are their points.
  driver_.Check(driver_.StreamWaitEvent(handle(stream), static_cast<CudaPoint&>(point).event(), 0),
                "waiting in a stream");
}

void CudaStreams::Copy(Stream stream, Location to, Location from, size_t bytes) {
  ContextScope current(driver_, context_);
  driver_.Check(driver_.MemcpyAsync(reinterpret_cast<DevicePointer>(to.data),
                                    reinterpret_cast<DevicePointer>(from.data), bytes, handle(stream)),
                "copying");
}

std::unique_ptr<Proof> CudaStreams::Compare(const Captures& captures) {
  return std::make_unique<GraphProof>(*this, captures);
}

Conditionals& CudaStreams::conditionals() {
  std::call_once(conditionals_made_, [this] { conditionals_ = std::make_unique<CudaConditionals>(driver_, context_); });
  return *conditionals_;
}

}  // namespace cuda

std::unique_ptr<Streams> MakeDriverStreams(const Accelerator& accelerator, DeviceQueue* completions) {
  if (accelerator.facts().driver != "cuda") return nullptr;
  const cuda::Driver* driver = cuda::TheDriver();
  return driver ? std::make_unique<cuda::CudaStreams>(*driver, accelerator, completions) : nullptr;
}

int64_t MakeDriverStream(int64_t ordinal) {
  const cuda::Driver* driver = cuda::TheDriver();
  if (driver == nullptr) return 0;
  cuda::ContextScope current(*driver, cuda::PrimaryContext(*driver, ordinal));
  cuda::StreamHandle stream = nullptr;
  driver->Check(driver->StreamCreate(&stream, cuda::kStreamNonBlocking), "making a stream");
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(stream));
}

}  // namespace flagos
