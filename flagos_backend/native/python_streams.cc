// Streams through torch: devices/accelerator.py records, waits and copies.
#include "accelerator.h"

namespace flagos {
namespace {

using python::Object;

// Once the interpreter goes nothing of torch may be called; what was enqueued is not waited for any more.
class PythonPoint final : public Point {
 public:
  PythonPoint(const Accelerator* accelerator, Stream stream, DeviceQueue* completions, PyObject* event)
      : Point(accelerator, stream, completions), event_(event) {}
  ~PythonPoint() override { python::Discard(event_, 0); }

  bool Reached() override {
    python::Gil gil;
    if (!gil) return true;
    Object query = python::Attribute(event_, "query");
    Object reached = python::Call(query.get(), {}, "asking the device");
    return python::Known()->PyObject_IsTrue(reached.get()) == 1;
  }

  void Wait() override {
    python::Gil gil;
    if (!gil) return;
    Object synchronize = python::Attribute(event_, "synchronize");
    python::Call(synchronize.get(), {}, "waiting for the device");
  }

  PyObject* event() const noexcept { return event_; }

 private:
  PyObject* const event_;
};

class PythonStreams final : public Streams {
 public:
  PythonStreams(const Accelerator& accelerator, DeviceQueue* completions)
      : accelerator_(accelerator), completions_(completions) {}

  void Await(Stream stream, Point& point) override {
    python::Gil gil;
    CheckOpen(gil);
    Object wait = python::Attribute(accelerator_.facts().object, "wait");
    Object number = Number(stream);
    // All devices of a process are of one kind, and so are their points.
    python::Call(wait.get(), {number.get(), static_cast<PythonPoint&>(point).event()}, "waiting in a stream");
  }

  void Copy(Stream stream, Location to, Location from, size_t bytes) override {
    python::Gil gil;
    CheckOpen(gil);
    Object copy = python::Attribute(accelerator_.facts().object, "copy");
    Object number = Number(stream);
    Object target = Bytes(to, bytes), source = Bytes(from, bytes);
    python::Call(copy.get(), {number.get(), target.get(), source.get()}, "copying");
  }

 private:
  Ref<Point> MakePoint(Stream stream) override {
    python::Gil gil;
    CheckOpen(gil);
    Object record = python::Attribute(accelerator_.facts().object, "record");
    Object number = Number(stream);
    Object event = python::Call(record.get(), {number.get()}, "recording an event");
    const auto index = static_cast<size_t>(stream);
    return Ref<Point>::Adopt(new PythonPoint(&accelerator_, stream, &completions_[index], event.Detach()));
  }

  static void CheckOpen(const python::Gil& gil) {
    if (!gil) python::FailTooLate();
  }

  static Object Number(Stream stream) { return python::Integer(static_cast<int64_t>(stream)); }

  static Object Bytes(Location location, size_t bytes) {
    const auto dim = static_cast<int64_t>(bytes);
    const DlDevice device = location.accelerator ? location.accelerator->facts().dlpack : kHostDevice;
    return ToCapsule(location.data, MakeShape("copy", FLAGOS_TYPE_U8, &dim, 1), device);
  }

  const Accelerator& accelerator_;
  DeviceQueue* const completions_;
};

}  // namespace

std::unique_ptr<Streams> MakePythonStreams(const Accelerator& accelerator, DeviceQueue* completions) {
  return std::make_unique<PythonStreams>(accelerator, completions);
}

}  // namespace flagos
