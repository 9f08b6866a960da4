#include "python_program.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "accelerator.h"
#include "flagos/build_facts.h"
#include "log.h"
#include "tensor.h"
#include "tile_program.h"

namespace flagos {
namespace {

using python::Object;
using python::Reader;

// Callables of the Python side, found once and kept for ever: they outlive every context.
struct Bridge {
  PyObject* compile;
  PyObject* load;
  PyObject* open_peers;
  PyObject* from_dlpack;
  PyObject* to_dlpack;
};

Status CallHost(Context* context, int64_t id, Reader arguments, Reader results);

// host_callback(context, id, arguments, results) for the bridge: None, or (code, message) when the host reported an
// error. An array is (address, element type, dims).
PyObject* HostCallbackEntry(PyObject*, PyObject* arguments) {
  const python::Functions& py = *python::Known();
  try {
    Reader reader(arguments);
    auto* context = reinterpret_cast<Context*>(reader.Integer());
    const int64_t id = reader.Integer();
    PyObject* inputs = reader.Next();
    const Status status = CallHost(context, id, Reader(inputs), reader.Tuple());
    if (status.ok()) {
      py.Py_IncRef(py.none);
      return py.none;
    }
    Object answer = python::Check(py.PyTuple_New(2), "PyTuple_New");
    py.PyTuple_SetItem(answer.get(), 0, python::Integer(status.code()).Detach());
    py.PyTuple_SetItem(answer.get(), 1, python::Text(status.data()->message).Detach());
    return answer.Detach();
  } catch (...) {
    py.PyErr_SetString(py.runtime_error, StatusOfException("host callback").data()->message.c_str());
    return nullptr;
  }
}

void SinkString(void* data, const void* bytes, size_t size) {
  static_cast<std::string*>(data)->assign(static_cast<const char*>(bytes), size);
}

// key_value_get(context, key, timeout in ms) for the bridge: the value, or a status code.
PyObject* KeyValueGetEntry(PyObject*, PyObject* arguments) {
  const python::Functions& py = *python::Known();
  try {
    Reader reader(arguments);
    auto* context = reinterpret_cast<Context*>(reader.Integer());
    const std::string key = reader.Text();
    const int64_t timeout_ms = reader.Integer();
    std::string value;
    int32_t code = FLAGOS_OK;
    {
      python::ReleaseGil released;
      code =
          context->key_value_get(context->key_value_user_data, key.data(), key.size(), timeout_ms, SinkString, &value);
    }
    return (code == FLAGOS_OK ? python::Bytes(value.data(), value.size()) : python::Integer(code)).Detach();
  } catch (...) {
    py.PyErr_SetString(py.runtime_error, StatusOfException("key-value store").data()->message.c_str());
    return nullptr;
  }
}

// key_value_put(context, key, value) for the bridge: a status code.
PyObject* KeyValuePutEntry(PyObject*, PyObject* arguments) {
  const python::Functions& py = *python::Known();
  try {
    Reader reader(arguments);
    auto* context = reinterpret_cast<Context*>(reader.Integer());
    const std::string key = reader.Text(), value = reader.Bytes();
    int32_t code = FLAGOS_OK;
    {
      python::ReleaseGil released;
      code = context->key_value_put(context->key_value_user_data, key.data(), key.size(), value.data(), value.size());
    }
    return python::Integer(code).Detach();
  } catch (...) {
    py.PyErr_SetString(py.runtime_error, StatusOfException("key-value store").data()->message.c_str());
    return nullptr;
  }
}

Bridge& TheBridge() {
  static Bridge* bridge = nullptr;  // guarded by the GIL
  if (bridge != nullptr) return *bridge;
  static python::PyMethodDef methods[] = {
      {"host_callback", HostCallbackEntry, python::kMethodVarArgs, "Calls the host's function for a program."},
      {"key_value_get", KeyValueGetEntry, python::kMethodVarArgs, "Reads the host's store."},
      {"key_value_put", KeyValuePutEntry, python::kMethodVarArgs, "Writes to the host's store."}};
  Object module = python::Import("flagos_backend.runtime.bridge");
  python::SetDescribe(python::Attribute(module.get(), "describe_exception"));
  const auto function = [](python::PyMethodDef& method) {
    return python::Check(python::Known()->PyCFunction_NewEx(&method, nullptr, nullptr), "PyCFunction_NewEx");
  };
  Object callback = function(methods[0]), get = function(methods[1]), put = function(methods[2]);
  Object attach = python::Attribute(module.get(), "attach");
  python::Call(attach.get(), {callback.get(), get.get(), put.get()}, "bridge.attach");
  auto* made = new Bridge{
      python::Attribute(module.get(), "compile_program").Detach(),
      python::Attribute(module.get(), "load_program").Detach(), python::Attribute(module.get(), "open_peers").Detach(),
      python::Attribute(module.get(), "from_dlpack").Detach(), python::Attribute(module.get(), "to_dlpack").Detach()};
  if (bridge == nullptr) bridge = made;
  return *bridge;
}

struct HostArrays {
  std::vector<Shape> shapes;
  std::vector<FlagosHostArray> arrays;

  explicit HostArrays(Reader list) {
    shapes.reserve(static_cast<size_t>(list.size()));
    while (!list.done()) {
      Reader array = list.Tuple();
      const int64_t address = array.Integer();
      const auto type = static_cast<int32_t>(array.Integer());
      std::vector<int64_t> dims;
      Reader sizes = array.Tuple();
      while (!sizes.done()) dims.push_back(sizes.Integer());
      shapes.push_back(MakeShape("host_callback", type, dims.data(), dims.size()));
      FlagosHostArray host{};
      host.struct_size = sizeof(host);
      host.data = reinterpret_cast<void*>(address);
      host.size_bytes = shapes.back().bytes;
      host.dims = shapes.back().dims.data();
      host.rank = shapes.back().dims.rank();
      host.element_type = type;
      arrays.push_back(host);
    }
  }
};

Status CallHost(Context* context, int64_t id, Reader arguments, Reader results) {
  HostArrays inputs(arguments), outputs(results);
  if (context->host_callback == nullptr) {
    return Status(FLAGOS_FAILED_PRECONDITION, "the host gave no host_callback when it created the context");
  }
  python::ReleaseGil released;
  CallbackScope callback;
  return TakeError(context->host_callback(context->host_callback_user_data, id, inputs.arrays.data(),
                                          inputs.arrays.size(), outputs.arrays.data(), outputs.arrays.size()));
}

bool HasAccelerators(const Context* context) {
  const auto& devices = context->addressable_devices;
  return !devices.empty() && devices.front()->accelerator != nullptr;
}

// What reaches the other processes, or None where there are none.
Object Peers(Context* context) {
  const python::Functions& py = *python::Known();
  if (context->num_processes == 1) return Object::Share(py.none);
  if (context->peers == nullptr) {
    const std::vector<Device*>& devices = context->devices;
    Object processes = python::Check(py.PyTuple_New(static_cast<ptrdiff_t>(devices.size())), "PyTuple_New");
    for (size_t i = 0; i < devices.size(); ++i) {
      Object process = python::Integer(devices[i]->process_index);
      py.PyTuple_SetItem(processes.get(), static_cast<ptrdiff_t>(i), process.Detach());
    }
    Object address = python::Integer(reinterpret_cast<int64_t>(context));
    Object own = python::Integer(context->process_index);
    Object accelerated = python::Integer(HasAccelerators(context));
    Object made = python::Call(TheBridge().open_peers, {address.get(), own.get(), processes.get(), accelerated.get()},
                               "open_peers");
    // Making it may have let another thread make one.
    if (context->peers == nullptr) context->peers = made.Detach();
  }
  return Object::Share(context->peers);
}

Object Facts(Context* context) {
  const python::Functions& py = *python::Known();
  Object facts = python::Check(py.PyTuple_New(5), "PyTuple_New");
  py.PyTuple_SetItem(facts.get(), 4, Peers(context).Detach());
  py.PyTuple_SetItem(facts.get(), 0, python::Text(FLAGOS_BUILD_ID).Detach());
  py.PyTuple_SetItem(facts.get(), 1, python::Integer(reinterpret_cast<int64_t>(context)).Detach());
  py.PyTuple_SetItem(facts.get(), 2, python::Integer(context->host_callback != nullptr).Detach());
  py.PyTuple_SetItem(facts.get(), 3, python::Integer(HasAccelerators(context)).Detach());
  return facts;
}

std::vector<int64_t> Integers(Reader reader) {
  std::vector<int64_t> values;
  while (!reader.done()) values.push_back(reader.Integer());
  return values;
}

std::vector<std::string> Texts(Reader reader) {
  std::vector<std::string> values;
  while (!reader.done()) values.push_back(reader.Text());
  return values;
}

std::vector<std::string> BytesList(Reader reader) {
  std::vector<std::string> values;
  while (!reader.done()) values.push_back(reader.Bytes());
  return values;
}

std::vector<Shape> Shapes(Reader reader) {
  std::vector<Shape> shapes;
  while (!reader.done()) {
    Reader pair = reader.Tuple();
    const auto type = static_cast<int32_t>(pair.Integer());
    const std::vector<int64_t> dims = Integers(pair.Tuple());
    shapes.push_back(MakeShape("compile", type, dims.data(), dims.size()));
  }
  return shapes;
}

void CheckInfo(const ProgramInfo& info) {
  const auto fits = [](size_t size, size_t count) { return size == count || size == 0; };
  const auto below = [](const std::vector<int64_t>& numbers, size_t count) {
    return std::all_of(numbers.begin(), numbers.end(),
                       [count](int64_t n) { return n < 0 || static_cast<size_t>(n) < count; });
  };
  const size_t inputs = info.arguments.size(), outputs = info.outputs.size();
  if (info.argument_memory_kinds.size() != inputs || info.output_memory_kinds.size() != outputs ||
      !fits(info.argument_shardings.size(), inputs) || !fits(info.output_shardings.size(), outputs) ||
      info.argument_aliases.size() != inputs || !below(info.argument_aliases, outputs) || !below(info.donors, inputs) ||
      info.num_replicas < 1 || info.num_partitions < 1 ||
      static_cast<int64_t>(info.device_assignment.size()) != info.num_replicas * info.num_partitions) {
    Fail(FLAGOS_INTERNAL,
         "compile: the bridge describes %s inconsistently; this is a defect of the backend, please report "
         "it",
         info.name.c_str());
  }
}

// The order is that of CompiledProgram.describe in runtime/bridge.py.
ProgramInfo ReadInfo(Reader& reader) {
  ProgramInfo info;
  info.name = reader.Text();
  info.fingerprint = reader.Text();
  info.num_replicas = reader.Integer();
  info.num_partitions = reader.Integer();
  info.device_assignment = Integers(reader.Tuple());
  info.arguments = Shapes(reader.Tuple());
  info.outputs = Shapes(reader.Tuple());
  info.argument_memory_kinds = Texts(reader.Tuple());
  info.output_memory_kinds = Texts(reader.Tuple());
  info.argument_shardings = BytesList(reader.Tuple());
  info.output_shardings = BytesList(reader.Tuple());
  info.argument_aliases = Integers(reader.Tuple());
  info.donors = Integers(reader.Tuple());
  info.generated_code_bytes = static_cast<size_t>(reader.Integer());
  info.temporary_bytes = static_cast<size_t>(reader.Integer());
  info.peak_bytes = static_cast<size_t>(reader.Integer());
  Reader costs = reader.Tuple();
  while (!costs.done()) {
    Reader pair = costs.Tuple();
    std::string name = pair.Text();
    info.costs.emplace_back(std::move(name), pair.Double());
  }
  info.is_small = reader.Integer() != 0;
  CheckInfo(info);
  return info;
}

class PythonLaunch final : public LaunchState {
 public:
  explicit PythonLaunch(Object launch) : launch_(launch.Detach()) {}
  ~PythonLaunch() override { python::Discard(launch_, 0); }

  void Abort(const Status& status) noexcept override {
    python::Gil gil;
    if (!gil) return;
    try {
      Object abort = python::Attribute(launch_, "abort");
      Object code = python::Integer(status.code());
      Object message = python::Text(status.data()->message);
      python::Call(abort.get(), {code.get(), message.get()}, "abort");
    } catch (...) {
      Log(FLAGOS_LOG_ERROR, "%s", StatusOfException("aborting a launch").data()->message.c_str());
    }
  }

  PyObject* get() const noexcept { return launch_; }

 private:
  PyObject* launch_;
};

// The native form of a program, if it has one.
struct NativeForm {
  std::string words;  // empty: none
  std::string constants;
  struct Call {
    std::vector<Shape> operands, results;
  };
  std::vector<Call> calls;

  NativeForm() = default;
  explicit NativeForm(Reader reader) {
    if (reader.done()) return;
    words = reader.Bytes();
    constants = reader.Bytes();
    Reader list = reader.Tuple();
    while (!list.done()) {
      Reader call = list.Tuple();
      calls.push_back({});
      calls.back().operands = Shapes(call.Tuple());
      calls.back().results = Shapes(call.Tuple());
    }
  }
};

// A program on one accelerator, from its captures on without the interpreter.
struct Replayed {
  std::unique_ptr<Replay> replay;
  PyObject* kept = nullptr;  // the graph, and the memory of its temporaries
  // For each output, the argument that it is written over, or -1.
  std::vector<int64_t> overwritten;
  ~Replayed() {
    replay.reset();
    python::Discard(kept, 0);
  }
};

// Runs before a program is captured: by then its kernels are compiled and chosen, and it is worth it.
constexpr int kRunsBeforeCapture = 2;

class PythonProgram final : public Program, public LibraryCaller {
 public:
  // `compiled`: (description, runner). With the GIL.
  explicit PythonProgram(PyObject* compiled) {
    Reader reader(compiled);
    Reader description = reader.Tuple();
    info_ = ReadInfo(description);
    native_ = NativeForm(description.Tuple());
    runner_ = Object::Share(reader.Next()).Detach();
  }

  const NativeForm& native() const noexcept { return native_; }

  void CallLibrary(int64_t number, void* const* sources, void* const* targets) override {
    const NativeForm::Call& call = native_.calls.at(static_cast<size_t>(number));
    python::Gil gil;
    CheckOpen(gil);
    Object function = python::Attribute(runner_, "call");
    Object index = python::Integer(number);
    Object operands = Tensors(sources, call.operands), results = Tensors(targets, call.results);
    python::Call(function.get(), {index.get(), operands.get(), results.get()}, "execute");
  }

  ~PythonProgram() override {
    for (const auto& bound : bound_) python::Discard(bound.second, 0);
    python::Discard(runner_, info_.generated_code_bytes);
  }

  std::unique_ptr<LaunchState> Begin() override {
    python::Gil gil;
    CheckOpen(gil);
    Object begin = python::Attribute(runner_, "begin");
    return std::make_unique<PythonLaunch>(python::Call(begin.get(), {}, "begin"));
  }

  std::vector<Ref<Block>> Run(const Place& place, LaunchState* state, std::vector<Argument>& arguments,
                              const std::vector<Memory*>& memories) override;
  std::vector<Ref<Block>> RunSteps(const Place& place, LaunchState* state, std::vector<Argument>& arguments,
                                   const std::vector<Memory*>& memories, bool in_place);

  bool Immediate(const Device& device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return replayed_.find(device.id) != replayed_.end();
  }

  std::string Artifact(int32_t kind) override {
    python::Gil gil;
    CheckOpen(gil);
    Object artifact = python::Attribute(runner_, "artifact");
    Object number = python::Integer(kind);
    Object bytes = python::Call(artifact.get(), {number.get()}, "artifact");
    char* data = nullptr;
    ptrdiff_t size = 0;
    if (python::Known()->PyBytes_AsStringAndSize(bytes.get(), &data, &size) != 0) {
      throw Failure(python::TakeException("artifact"));
    }
    return std::string(data, static_cast<size_t>(size));
  }

 private:
  static void CheckOpen(const python::Gil& gil) {
    if (!gil) {
      Fail(FLAGOS_UNAVAILABLE, "the Python interpreter is shutting down; nothing can be compiled or run any more");
    }
  }

  PyObject* Bound(const Place& place);
  // Whether the arguments that the program uses up are this launch's alone.
  bool InPlace(const std::vector<Argument>& arguments) const noexcept;
  void Capture(const Place& place);
  // NULL, or empty results: this launch has to go through the interpreter.
  std::shared_ptr<Replayed> FindReplay(const Place& place, const std::vector<Argument>& arguments, bool in_place);
  std::vector<Ref<Block>> RunReplay(Replayed& replayed, const Place& place, std::vector<Argument>& arguments,
                                    const std::vector<Memory*>& memories);

  // A list of tensors over memory that outlives the call they are made for.
  static Object Tensors(void* const* addresses, const std::vector<Shape>& shapes) {
    const python::Functions& py = *python::Known();
    Object list = python::Check(py.PyList_New(static_cast<ptrdiff_t>(shapes.size())), "PyList_New");
    for (size_t i = 0; i < shapes.size(); ++i) {
      Object capsule = ToCapsule(addresses[i], shapes[i]);
      Object tensor = python::Call(TheBridge().from_dlpack, {capsule.get()}, "from_dlpack");
      py.PyList_SetItem(list.get(), static_cast<ptrdiff_t>(i), tensor.Detach());
    }
    return list;
  }

  NativeForm native_;
  PyObject* runner_;
  std::unordered_map<int64_t, PyObject*> bound_;  // by device id; guarded by the GIL
  std::mutex mutex_;
  std::unordered_map<int64_t, int> runs_;  // by device id, through the interpreter; with mutex_
  std::unordered_map<int64_t, std::shared_ptr<Replayed>> replayed_;  // by device id; with mutex_
};

// The callable that runs the program on one device.
PyObject* PythonProgram::Bound(const Place& place) {
  auto found = bound_.find(place.device->id);
  if (found != bound_.end()) return found->second;
  Object bind = python::Attribute(runner_, "bind");
  Object device = python::Integer(place.device->id);
  Object local = python::Integer(place.device->local_hardware_id);
  Object replica = python::Integer(place.replica);
  Object partition = python::Integer(place.partition);
  Object bound = python::Call(bind.get(), {device.get(), local.get(), replica.get(), partition.get()}, "bind");
  return bound_.emplace(place.device->id, bound.Detach()).first->second;
}

DlDevice DeviceOf(const Memory* memory) {
  return memory->accelerator ? memory->accelerator->facts().dlpack : kHostDevice;
}

Object ToTensor(const Bridge& bridge, const Argument& argument) {
  const python::Functions& py = *python::Known();
  if (argument.shape->type == FLAGOS_TYPE_TOKEN) return python::Check(py.PyTuple_New(0), "PyTuple_New");
  const Ref<Block>& block = argument.contents->shared_block();
  if (PyObject* tensor = block->tensor(*argument.shape)) return Object::Share(tensor);
  Object capsule = ToCapsule(block, *argument.shape, DeviceOf(block->memory()));
  return python::Call(bridge.from_dlpack, {capsule.get()}, "from_dlpack");
}

// The result's block: the donated argument's if the program wrote there, else the tensor's own memory, without a copy.
Ref<Block> ToBlock(const Bridge& bridge, PyObject* tensor, const Shape& shape, Memory* memory,
                   std::vector<Ref<Block>>& reusable) {
  if (shape.type == FLAGOS_TYPE_TOKEN) return Block::Allocate(memory, 0);
  Object capsule = python::Call(bridge.to_dlpack, {tensor}, "to_dlpack");
  const TensorView view = FromCapsule(capsule.get(), shape, "execute", DeviceOf(memory));
  for (Ref<Block>& block : reusable) {
    if (block && block->data() == view.data && block->bytes() == view.bytes && view.bytes > 0 &&
        block->memory() == memory) {
      return std::move(block);
    }
  }
  const bool aligned = reinterpret_cast<uintptr_t>(view.data) % kHostAlignment == 0;
  if (aligned || view.bytes == 0 || memory->accelerator) return Block::Hold(memory, view.data, shape, tensor);
  Ref<Block> copy = Block::Allocate(memory, view.bytes);
  std::memcpy(copy->data(), view.data, view.bytes);
  return copy;
}

bool PythonProgram::InPlace(const std::vector<Argument>& arguments) const noexcept {
  return !info_.donors.empty() && std::all_of(info_.donors.begin(), info_.donors.end(), [&arguments](int64_t donor) {
    const Argument& argument = arguments[static_cast<size_t>(donor)];
    return argument.donated && argument.contents->SoleOwner();
  });
}

std::vector<Captures::Range> Ranges(Reader list) {
  std::vector<Captures::Range> ranges;
  while (!list.done()) {
    Reader pair = list.Tuple();
    const auto begin = static_cast<uint64_t>(pair.Integer());
    ranges.push_back({begin, begin + static_cast<uint64_t>(pair.Integer())});
  }
  return ranges;
}

void PythonProgram::Capture(const Place& place) {
  python::Gil gil;
  if (!gil) return;
  Object local = python::Integer(place.device->local_hardware_id);
  try {
    Object capture = python::Attribute(runner_, "capture");
    Object made = python::Call(capture.get(), {local.get()}, "capture");
    Reader reader(made.get());
    if (reader.done()) return;  // the runner knows why, and says so when it explains the program
    auto replayed = std::make_shared<Replayed>();
    replayed->kept = Object::Share(reader.Next()).Detach();
    Captures captures{};
    captures.first_graph = static_cast<uint64_t>(reader.Integer());
    captures.second_graph = static_cast<uint64_t>(reader.Integer());
    Reader arrays = reader.Tuple();
    while (!arrays.done()) {
      Reader array = arrays.Tuple();
      const auto first = static_cast<uint64_t>(array.Integer()), second = static_cast<uint64_t>(array.Integer());
      captures.arrays.push_back({first, second, static_cast<uint64_t>(array.Integer())});
    }
    captures.first_owned = Ranges(reader.Tuple());
    captures.second_owned = Ranges(reader.Tuple());
    replayed->overwritten = Integers(reader.Tuple());
    if (captures.arrays.size() != info_.arguments.size() + info_.outputs.size() ||
        replayed->overwritten.size() != info_.outputs.size()) {
      Fail(FLAGOS_INTERNAL, "the captures of %s have another number of arrays than it", info_.name.c_str());
    }
    replayed->replay = place.device->accelerator->streams().MakeReplay(captures);
    const std::string outcome = Format("replayed as a graph of %zu nodes with %zu addresses", replayed->replay->nodes(),
                                       replayed->replay->patches());
    Log(FLAGOS_LOG_INFO, "%s is %s", info_.name.c_str(), outcome.c_str());
    Object note = python::Text(outcome);
    Object describe = python::Attribute(runner_, "captured");
    python::Call(describe.get(), {local.get(), note.get()}, "captured");
    std::lock_guard<std::mutex> lock(mutex_);
    replayed_[place.device->id] = std::move(replayed);
  } catch (...) {
    // The program goes on step by step: slower, and visibly so.
    const Status status = StatusOfException("capture");
    Log(FLAGOS_LOG_INFO, "%s is not replayed: %s", info_.name.c_str(), status.data()->message.c_str());
    try {
      Object note = python::Text("not replayed: " + status.data()->message);
      Object describe = python::Attribute(runner_, "captured");
      python::Call(describe.get(), {local.get(), note.get()}, "captured");
    } catch (...) {
      Log(FLAGOS_LOG_WARNING, "%s", StatusOfException("captured").data()->message.c_str());
    }
  }
}

// What kernels were chosen for when they were captured: torch's own allocations are aligned so.
constexpr uintptr_t kCapturedAlignment = 256;

std::shared_ptr<Replayed> PythonProgram::FindReplay(const Place& place, const std::vector<Argument>& arguments,
                                                    bool in_place) {
  if (!info_.donors.empty() && !in_place) return nullptr;
  for (const Argument& argument : arguments) {
    const Block& block = argument.contents->block();
    if (block.bytes() > 0 && reinterpret_cast<uintptr_t>(block.data()) % kCapturedAlignment != 0) return nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = replayed_.find(place.device->id);
  return found == replayed_.end() ? nullptr : found->second;
}

std::vector<Ref<Block>> PythonProgram::RunReplay(Replayed& replayed, const Place& place,
                                                 std::vector<Argument>& arguments,
                                                 const std::vector<Memory*>& memories) {
  std::vector<void*> addresses;
  addresses.reserve(arguments.size() + memories.size());
  for (const Argument& argument : arguments) addresses.push_back(argument.contents->block().data());
  std::vector<Ref<Block>> results;
  results.reserve(memories.size());
  for (size_t i = 0; i < memories.size(); ++i) {
    const int64_t argument = replayed.overwritten[i];
    if (argument >= 0) {
      results.push_back(arguments[static_cast<size_t>(argument)].contents->shared_block());
    } else if (info_.outputs[i].bytes == 0) {
      results.push_back(Block::Allocate(memories[i], 0));
    } else {
      results.push_back(place.device->accelerator->AllocateOutput(memories[i], info_.outputs[i].bytes));
    }
    addresses.push_back(results.back()->data());
  }
  replayed.replay->Launch(addresses.data());
  return results;
}

std::vector<Ref<Block>> PythonProgram::Run(const Place& place, LaunchState* state, std::vector<Argument>& arguments,
                                           const std::vector<Memory*>& memories) {
  // Decided before the GIL: the blocks that only this launch sees may be written over.
  const bool in_place = InPlace(arguments);
  const bool alone = place.device->accelerator != nullptr && state == nullptr;
  if (alone) {
    if (std::shared_ptr<Replayed> replayed = FindReplay(place, arguments, in_place)) {
      return RunReplay(*replayed, place, arguments, memories);
    }
  }
  std::vector<Ref<Block>> blocks;
  try {
    blocks = RunSteps(place, state, arguments, memories, in_place);
  } catch (const Failure& failure) {
    // The next launch finds what we keep for later.
    if (alone && failure.status().code() == FLAGOS_RESOURCE_EXHAUSTED) place.device->accelerator->DropCache();
    throw;
  }
  if (alone) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (++runs_[place.device->id] == kRunsBeforeCapture) {
      lock.unlock();
      Capture(place);
    }
  }
  return blocks;
}

std::vector<Ref<Block>> PythonProgram::RunSteps(const Place& place, LaunchState* state,
                                                std::vector<Argument>& arguments, const std::vector<Memory*>& memories,
                                                bool in_place) {
  python::Gil gil;
  CheckOpen(gil);
  const python::Functions& py = *python::Known();
  const Bridge& bridge = TheBridge();
  Object list = python::Check(py.PyList_New(static_cast<ptrdiff_t>(arguments.size())), "PyList_New");
  std::vector<Ref<Block>> reusable;
  for (size_t i = 0; i < arguments.size(); ++i) {
    py.PyList_SetItem(list.get(), static_cast<ptrdiff_t>(i), ToTensor(bridge, arguments[i]).Detach());
    if (in_place && arguments[i].donated) reusable.push_back(arguments[i].contents->shared_block());
  }
  PyObject* launch = state ? static_cast<PythonLaunch*>(state)->get() : py.none;
  Object flag = python::Integer(in_place);
  Object results = python::Call(Bound(place), {list.get(), flag.get(), launch}, "execute");
  const size_t count = info_.outputs.size();
  if (py.PyList_Size(results.get()) != static_cast<ptrdiff_t>(count)) {
    py.PyErr_Clear();
    Fail(FLAGOS_INTERNAL,
         "execute: %s did not return a list of its %zu outputs; this is a defect of the backend, please "
         "report it",
         info_.name.c_str(), count);
  }
  std::vector<Ref<Block>> blocks;
  blocks.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* tensor = py.PyList_GetItem(results.get(), static_cast<ptrdiff_t>(i));
    blocks.push_back(ToBlock(bridge, tensor, info_.outputs[i], memories[i], reusable));
  }
  return blocks;
}

// The program of the bridge's answer, natively where it has a native form. With the GIL.
std::unique_ptr<Program> MakeProgram(PyObject* compiled) {
  auto python = std::make_unique<PythonProgram>(compiled);
  if (python->native().words.empty()) return python;
  const NativeForm& native = python->native();
  LibraryCaller* const caller = python.get();
  return MakeTileProgram(std::move(python), caller, native.words, native.constants);
}

}  // namespace

void ClosePeers(Context* context) noexcept {
  if (context->peers == nullptr) return;
  try {
    python::Gil gil;
    if (!gil) return;
    Object close = python::Attribute(context->peers, "close");
    python::Call(close.get(), {}, "closing the context");
  } catch (...) {
    Log(FLAGOS_LOG_WARNING, "%s", StatusOfException("closing the context").data()->message.c_str());
  }
  python::Discard(std::exchange(context->peers, nullptr), 0);
}

std::unique_ptr<Program> CompilePythonProgram(Context* context, const void* program, size_t size) {
  python::Require(context->python);
  python::Gil gil;
  if (!gil) Fail(FLAGOS_UNAVAILABLE, "the Python interpreter is shutting down; nothing can be compiled any more");
  Object bytes = python::Bytes(program, size);
  Object facts = Facts(context);
  Object compiled = python::Call(TheBridge().compile, {bytes.get(), facts.get()}, "compile");
  return MakeProgram(compiled.get());
}

std::unique_ptr<Program> LoadPythonProgram(Context* context, const void* serialized, size_t size,
                                           const std::vector<int64_t>& assignment) {
  python::Require(context->python);
  python::Gil gil;
  if (!gil) Fail(FLAGOS_UNAVAILABLE, "the Python interpreter is shutting down; nothing can be loaded any more");
  const python::Functions& py = *python::Known();
  Object bytes = python::Bytes(serialized, size);
  Object ids = python::Check(py.PyTuple_New(static_cast<ptrdiff_t>(assignment.size())), "PyTuple_New");
  for (size_t i = 0; i < assignment.size(); ++i) {
    py.PyTuple_SetItem(ids.get(), static_cast<ptrdiff_t>(i), python::Integer(assignment[i]).Detach());
  }
  Object facts = Facts(context);
  Object compiled = python::Call(TheBridge().load, {bytes.get(), ids.get(), facts.get()}, "executable_load");
  return MakeProgram(compiled.get());
}

}  // namespace flagos
