// A device with memory and streams of its own, as the runtime drives it. What is done on a stream is behind Streams: the
// Python side's (python_streams.cc) works for every device that torch drives, a driver's own needs no interpreter.
#ifndef FLAGOS_NATIVE_ACCELERATOR_H_
#define FLAGOS_NATIVE_ACCELERATOR_H_

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory.h"
#include "point.h"
#include "replay.h"
#include "tensor.h"
#include "threads.h"

namespace flagos {

class Accelerator;

// Memory of a device, or of the host when there is no accelerator.
struct Location {
  void* data;
  Accelerator* accelerator;
};

// The three streams of a device. Safe from any thread; throws Failure.
class Streams {
 public:
  virtual ~Streams() = default;
  // Where this fails, the device is broken, and nothing of its memory is freed any more (python::KeepDiscarded).
  Ref<Point> Record(Stream stream);
  // What is enqueued on `stream` from now on begins after `point`, which may be of another device.
  virtual void Await(Stream stream, Point& point) = 0;
  // Enqueues a copy. Host memory is pinned and stays until a later point of the stream is reached.
  virtual void Copy(Stream stream, Location to, Location from, size_t bytes) = 0;
  // Throws Failure(UNIMPLEMENTED) that says why these captures, or this device's, cannot be replayed.
  virtual std::unique_ptr<Proof> Compare(const Captures& captures);
  // Throws Failure(UNIMPLEMENTED) that says why this device has none.
  virtual Conditionals& conditionals();

 private:
  virtual Ref<Point> MakePoint(Stream stream) = 0;
};

// What devices/discovery.py found out about one device.
struct AcceleratorFacts {
  PyObject* object = nullptr;  // kept for ever
  std::string kind;
  int64_t memory_bytes = 0;
  DlDevice dlpack{};
  std::string driver;
  std::vector<int64_t> streams;  // the driver's handles
  std::vector<std::pair<std::string, std::string>> texts;
  std::vector<std::pair<std::string, int64_t>> integers;
};

// Asks the Python side for the accelerators that `name` (FLAGOS_DEVICE) stands for. Throws Failure.
std::vector<AcceleratorFacts> FindAccelerators(const python::Settings& settings, const std::string& name,
                                               int64_t count);

// Whether this machine shows signs of an accelerator; looks at names in /dev only.
bool MayHaveAccelerators() noexcept;

class Accelerator {
 public:
  Accelerator(AcceleratorFacts facts, int64_t ordinal);
  ~Accelerator();

  const AcceleratorFacts& facts() const noexcept { return facts_; }
  int64_t ordinal() const noexcept { return ordinal_; }
  Streams& streams() noexcept { return *streams_; }

  // Memory that work on `stream` may write at once, and the compute stream after it.
  Ref<Block> Allocate(Memory* memory, size_t bytes, Stream stream);
  Ref<Block> AllocatePinned(Memory* memory, size_t bytes);
  // Memory for the compute stream that is used again when its block goes: without the interpreter, most of the time.
  Ref<Block> AllocateOutput(Memory* memory, size_t bytes);
  // Takes back what a block of AllocateOutput held.
  void Recycle(PyObject* tensor, void* data, size_t capacity) noexcept;
  // Gives the memory back that waits for use.
  void DropCache() noexcept;
  void ReadStats(FlagosDeviceMemoryStatsArgs& args);

  // Copies host memory to the device, through pinned memory and so that `from` is free on return; `type` says how narrow
  // elements are extended on the way. Returns when the copy is enqueued: the point is where it is done.
  Ref<Point> Upload(void* to, const void* from, size_t bytes, int32_t type, ThreadPool* pool);
  // Copies `bytes` that are there from `after` on to host memory, and returns when they are.
  void Download(void* to, const void* from, size_t bytes, Point* after, ThreadPool* pool);

  // A small copy to the host that has begun: `stage` holds the bytes once `point` is reached.
  struct Reading {
    Ref<Block> stage;
    Ref<Point> point;
  };
  Reading BeginDownload(const void* from, size_t bytes, Point* after);
  void EndDownload(Reading reading) { GiveBack(std::move(reading.stage), nullptr); }

  // Calls `release` once the work is done that was enqueued so far.
  void ReleaseLater(FlagosReleaseCallback release, void* user_data) noexcept;

  // Waits for everything enqueued so far.
  void Synchronize();

 private:
  // Pinned memory for copies, used again once the copy that read or wrote it is done.
  Ref<Block> Take(size_t bytes);
  void GiveBack(Ref<Block> stage, Ref<Point> point);
  Ref<Block> NewBlock(Memory* memory, size_t bytes, const char* method, int64_t argument);

  struct Free {
    PyObject* tensor;
    void* data;
  };

  struct Stage {
    Ref<Block> block;
    Ref<Point> point;  // NULL: free at once
  };

  const AcceleratorFacts facts_;
  const int64_t ordinal_;
  // Where points are waited for that somebody listens to: one for each stream.
  DeviceQueue completions_[kNumStreams];
  std::unique_ptr<Streams> streams_;
  std::mutex mutex_;
  std::deque<Stage> small_stages_, large_stages_;
  size_t staged_bytes_ = 0;                             // in use and waiting
  std::unordered_map<size_t, std::vector<Free>> free_;  // by capacity
  size_t free_bytes_ = 0;
};

// The streams that the Python side has; works for every device.
std::unique_ptr<Streams> MakePythonStreams(const Accelerator& accelerator, DeviceQueue* completions);
// Those of a driver that the library can call itself; NULL when it has none of that name here.
std::unique_ptr<Streams> MakeDriverStreams(const Accelerator& accelerator, DeviceQueue* completions);
// The driver's handle of a new stream of device `ordinal`, which stays; 0 without such a driver. Throws Failure.
int64_t MakeDriverStream(int64_t ordinal);

}  // namespace flagos

#endif  // FLAGOS_NATIVE_ACCELERATOR_H_
