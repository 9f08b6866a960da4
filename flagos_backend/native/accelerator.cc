#include "accelerator.h"

#include <unistd.h>

#include <algorithm>

#include "copy.h"
#include "event.h"
#include "log.h"
#include "narrow.h"

namespace flagos {
namespace {

using python::Object;
using python::Reader;

// A copy is cut into pieces of this size, so that the processor fills one while the device moves another.
constexpr size_t kPiece = size_t{4} << 20;
// Smaller copies share stages of this size.
constexpr size_t kSmallStage = size_t{64} << 10;
// Beyond this much pinned memory a copy waits for an earlier one.
constexpr size_t kStagedBytes = size_t{64} << 20;

// What torch's allocators round sizes to.
constexpr size_t kGranule = 512;
// At most this part of a device's memory waits for use by the next launch.
constexpr size_t kFreeShare = 32;

// Names that drivers give their devices. A name alone proves nothing: torch has the last word.
constexpr const char* kDeviceNodes[] = {
    "/dev/nvidiactl",        // NVIDIA
    "/dev/kfd",              // AMD, Hygon
    "/dev/davinci_manager",  // Ascend
    "/dev/cambricon_ctl",    // Cambricon
    "/dev/mtgpu.0",          // Moore Threads
    "/dev/mxcd",             // MetaX
    "/dev/iluvatar0",        // Iluvatar
    "/dev/xpuctrl",          // Kunlunxin
    "/dev/gcu0",             // Enflame
    "/dev/dxg",              // any of them, under WSL
};

Shape BytesShape(size_t bytes) {
  const auto dim = static_cast<int64_t>(bytes);
  return MakeShape("accelerator", FLAGOS_TYPE_U8, &dim, 1);
}

// make_stream(ordinal) for devices/streams.py: the driver's handle, or 0.
PyObject* MakeStreamEntry(PyObject*, PyObject* arguments) {
  const python::Functions& py = *python::Known();
  try {
    Reader reader(arguments);
    return python::Integer(MakeDriverStream(reader.Integer())).Detach();
  } catch (...) {
    py.PyErr_SetString(py.runtime_error, StatusOfException("making a stream").data()->message.c_str());
    return nullptr;
  }
}

AcceleratorFacts ReadFacts(Reader reader) {
  AcceleratorFacts facts;
  facts.object = Object::Share(reader.Next()).Detach();
  facts.kind = reader.Text();
  facts.memory_bytes = reader.Integer();
  facts.dlpack.type = static_cast<int32_t>(reader.Integer());
  facts.dlpack.number = static_cast<int32_t>(reader.Integer());
  facts.driver = reader.Text();
  Reader handles = reader.Tuple();
  while (!handles.done()) facts.streams.push_back(handles.Integer());
  Reader texts = reader.Tuple();
  while (!texts.done()) {
    Reader pair = texts.Tuple();
    std::string name = pair.Text();
    facts.texts.emplace_back(std::move(name), pair.Text());
  }
  Reader integers = reader.Tuple();
  while (!integers.done()) {
    Reader pair = integers.Tuple();
    std::string name = pair.Text();
    facts.integers.emplace_back(std::move(name), pair.Integer());
  }
  return facts;
}

}  // namespace

bool MayHaveAccelerators() noexcept {
  return std::any_of(std::begin(kDeviceNodes), std::end(kDeviceNodes),
                     [](const char* node) { return access(node, F_OK) == 0; });
}

std::vector<AcceleratorFacts> FindAccelerators(const python::Settings& settings, const std::string& name,
                                               int64_t count) {
  python::Require(settings);
  python::Gil gil;
  if (!gil) python::FailTooLate();
  Object describe_module = python::Import("flagos_backend.bridge");
  python::SetDescribe(python::Attribute(describe_module.get(), "describe_exception"));
  Object module = python::Import("flagos_backend.devices.discovery");
  Object open = python::Attribute(module.get(), "open_accelerators");
  static python::PyMethodDef method{"make_stream", MakeStreamEntry, python::kMethodVarArgs, "A stream of its own."};
  Object make_stream =
      python::Check(python::Known()->PyCFunction_NewEx(&method, nullptr, nullptr), "PyCFunction_NewEx");
  Object text = python::Text(name), number = python::Integer(count);
  Object found = python::Call(open.get(), {text.get(), number.get(), make_stream.get()}, "looking for accelerators");
  std::vector<AcceleratorFacts> facts;
  Reader list(found.get());
  while (!list.done()) facts.push_back(ReadFacts(list.Tuple()));
  return facts;
}

Accelerator::Accelerator(AcceleratorFacts facts, int64_t ordinal)
    : facts_(std::move(facts)),
      ordinal_(ordinal),
      completions_{DeviceQueue(Format("flagos-exec%lld", static_cast<long long>(ordinal))),
                   DeviceQueue(Format("flagos-to%lld", static_cast<long long>(ordinal))),
                   DeviceQueue(Format("flagos-from%lld", static_cast<long long>(ordinal)))} {
  streams_ = MakeDriverStreams(*this, completions_);
  if (!streams_) streams_ = MakePythonStreams(*this, completions_);
}

Accelerator::~Accelerator() { DropCache(); }

Ref<Point> Streams::Record(Stream stream) {
  try {
    return MakePoint(stream);
  } catch (...) {
    python::KeepDiscarded();
    throw;
  }
}

std::unique_ptr<Proof> Streams::Compare(const Captures&) {
  Fail(FLAGOS_UNIMPLEMENTED, "this device's graphs cannot be replayed");
}

Conditionals& Streams::conditionals() { Fail(FLAGOS_UNIMPLEMENTED, "this device's graphs have no conditional nodes"); }

Ref<Block> Accelerator::NewBlock(Memory* memory, size_t bytes, const char* method, int64_t argument) {
  python::Gil gil;
  if (!gil) python::FailTooLate();
  Object function = python::Attribute(facts_.object, method);
  Object size = python::Integer(static_cast<int64_t>(bytes));
  Object stream = python::Integer(argument);
  Object tensor = argument < 0 ? python::Call(function.get(), {size.get()}, method)
                               : python::Call(function.get(), {size.get(), stream.get()}, method);
  Object address = python::Attribute(tensor.get(), "data_ptr");
  Object number = python::Call(address.get(), {}, method);
  const long long data = python::Known()->PyLong_AsLongLong(number.get());
  return Block::Hold(memory, reinterpret_cast<void*>(data), BytesShape(bytes), tensor.get());
}

Ref<Block> Accelerator::Allocate(Memory* memory, size_t bytes, Stream stream) {
  try {
    return NewBlock(memory, bytes, "allocate", static_cast<int64_t>(stream));
  } catch (const Failure& failure) {
    if (failure.status().code() != FLAGOS_RESOURCE_EXHAUSTED) throw;
  }
  DropCache();
  return NewBlock(memory, bytes, "allocate", static_cast<int64_t>(stream));
}

Ref<Block> Accelerator::AllocateOutput(Memory* memory, size_t bytes) {
  const size_t capacity = (bytes + kGranule - 1) / kGranule * kGranule;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    auto found = free_.find(capacity);
    if (found != free_.end() && !found->second.empty()) {
      const Free free = found->second.back();
      found->second.pop_back();
      free_bytes_ -= capacity;
      lock.unlock();
      return Block::Recycled(memory, free.data, bytes, free.tensor, capacity);
    }
  }
  Ref<Block> fresh = Allocate(nullptr, capacity, Stream::kCompute);
  void* const data = fresh->data();
  return Block::Recycled(memory, data, bytes, fresh->TakeTensor(), capacity);
}

void Accelerator::Recycle(PyObject* tensor, void* data, size_t capacity) noexcept {
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_bytes_ + capacity <= static_cast<size_t>(facts_.memory_bytes) / kFreeShare) {
      free_[capacity].push_back({tensor, data});
      free_bytes_ += capacity;
      return;
    }
  } catch (...) {
    // No memory to remember it: torch takes it back instead.
  }
  python::Discard(tensor, capacity);
}

void Accelerator::DropCache() noexcept {
  std::unordered_map<size_t, std::vector<Free>> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(free_);
    free_bytes_ = 0;
  }
  python::Gil gil;
  for (const auto& [capacity, list] : dropped) {
    for (const Free& free : list) python::Discard(free.tensor, capacity);
  }
}

Ref<Block> Accelerator::AllocatePinned(Memory* memory, size_t bytes) {
  return NewBlock(memory, bytes, "allocate_pinned", -1);
}

void Accelerator::ReadStats(FlagosDeviceMemoryStatsArgs& args) {
  python::Gil gil;
  if (!gil) return;
  Object function = python::Attribute(facts_.object, "memory_stats");
  Object clear = python::Integer(args.clear_peaks);
  Object stats = python::Call(function.get(), {clear.get()}, "memory_stats");
  Reader reader(stats.get());
  int64_t* const fields[] = {&args.bytes_in_use, &args.peak_bytes_in_use, &args.num_allocations, &args.bytes_limit};
  for (int64_t* field : fields) {
    const int64_t value = reader.Integer();
    if (value >= 0) *field = value;
  }
}

Ref<Block> Accelerator::Take(size_t bytes) {
  const bool small = bytes <= kSmallStage;
  const size_t size = small ? kSmallStage : kPiece;
  std::deque<Stage>& stages = small ? small_stages_ : large_stages_;
  Stage stage;
  bool may_grow = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    may_grow = staged_bytes_ + size <= kStagedBytes;
    if (!stages.empty()) {
      stage = std::move(stages.front());
      stages.pop_front();
    }
  }
  if (stage.block) {
    if (!stage.point || stage.point->Reached()) return std::move(stage.block);
    if (!may_grow) {
      stage.point->Wait();
      return std::move(stage.block);
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stage.block) stages.push_front(std::move(stage));
    staged_bytes_ += size;
  }
  return AllocatePinned(nullptr, size);
}

void Accelerator::GiveBack(Ref<Block> stage, Ref<Point> point) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::deque<Stage>& stages = stage->bytes() == kSmallStage ? small_stages_ : large_stages_;
  stages.push_back({std::move(stage), std::move(point)});
}

Ref<Point> Accelerator::Upload(void* to, const void* from, size_t bytes, int32_t type, ThreadPool* pool) {
  Ref<Point> point;
  for (size_t begin = 0; begin < bytes; begin += kPiece) {
    const size_t size = std::min(kPiece, bytes - begin);
    Ref<Block> stage = Take(size);
    CopyElements(BytesShape(size), stage->data(), nullptr, static_cast<const char*>(from) + begin, nullptr, pool);
    ExtendNarrow(type, stage->data(), size);
    streams_->Copy(Stream::kToDevice, {static_cast<char*>(to) + begin, this}, {stage->data(), nullptr}, size);
    point = streams_->Record(Stream::kToDevice);
    GiveBack(std::move(stage), point);
  }
  return point;
}

Accelerator::Reading Accelerator::BeginDownload(const void* from, size_t bytes, Point* after) {
  if (after != nullptr) streams_->Await(Stream::kFromDevice, *after);
  Reading reading{Take(bytes), nullptr};
  streams_->Copy(Stream::kFromDevice, {reading.stage->data(), nullptr}, {const_cast<void*>(from), this}, bytes);
  reading.point = streams_->Record(Stream::kFromDevice);
  return reading;
}

void Accelerator::Download(void* to, const void* from, size_t bytes, Point* after, ThreadPool* pool) {
  // The device moves one piece while the processor takes the one before.
  Reading current;
  size_t current_begin = 0;
  for (size_t begin = 0; begin < bytes + kPiece; begin += kPiece) {
    Reading next;
    if (begin < bytes) {
      const size_t size = std::min(kPiece, bytes - begin);
      next = BeginDownload(static_cast<const char*>(from) + begin, size, begin == 0 ? after : nullptr);
    }
    if (current.stage) {
      current.point->Wait();
      const size_t size = std::min(kPiece, bytes - current_begin);
      char* target = static_cast<char*>(to) + current_begin;
      CopyElements(BytesShape(size), target, nullptr, current.stage->data(), nullptr, pool);
      GiveBack(std::move(current.stage), nullptr);
    }
    current = std::move(next);
    current_begin = begin;
  }
}

void Accelerator::ReleaseLater(FlagosReleaseCallback release, void* user_data) noexcept {
  try {
    Ref<Event> done = Make<Event>();
    done->CompleteAt(streams_->Record(Stream::kCompute));
    done->OnReady([release, user_data](const Status&) { release(user_data); });
  } catch (...) {
    // A device that reports errors reads nothing any more.
    Log(FLAGOS_LOG_WARNING, "%s", StatusOfException("releasing memory").data()->message.c_str());
    release(user_data);
  }
}

void Accelerator::Synchronize() {
  for (const Stream stream : {Stream::kCompute, Stream::kToDevice, Stream::kFromDevice}) {
    streams_->Record(stream)->Wait();
  }
}

}  // namespace flagos
