#include "bridge.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "flagos/build_facts.h"
#include "log.h"
#include "profiler.h"
#include "program.h"
#include "python_replays.h"

namespace flagos {
namespace {

using python::Object;
using python::Reader;

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

// recording(context) for the bridge: whether a profiler of the context listens.
PyObject* RecordingEntry(PyObject*, PyObject* arguments) {
  const python::Functions& py = *python::Known();
  try {
    Reader reader(arguments);
    return python::Integer(reinterpret_cast<Context*>(reader.Integer())->profiler.active()).Detach();
  } catch (...) {
    py.PyErr_SetString(py.runtime_error, StatusOfException("recording").data()->message.c_str());
    return nullptr;
  }
}

SpanCategory CategoryNamed(const std::string& name) {
  const auto* const found = std::find(std::begin(kSpanCategories), std::end(kSpanCategories), name);
  if (found == std::end(kSpanCategories)) {
    Fail(FLAGOS_INTERNAL, "record: there is no category '%s'; this is a defect of the backend, please report it",
         name.c_str());
  }
  return static_cast<SpanCategory>(found - std::begin(kSpanCategories));
}

// record(context, device, fingerprint, spans) for the bridge: what this thread did, where a profiler listens. A span is
// (category, name, begin, end, step), in nanoseconds of the monotonic clock; step -1: of no program.
PyObject* RecordEntry(PyObject*, PyObject* arguments) {
  const python::Functions& py = *python::Known();
  try {
    Reader reader(arguments);
    Profiler& profiler = reinterpret_cast<Context*>(reader.Integer())->profiler;
    const int64_t device = reader.Integer();
    const int64_t program = profiler.NumberOf(reader.Text());
    Reader list = reader.Tuple();
    while (!list.done()) {
      Reader span = list.Tuple();
      const SpanCategory category = CategoryNamed(span.Text());
      const std::string text = span.Text();
      const uint32_t name = profiler.active() ? profiler.Text(text) : 0;
      const int64_t begin_ns = span.Integer(), end_ns = span.Integer();
      const SpanFacts facts{device, -1, program, span.Integer()};
      if (profiler.active()) profiler.Record(SpanRecord(category, name, begin_ns, end_ns, facts));
    }
    py.Py_IncRef(py.none);
    return py.none;
  } catch (...) {
    py.PyErr_SetString(py.runtime_error, StatusOfException("record").data()->message.c_str());
    return nullptr;
  }
}

}  // namespace

Bridge& TheBridge() {
  static Bridge* bridge = nullptr;  // guarded by the GIL
  if (bridge != nullptr) return *bridge;
  static python::PyMethodDef methods[] = {
      {"host_callback", HostCallbackEntry, python::kMethodVarArgs, "Calls the host's function for a program."},
      {"key_value_get", KeyValueGetEntry, python::kMethodVarArgs, "Reads the host's store."},
      {"key_value_put", KeyValuePutEntry, python::kMethodVarArgs, "Writes to the host's store."},
      {"compare_captures", CompareCapturesEntry, python::kMethodVarArgs, "Proves which words hold addresses."},
      {"make_replay", MakeReplayEntry, python::kMethodVarArgs, "Makes a replay of a capture."},
      {"launch_replay", LaunchReplayEntry, python::kMethodVarArgs, "Launches a replay."},
      {"drop_replay", DropReplayEntry, python::kMethodVarArgs, "Gives a replay up."},
      {"prepare_conditionals", PrepareConditionalsEntry, python::kMethodVarArgs, "Fails where graphs have none."},
      {"open_conditional", OpenConditionalEntry, python::kMethodVarArgs, "Begins a conditional node's body."},
      {"close_conditional", CloseConditionalEntry, python::kMethodVarArgs, "Ends a conditional node's body."},
      {"recording", RecordingEntry, python::kMethodVarArgs, "Whether a profiler listens."},
      {"record", RecordEntry, python::kMethodVarArgs, "Tells a profiler what ran."}};
  Object module = python::Import("flagos_backend.bridge");
  python::SetDescribe(python::Attribute(module.get(), "describe_exception"));
  const auto function = [](python::PyMethodDef& method) {
    return python::Check(python::Known()->PyCFunction_NewEx(&method, nullptr, nullptr), "PyCFunction_NewEx");
  };
  Object callback = function(methods[0]), get = function(methods[1]), put = function(methods[2]);
  Object compare = function(methods[3]), make = function(methods[4]), launch = function(methods[5]);
  Object drop = function(methods[6]), prepare = function(methods[7]);
  Object open = function(methods[8]), close = function(methods[9]);
  Object recording = function(methods[10]), record = function(methods[11]);
  Object attach = python::Attribute(module.get(), "attach");
  python::Call(attach.get(),
               {callback.get(), get.get(), put.get(), compare.get(), make.get(), launch.get(), drop.get(),
                prepare.get(), open.get(), close.get(), recording.get(), record.get()},
               "bridge.attach");
  auto* made = new Bridge{
      python::Attribute(module.get(), "compile_program").Detach(),
      python::Attribute(module.get(), "load_program").Detach(), python::Attribute(module.get(), "open_peers").Detach(),
      python::Attribute(module.get(), "from_dlpack").Detach(), python::Attribute(module.get(), "to_dlpack").Detach()};
  if (bridge == nullptr) bridge = made;
  return *bridge;
}

namespace {

bool HasAccelerators(const Context* context) {
  const auto& devices = context->addressable_devices;
  return !devices.empty() && devices.front()->accelerator != nullptr;
}

// What the devices reach each other through, or None where all share memory.
Object Peers(Context* context) {
  const python::Functions& py = *python::Known();
  const bool together = context->devices.size() == 1 || !HasAccelerators(context);
  if (context->num_processes == 1 && together) return Object::Share(py.none);
  if (context->peers == nullptr) {
    const std::vector<Device*>& devices = context->devices;
    Object processes = python::Check(py.PyTuple_New(static_cast<ptrdiff_t>(devices.size())), "PyTuple_New");
    for (size_t i = 0; i < devices.size(); ++i) {
      Object process = python::Integer(devices[i]->process_index);
      py.PyTuple_SetItem(processes.get(), static_cast<ptrdiff_t>(i), process.Detach());
    }
    Object address = python::Integer(reinterpret_cast<int64_t>(context));
    Object accelerated = python::Integer(HasAccelerators(context));
    Object made =
        python::Call(TheBridge().open_peers, {address.get(), processes.get(), accelerated.get()}, "open_peers");
    // Making it may have let another thread make one.
    if (context->peers == nullptr) context->peers = made.Detach();
  }
  return Object::Share(context->peers);
}

}  // namespace

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

void ClosePeers(Context* context) noexcept {
  if (context->peers == nullptr) return;
  try {
    python::Gil gil;
    if (!gil || python::EndsInterpreter()) return;  // its modules are being taken down
    Object close = python::Attribute(context->peers, "close");
    python::Call(close.get(), {}, "closing the context");
  } catch (...) {
    Log(FLAGOS_LOG_WARNING, "%s", StatusOfException("closing the context").data()->message.c_str());
  }
  python::Discard(std::exchange(context->peers, nullptr), 0);
}

}  // namespace flagos
