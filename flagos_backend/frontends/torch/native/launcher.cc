// The module flagos_backend.frontends.torch.compile._launcher: runs a compiled program on PyTorch's tensors without copying them.
// Between AOTAutograd, which calls with a list of inputs, and the plugin ABI. One binary for every CPython from 3.11 on
// and for every PyTorch that has DLPack's C table; executable.py makes the launchers.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <new>
#include <vector>

#include "dlpack.h"
#include "flagos/plugin_abi.h"

namespace flagos {
namespace {

using Sizes = std::vector<int64_t>;

// What the launchers of this process share; made with the module and never destroyed.
struct Torch {
  const dlpack::ExchangeTable* table;
  PyObject* is_neg;  // methods of torch.Tensor
  PyObject* is_conj;
  PyObject* profiler;      // the names of torch.autograd.profiler
  PyObject* is_profiling;  // the one that says whether a profiler of this process listens
};
Torch g_torch{};

struct Input {
  Py_ssize_t source;   // position among the inputs; -1: the constant
  PyObject* constant;  // owned, or NULL
  int32_t element_type;
  dlpack::DataType dtype;
  dlpack::Device device;
  bool has_elements;
  bool is_written;  // a result goes where it lies
  Sizes physical;   // dims of the row-major array in memory
  Sizes sizes, strides;
};

struct Result {
  dlpack::DataType dtype;
  dlpack::Device device;  // where it belongs
  Py_ssize_t target;      // the input whose memory it is written to; -1: none
  Sizes sizes, strides;
};

// The structs of one launch at a time. An input's buffer is kept for as long as the tensors come at its address; where a
// result is written to it, the result's buffer takes its place.
struct Frame {
  std::vector<void*> addresses;
  std::vector<char> writable;  // whether an input lies where a result may be written
  std::vector<FlagosBuffer*> inputs;
  std::vector<FlagosBuffer*> outputs;
  FlagosBuffer* const* input_row;
  FlagosBuffer** output_row;
  FlagosEvent* done;
  std::vector<FlagosBufferPointerArgs> pointers;
  FlagosExecuteArgs args;
};

struct Launcher {
  PyObject_HEAD const FlagosApi* api;
  FlagosContext* context;
  FlagosMemory* memory;
  FlagosExecutable* executable;
  FlagosDevice* device;          // NULL: the one that the executable names
  dlpack::Device memory_device;  // DLPack's name of the memory
  PyObject* move;                // move(number, tensor): the result on the device where it belongs
  PyObject* adapt;               // adapt(number, tensor): the values as the program takes them, or an exception
  PyObject* fail;                // fail(error): raises the exception of an error handle, which it takes
  PyObject* observe;             // observe(launch, inputs): launches it so that PyTorch's profiler sees it
  std::vector<Input> inputs;
  std::vector<Result> results;
  std::vector<std::unique_ptr<Frame>> frames;  // idle ones; guarded by the GIL
};

// ---- Outputs

// A tensor's claim on the buffer that it lies in.
struct Export {
  dlpack::ManagedTensor managed;
  const FlagosApi* api;
  FlagosBuffer* buffer;
};

void DeleteExport(dlpack::ManagedTensor* managed) {
  auto* self = static_cast<Export*>(managed->manager);
  self->api->buffer_destroy(self->buffer);
  delete self;
}

// A tensor over the buffer, which it owns from now on, also when this fails.
PyObject* ToTensor(Launcher& launcher, size_t number, FlagosBuffer* buffer, void* address) {
  Result& result = launcher.results[number];
  auto* self = new (std::nothrow) Export{};
  if (self == nullptr) {
    launcher.api->buffer_destroy(buffer);
    return PyErr_NoMemory();
  }
  self->api = launcher.api;
  self->buffer = buffer;
  self->managed.version = {dlpack::kMajorVersion, 0};
  self->managed.manager = self;
  self->managed.deleter = DeleteExport;
  dlpack::Tensor& tensor = self->managed.tensor;
  tensor.data = address;
  tensor.device = launcher.memory_device;
  tensor.ndim = static_cast<int32_t>(result.sizes.size());
  tensor.dtype = result.dtype;
  tensor.shape = result.sizes.data();  // read by the import and not afterwards
  tensor.strides = result.strides.data();
  void* object = nullptr;
  if (g_torch.table->import_managed(&self->managed, &object) != 0) {
    DeleteExport(&self->managed);
    return nullptr;
  }
  if (result.device == launcher.memory_device) return static_cast<PyObject*>(object);
  PyObject* moved = PyObject_CallFunction(launcher.move, "nO", static_cast<Py_ssize_t>(number), object);
  Py_DECREF(static_cast<PyObject*>(object));
  return moved;
}

// Whether the result is in the memory of the input that it belongs to.
bool IsWritten(const Result& result, const Frame& frame, const void* address) {
  return result.target >= 0 && frame.writable[static_cast<size_t>(result.target)] != 0 &&
         frame.addresses[static_cast<size_t>(result.target)] == address;
}

// Keeps the buffer of a result for the next launch that finds the input at its address: it is the input's from now on.
void KeepWritten(Launcher& launcher, Frame& frame, size_t number, FlagosBuffer* buffer) {
  const Result& result = launcher.results[number];
  const auto target = static_cast<size_t>(result.target);
  const Input& input = launcher.inputs[target];
  const bool is_free = frame.inputs[target] == nullptr;
  if (is_free && !(result.dtype != input.dtype) && result.sizes == input.sizes && result.strides == input.strides) {
    frame.inputs[target] = buffer;
  } else {
    launcher.api->buffer_destroy(buffer);
  }
}

// The outputs as a list: tensors, and None for what was written to an input. Takes all output buffers of the frame.
PyObject* TakeOutputs(Launcher& launcher, Frame& frame) {
  const size_t count = launcher.results.size();
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(count));
  for (size_t i = 0; i < count; ++i) {
    FlagosBuffer* buffer = frame.outputs[i];
    PyObject* tensor = nullptr;
    if (list == nullptr) {
      launcher.api->buffer_destroy(buffer);
    } else if (IsWritten(launcher.results[i], frame, frame.pointers[i].pointer)) {
      KeepWritten(launcher, frame, i, buffer);
      Py_INCREF(Py_None);
      PyList_SetItem(list, static_cast<Py_ssize_t>(i), Py_None);
    } else if ((tensor = ToTensor(launcher, i, buffer, frame.pointers[i].pointer)) == nullptr) {
      Py_CLEAR(list);
    } else {
      PyList_SetItem(list, static_cast<Py_ssize_t>(i), tensor);
    }
  }
  return list;
}

// ---- Inputs

// Whether the bit is set that negates or conjugates what memory holds; -1 with an exception.
int IsSet(PyObject* method, PyObject* tensor) {
  PyObject* answer = PyObject_CallFunctionObjArgs(method, tensor, nullptr);
  if (answer == nullptr) return -1;
  const int is_set = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return is_set;
}

// 1 where the tensor lies in memory as the program takes it; 0 where it does not; -1 with an exception.
int Fits(const Input& input, PyObject* object, dlpack::Tensor* tensor) {
  if (g_torch.table->describe(object, tensor) != 0) {
    PyErr_Clear();  // `adapt` says what is wrong with it
    return 0;
  }
  const size_t rank = input.sizes.size();
  if (!(tensor->device == input.device)) return 0;
  if (static_cast<size_t>(tensor->ndim) != rank || tensor->dtype != input.dtype) return 0;
  for (size_t d = 0; d < rank; ++d) {
    if (tensor->shape[d] != input.sizes[d]) return 0;
    if (tensor->strides[d] != input.strides[d] && input.sizes[d] != 1 && input.has_elements) return 0;
  }
  if (!input.has_elements) return 1;
  if (tensor->data == nullptr) return 0;
  const int negated = IsSet(g_torch.is_neg, object);
  if (negated != 0) return negated < 0 ? -1 : 0;
  if (input.dtype.code != dlpack::kComplex) return 1;
  const int conjugated = IsSet(g_torch.is_conj, object);
  return conjugated < 0 ? -1 : conjugated == 0;
}

bool RaiseFrom(const Launcher& launcher, FlagosError* error) {
  PyObject* handle = PyLong_FromVoidPtr(error);
  PyObject* nothing = handle == nullptr ? nullptr : PyObject_CallFunctionObjArgs(launcher.fail, handle, nullptr);
  Py_XDECREF(handle);
  if (nothing != nullptr) {
    Py_DECREF(nothing);
    PyErr_SetString(PyExc_SystemError, "a launch failed, and its error was lost");
  }
  return false;
}

// Points input `number` of the frame at the address. `writable`: whether that is the memory of the caller's tensor.
bool SetAddress(Launcher& launcher, Frame& frame, size_t number, void* address, bool writable) {
  const bool is_there = frame.inputs[number] != nullptr && frame.addresses[number] == address;
  if (is_there && (frame.writable[number] != 0) == writable) return true;
  const Input& input = launcher.inputs[number];
  FlagosBufferViewArgs view{};
  view.struct_size = sizeof(view);
  view.context = launcher.context;
  view.memory = launcher.memory;
  view.data = address;
  view.dims = input.physical.data();
  view.rank = input.physical.size();
  view.element_type = input.element_type;
  view.writable = writable ? 1 : 0;
  FlagosError* error = launcher.api->buffer_view(&view);
  if (error != nullptr) return RaiseFrom(launcher, error);
  if (frame.inputs[number] != nullptr) launcher.api->buffer_destroy(frame.inputs[number]);
  frame.inputs[number] = view.buffer;
  frame.addresses[number] = address;
  frame.writable[number] = writable ? 1 : 0;
  return true;
}

// The tensor as the program takes it, from `adapt`; kept in `copies`, and borrowed from there.
PyObject* Adapt(const Launcher& launcher, size_t number, PyObject* tensor, PyObject** copies) {
  if (*copies == nullptr && (*copies = PyList_New(0)) == nullptr) return nullptr;
  PyObject* copy = PyObject_CallFunction(launcher.adapt, "nO", static_cast<Py_ssize_t>(number), tensor);
  if (copy == nullptr) return nullptr;
  const int failed = PyList_Append(*copies, copy);
  Py_DECREF(copy);
  return failed ? nullptr : copy;
}

bool Place(Launcher& launcher, Frame& frame, PyObject* arguments, PyObject** copies) {
  for (size_t i = 0; i < launcher.inputs.size(); ++i) {
    const Input& input = launcher.inputs[i];
    PyObject* object = input.source < 0 ? input.constant : PyList_GetItem(arguments, input.source);
    if (object == nullptr) return false;
    dlpack::Tensor tensor;
    int fits = Fits(input, object, &tensor);
    const bool as_given = fits > 0;
    if (fits == 0) {
      object = Adapt(launcher, i, object, copies);
      if (object == nullptr) return false;
      fits = Fits(input, object, &tensor);
      if (fits == 0) PyErr_SetString(PyExc_SystemError, "a tensor that was laid out for a program does not fit it");
    }
    if (fits <= 0) return false;
    char* address = static_cast<char*>(tensor.data) + tensor.byte_offset;
    if (!SetAddress(launcher, frame, i, address, input.is_written && as_given)) return false;
  }
  return true;
}

// ---- Launching

std::unique_ptr<Frame> TakeFrame(Launcher& launcher) {
  if (!launcher.frames.empty()) {
    std::unique_ptr<Frame> frame = std::move(launcher.frames.back());
    launcher.frames.pop_back();
    return frame;
  }
  const size_t inputs = launcher.inputs.size(), outputs = launcher.results.size();
  auto frame = std::make_unique<Frame>();
  frame->addresses.resize(inputs);
  frame->writable.resize(inputs);
  frame->inputs.resize(inputs);
  frame->outputs.resize(outputs);
  frame->pointers.resize(outputs);
  frame->input_row = frame->inputs.data();
  frame->output_row = frame->outputs.data();
  FlagosExecuteArgs& args = frame->args;
  args = {};
  args.struct_size = sizeof(args);
  args.executable = launcher.executable;
  args.device = launcher.device;
  args.num_devices = 1;
  args.num_arguments = inputs;
  args.arguments = &frame->input_row;
  args.outputs = &frame->output_row;
  args.done = outputs == 0 ? &frame->done : nullptr;
  return frame;
}

// Executes, and waits until the outputs are there, or on an accelerator until work there may follow that reads them.
// Without the GIL. On an error the frame holds no outputs.
FlagosError* Execute(const Launcher& launcher, Frame& frame) {
  const FlagosApi& api = *launcher.api;
  FlagosError* error = api.execute(&frame.args);
  if (error != nullptr) return error;
  if (launcher.results.empty()) {
    FlagosEventAwaitArgs wait{};
    wait.struct_size = sizeof(wait);
    wait.event = frame.done;
    wait.timeout_ns = -1;
    error = api.event_await(&wait);
    api.event_destroy(frame.done);
    return error;
  }
  for (size_t i = 0; i < frame.outputs.size() && error == nullptr; ++i) {
    FlagosBufferPointerArgs& pointer = frame.pointers[i];
    pointer.struct_size = sizeof(pointer);
    pointer.buffer = frame.outputs[i];
    pointer.issued = 1;
    error = api.buffer_pointer(&pointer);
  }
  if (error != nullptr) {
    for (FlagosBuffer* buffer : frame.outputs) api.buffer_destroy(buffer);
  }
  return error;
}

// A launch uses up the buffers of inputs that it may write to.
void DropWritten(const Launcher& launcher, Frame& frame) {
  for (size_t i = 0; i < launcher.inputs.size(); ++i) {
    if (!launcher.inputs[i].is_written || frame.inputs[i] == nullptr) continue;
    launcher.api->buffer_destroy(frame.inputs[i]);
    frame.inputs[i] = nullptr;
  }
}

PyObject* Launch(Launcher& launcher, PyObject* arguments) {
  std::unique_ptr<Frame> frame = TakeFrame(launcher);
  PyObject* copies = nullptr;
  PyObject* outputs = nullptr;
  if (Place(launcher, *frame, arguments, &copies)) {
    FlagosError* error;
    Py_BEGIN_ALLOW_THREADS;
    error = Execute(launcher, *frame);
    Py_END_ALLOW_THREADS;
    DropWritten(launcher, *frame);
    if (error != nullptr) {
      RaiseFrom(launcher, error);
    } else {
      outputs = TakeOutputs(launcher, *frame);
    }
  }
  Py_XDECREF(copies);
  launcher.frames.push_back(std::move(frame));
  return outputs;
}

PyObject* RunAlone(PyObject* self, PyObject* arguments) {
  if (!PyList_Check(arguments)) {
    PyErr_SetString(PyExc_TypeError, "run() takes the inputs in one list");
    return nullptr;
  }
  Py_INCREF(self);  // another thread, or what is called, may drop the last reference meanwhile
  PyObject* outputs = nullptr;
  try {
    outputs = Launch(*reinterpret_cast<Launcher*>(self), arguments);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  Py_DECREF(self);
  return outputs;
}

PyObject* Run(PyObject* self, PyObject* arguments) {
  if (PyDict_GetItemWithError(g_torch.profiler, g_torch.is_profiling) != Py_True) {
    return PyErr_Occurred() != nullptr ? nullptr : RunAlone(self, arguments);
  }
  PyObject* launch = PyObject_GetAttrString(self, "launch");  // keeps this launcher
  if (launch == nullptr) return nullptr;
  PyObject* outputs =
      PyObject_CallFunctionObjArgs(reinterpret_cast<Launcher*>(self)->observe, launch, arguments, nullptr);
  Py_DECREF(launch);
  return outputs;
}

// ---- Making one

bool ReadSizes(PyObject* tuple, Sizes* sizes) {
  if (!PyTuple_Check(tuple)) {
    PyErr_SetString(PyExc_TypeError, "sizes and strides are tuples");
    return false;
  }
  const Py_ssize_t count = PyTuple_Size(tuple);
  sizes->resize(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    (*sizes)[static_cast<size_t>(i)] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  }
  return PyErr_Occurred() == nullptr;
}

// (position or tensor, a tensor of the dtype and device, element type, physical sizes, sizes, strides)
bool ReadInput(PyObject* item, Input* input) {
  PyObject *source, *prototype, *physical, *sizes, *strides;
  if (!PyArg_ParseTuple(item, "OOiOOO", &source, &prototype, &input->element_type, &physical, &sizes, &strides)) {
    return false;
  }
  dlpack::Tensor tensor;
  if (g_torch.table->describe(prototype, &tensor) != 0) return false;
  input->dtype = tensor.dtype;
  input->device = tensor.device;
  if (!ReadSizes(physical, &input->physical) || !ReadSizes(sizes, &input->sizes)) return false;
  if (!ReadSizes(strides, &input->strides)) return false;
  input->has_elements = true;
  for (const int64_t size : input->sizes) input->has_elements &= size != 0;
  input->source = -1;
  input->constant = nullptr;
  input->is_written = false;
  if (PyLong_Check(source)) {
    input->source = PyLong_AsSsize_t(source);
    return input->source >= 0;
  }
  Py_INCREF(source);
  input->constant = source;
  return true;
}

// (a tensor of the dtype and device, sizes, strides, the input that it is written to or -1)
bool ReadResult(PyObject* item, Result* result) {
  PyObject *prototype, *sizes, *strides;
  if (!PyArg_ParseTuple(item, "OOOn", &prototype, &sizes, &strides, &result->target)) return false;
  if (!ReadSizes(sizes, &result->sizes) || !ReadSizes(strides, &result->strides)) return false;
  dlpack::Tensor tensor;
  if (g_torch.table->describe(prototype, &tensor) != 0) return false;
  result->dtype = tensor.dtype;
  result->device = tensor.device;
  return true;
}

template <class Item>
bool ReadAll(PyObject* tuple, std::vector<Item>* items, bool (*read)(PyObject*, Item*)) {
  const Py_ssize_t count = PyTuple_Size(tuple);
  for (Py_ssize_t i = 0; i < count; ++i) {
    items->emplace_back();
    if (!read(PyTuple_GetItem(tuple, i), &items->back())) return false;
  }
  return count >= 0;
}

int Initialize(PyObject* object, PyObject* arguments, PyObject* /*keywords*/) {
  auto& self = *reinterpret_cast<Launcher*>(object);
  unsigned long long api, context, memory, executable, device;
  PyObject *prototype, *inputs, *results, *move, *adapt, *fail, *observe;
  if (!PyArg_ParseTuple(arguments, "(KKKK)KOO!O!OOOO", &api, &context, &memory, &executable, &device, &prototype,
                        &PyTuple_Type, &inputs, &PyTuple_Type, &results, &move, &adapt, &fail, &observe)) {
    return -1;
  }
  if (self.api != nullptr) {
    PyErr_SetString(PyExc_TypeError, "a launcher is made once");
    return -1;
  }
  self.api = reinterpret_cast<const FlagosApi*>(api);
  self.context = reinterpret_cast<FlagosContext*>(context);
  self.memory = reinterpret_cast<FlagosMemory*>(memory);
  self.executable = reinterpret_cast<FlagosExecutable*>(executable);
  self.device = reinterpret_cast<FlagosDevice*>(device);
  dlpack::Tensor tensor;
  if (g_torch.table->describe(prototype, &tensor) != 0) return -1;
  self.memory_device = tensor.device;
  Py_INCREF(move);
  self.move = move;
  Py_INCREF(adapt);
  self.adapt = adapt;
  Py_INCREF(fail);
  self.fail = fail;
  Py_INCREF(observe);
  self.observe = observe;
  try {
    if (!ReadAll(inputs, &self.inputs, ReadInput) || !ReadAll(results, &self.results, ReadResult)) return -1;
    for (const Result& result : self.results) {
      if (result.target >= static_cast<Py_ssize_t>(self.inputs.size())) {
        PyErr_SetString(PyExc_ValueError, "a result goes to an input that is none");
        return -1;
      }
      if (result.target >= 0) self.inputs[static_cast<size_t>(result.target)].is_written = true;
    }
    return 0;
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return -1;
  }
}

PyObject* New(PyTypeObject* type, PyObject*, PyObject*) {
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* object = allocate(type, 0);
  if (object == nullptr) return nullptr;
  auto* self = reinterpret_cast<Launcher*>(object);  // zeroed; the vectors begin their lives here
  new (&self->inputs) std::vector<Input>();
  new (&self->results) std::vector<Result>();
  new (&self->frames) std::vector<std::unique_ptr<Frame>>();
  return object;
}

void Deallocate(PyObject* object) {
  auto* self = reinterpret_cast<Launcher*>(object);
  for (const auto& frame : self->frames) {
    for (FlagosBuffer* buffer : frame->inputs) {
      if (buffer != nullptr) self->api->buffer_destroy(buffer);
    }
  }
  for (const Input& input : self->inputs) Py_XDECREF(input.constant);
  std::destroy_at(&self->inputs);
  std::destroy_at(&self->results);
  std::destroy_at(&self->frames);
  Py_XDECREF(self->move);
  Py_XDECREF(self->adapt);
  Py_XDECREF(self->fail);
  Py_XDECREF(self->observe);
  PyTypeObject* type = Py_TYPE(object);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyMethodDef g_methods[] = {
    {"run", Run, METH_O, "run(inputs: list) -> list of the program's outputs, when it has ended"},
    {"launch", RunAlone, METH_O, "run, unseen by PyTorch's profiler"},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot g_slots[] = {{Py_tp_new, reinterpret_cast<void*>(New)},
                         {Py_tp_init, reinterpret_cast<void*>(Initialize)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(Deallocate)},
                         {Py_tp_methods, g_methods},
                         {0, nullptr}};
PyType_Spec g_type{"flagos_backend.frontends.torch.compile._launcher.Launcher", sizeof(Launcher), 0, Py_TPFLAGS_DEFAULT,
                   g_slots};
PyModuleDef g_module{PyModuleDef_HEAD_INIT,
                     "_launcher",
                     "Launches compiled programs on tensors.",
                     -1,
                     nullptr,
                     nullptr,
                     nullptr,
                     nullptr,
                     nullptr};

// Finds PyTorch's C table and the methods that are asked; false with an exception.
bool FindTorch() {
  PyObject* torch = PyImport_ImportModule("torch");
  PyObject* tensor = torch == nullptr ? nullptr : PyObject_GetAttrString(torch, "Tensor");
  PyObject* capsule = tensor == nullptr ? nullptr : PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
  if (capsule != nullptr) {
    g_torch.table = static_cast<dlpack::ExchangeTable*>(PyCapsule_GetPointer(capsule, dlpack::kTableCapsule));
    g_torch.is_neg = PyObject_GetAttrString(tensor, "is_neg");
    g_torch.is_conj = PyObject_GetAttrString(tensor, "is_conj");
  }
  Py_XDECREF(capsule);
  Py_XDECREF(tensor);
  Py_XDECREF(torch);
  PyObject* profiler = PyErr_Occurred() != nullptr ? nullptr : PyImport_ImportModule("torch.autograd.profiler");
  if (profiler == nullptr) return false;
  g_torch.profiler = PyModule_GetDict(profiler);  // of a module that stays, as torch does
  g_torch.is_profiling = PyUnicode_InternFromString("_is_profiler_enabled");
  if (PyErr_Occurred() != nullptr) return false;
  if (g_torch.table->version.major != dlpack::kMajorVersion) {
    PyErr_Format(PyExc_ImportError, "PyTorch speaks DLPack %u, and not %u; install another version of one of the two",
                 g_torch.table->version.major, dlpack::kMajorVersion);
    return false;
  }
  return true;
}

}  // namespace
}  // namespace flagos

PyMODINIT_FUNC PyInit__launcher() {
  if (!flagos::FindTorch()) return nullptr;
  PyObject* module = PyModule_Create(&flagos::g_module);
  PyObject* type = module == nullptr ? nullptr : PyType_FromSpec(&flagos::g_type);
  if (type == nullptr || PyModule_AddObjectRef(module, "Launcher", type) != 0) Py_CLEAR(module);
  Py_XDECREF(type);
  return module;
}
