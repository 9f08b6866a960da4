#include "kernel.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

KernelEnvironment kernel_environment;

// Kernel.flags, as kernels.py knows them.
enum {
  kResizes = 1,    // outputs may be given another size
  kAnyDevice = 2,  // operands may be on other devices
  kRandom = 4,     // draws from a generator
  kSeesLazy = 16,  // tensors may be conjugated or negated lazily
  kUncounted = 8,  // results are memory of the arguments
};

enum { kMaxReturns = 16, kMaxWritten = 8 };

// What becomes of a result, if it is not the written argument of that number.
enum { kFresh = -1, kAsIs = -2 };

typedef struct {
  int position;    // -1: by keyword only
  PyObject* name;  // interned
} Argument;

typedef struct {
  PyObject_HEAD PyObject* name;
  PyObject* inner;         // the operator
  PyObject* inner_number;  // the same for Python numbers where the schema has tensors; may be NULL
  PyObject* generator_name;
  uint64_t tensor_positions;
  int generator_position;
  int flags;
  int num_returns, num_written;
  int8_t returns[kMaxReturns];
  Argument written[kMaxWritten];
} Kernel;

// ---- Arguments -----------------------------------------------------------------------------------------------------

typedef struct {
  Kernel* kernel;
  int has_number;    // a Python number stands where the schema has a tensor
  int foreign;       // an operand is on another device, and is no scalar
  int this_device;   // the call asks for results on this device
  int other_device;  // the call asks for results on another device
  int pinned;        // the call asks for results in pinned memory
} Conversion;

static int is_tensor(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyTypeObject* tensor = (PyTypeObject*)kernel_environment.tensor_type;
  return type == tensor || PyType_IsSubtype(type, tensor);
}

static PyObject* convert_device(Conversion* state, PyObject* device) {
  const KernelEnvironment* env = &kernel_environment;
  for (Py_ssize_t i = 0; i < PyTuple_Size(env->devices); i++) {
    int equal = PyObject_RichCompareBool(device, PyTuple_GetItem(env->devices, i), Py_EQ);
    if (equal < 0) return NULL;
    if (equal) {
      state->this_device = 1;
      Py_INCREF(env->inner_device);
      return env->inner_device;
    }
  }
  PyObject* refused = PyObject_CallFunctionObjArgs(env->refuse_device, state->kernel->name, device, NULL);
  if (!refused) return NULL;
  Py_DECREF(refused);
  state->other_device = 1;
  Py_INCREF(device);
  return device;
}

static int is_true(PyObject* tensor, PyObject* question) {
  PyObject* answer = PyObject_CallMethodObjArgs(tensor, question, NULL);
  int result = answer ? PyObject_IsTrue(answer) : -1;
  Py_XDECREF(answer);
  return result;
}

// `inner` with the lazy conjugation and negation of `tensor`, which DLPack does not know. New reference.
static PyObject* carry_laziness(PyObject* tensor, PyObject* inner) {
  const KernelEnvironment* env = &kernel_environment;
  PyObject* result = inner;
  Py_INCREF(result);
  for (int i = 0; i < 2 && result; i++) {
    int lazy = is_true(tensor, i ? env->is_neg : env->is_conj);
    if (!lazy) continue;
    PyObject* plain = result;
    result = lazy < 0 ? NULL : PyObject_CallFunctionObjArgs(i ? env->negate : env->conjugate, plain, NULL);
    Py_DECREF(plain);
  }
  return result;
}

static PyObject* convert_tensor(Conversion* state, PyObject* tensor) {
  int32_t foreign_ndim;
  PyObject* inner = relabel_unwrap(tensor, &foreign_ndim);
  // A number that PyTorch keeps in a tensor of the host may stand beside tensors of any device.
  if (foreign_ndim > 0) state->foreign = 1;
  if (!inner || !(state->kernel->flags & kSeesLazy) || foreign_ndim >= 0) return inner;
  PyObject* lazy = carry_laziness(tensor, inner);
  Py_DECREF(inner);
  return lazy;
}

static PyObject* convert(Conversion* state, PyObject* value);

// Lists of tensors; the others pass as they are.
static PyObject* convert_list(Conversion* state, PyObject* list) {
  Py_ssize_t size = PySequence_Size(list);
  int has_tensor = 0;
  for (Py_ssize_t i = 0; i < size && !has_tensor; i++) {
    PyObject* item = PyList_Check(list) ? PyList_GetItem(list, i) : PyTuple_GetItem(list, i);
    if (!item) return NULL;
    if (item == Py_None) continue;
    if (!is_tensor(item)) break;
    has_tensor = 1;
  }
  if (!has_tensor) {
    Py_INCREF(list);
    return list;
  }
  PyObject* result = PyList_New(size);
  for (Py_ssize_t i = 0; result && i < size; i++) {
    PyObject* item = PyList_Check(list) ? PyList_GetItem(list, i) : PyTuple_GetItem(list, i);
    PyObject* converted = item ? convert(state, item) : NULL;
    if (!converted || PyList_SetItem(result, i, converted)) Py_CLEAR(result);
  }
  return result;
}

static PyObject* convert(Conversion* state, PyObject* value) {
  if (is_tensor(value)) return convert_tensor(state, value);
  if (PyList_Check(value) || PyTuple_Check(value)) return convert_list(state, value);
  if ((PyObject*)Py_TYPE(value) == kernel_environment.device_type) return convert_device(state, value);
  Py_INCREF(value);
  return value;
}

static PyObject* convert_arguments(Conversion* state, PyObject* args) {
  Py_ssize_t size = PyTuple_Size(args);
  PyObject* result = PyTuple_New(size);
  for (Py_ssize_t i = 0; result && i < size; i++) {
    PyObject* value = PyTuple_GetItem(args, i);
    if (i < 64 && state->kernel->tensor_positions >> i & 1 &&
        (PyLong_Check(value) || PyFloat_Check(value) || PyComplex_Check(value)))
      state->has_number = 1;
    PyObject* converted = convert(state, value);
    if (!converted || PyTuple_SetItem(result, i, converted)) Py_CLEAR(result);
  }
  return result;
}

static PyObject* convert_keywords(Conversion* state, PyObject* kwargs) {
  PyObject* result = PyDict_New();
  PyObject *name, *value;
  Py_ssize_t at = 0;
  while (result && PyDict_Next(kwargs, &at, &name, &value)) {
    if (value == Py_True && !PyUnicode_CompareWithASCIIString(name, "pin_memory")) state->pinned = 1;
    PyObject* converted = convert(state, value);
    if (!converted || PyDict_SetItem(result, name, converted)) Py_CLEAR(result);
    Py_XDECREF(converted);
  }
  return result;
}

// 0 where the generator is the device's; else -1 with PyTorch's error.
static int check_generator(PyObject* generator) {
  PyObject* checked = PyObject_CallFunctionObjArgs(kernel_environment.check_generator, generator, NULL);
  Py_XDECREF(checked);
  return checked ? 0 : -1;
}

// Names the device's own generator where the caller gave none.
static int add_generator(Kernel* kernel, PyObject* args, PyObject** kwargs) {
  PyObject* generator = kernel_environment.generator;
  int position = kernel->generator_position;
  if (position >= 0 && position < PyTuple_Size(args)) {
    PyObject* given = PyTuple_GetItem(args, position);
    if (given != Py_None) return check_generator(given);
    Py_INCREF(generator);
    return PyTuple_SetItem(args, position, generator);
  }
  if (!*kwargs && !(*kwargs = PyDict_New())) return -1;
  PyObject* given = PyDict_GetItemWithError(*kwargs, kernel->generator_name);
  if (!given && PyErr_Occurred()) return -1;
  if (given && given != Py_None) return check_generator(given);
  return PyDict_SetItem(*kwargs, kernel->generator_name, generator);
}

// ---- Results -------------------------------------------------------------------------------------------------------

// The value of an argument, borrowed; NULL where it was not given.
static PyObject* argument(const Argument* which, PyObject* args, PyObject* kwargs) {
  if (which->position >= 0 && which->position < PyTuple_Size(args)) return PyTuple_GetItem(args, which->position);
  return kwargs ? PyDict_GetItemWithError(kwargs, which->name) : NULL;
}

static PyObject* wrap(Kernel* kernel, PyObject* value) {
  if (is_tensor(value)) {
    if (!(kernel->flags & kSeesLazy)) return relabel_wrap(value, !(kernel->flags & kUncounted));
    PyObject* plain = PyObject_CallFunctionObjArgs(kernel_environment.resolve, value, NULL);
    PyObject* wrapped = plain ? relabel_wrap(plain, !(kernel->flags & kUncounted)) : NULL;
    Py_XDECREF(plain);
    return wrapped;
  }
  if (!PyList_Check(value) && !PyTuple_Check(value)) {
    Py_INCREF(value);
    return value;
  }
  Py_ssize_t size = PySequence_Size(value);
  PyObject* result = PyList_New(size);
  for (Py_ssize_t i = 0; result && i < size; i++) {
    PyObject* wrapped = wrap(kernel, PyList_Check(value) ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i));
    if (!wrapped || PyList_SetItem(result, i, wrapped)) Py_CLEAR(result);
  }
  return result;
}

static PyObject* wrap_result(Kernel* kernel, int index, PyObject* value, PyObject* args, PyObject* kwargs) {
  int plan = kernel->returns[index];
  if (plan == kFresh) return wrap(kernel, value);
  PyObject* result = plan == kAsIs ? value : argument(&kernel->written[plan], args, kwargs);
  if (!result) {
    if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%U: an output is missing", kernel->name);
    return NULL;
  }
  Py_INCREF(result);
  return result;
}

static PyObject* wrap_results(Kernel* kernel, PyObject* value, PyObject* args, PyObject* kwargs) {
  if (kernel->num_returns == 0) Py_RETURN_NONE;
  if (kernel->num_returns == 1) return wrap_result(kernel, 0, value, args, kwargs);
  if (!PyTuple_Check(value) || PyTuple_Size(value) != kernel->num_returns) {
    PyErr_Format(PyExc_TypeError, "%U returned %R where %d results are due", kernel->name, value, kernel->num_returns);
    return NULL;
  }
  PyObject* result = PyTuple_New(kernel->num_returns);
  for (int i = 0; result && i < kernel->num_returns; i++) {
    PyObject* wrapped = wrap_result(kernel, i, PyTuple_GetItem(value, i), args, kwargs);
    if (!wrapped || PyTuple_SetItem(result, i, wrapped)) Py_CLEAR(result);
  }
  return result;
}

static int same_sizes(const DLTensor* a, const DLTensor* b) {
  size_t bytes = sizeof(int64_t) * (size_t)a->ndim;
  return a->ndim == b->ndim && !memcmp(a->shape, b->shape, bytes) && !memcmp(a->strides, b->strides, bytes);
}

// Where the operator resized the tensor that computes for `outer`, does the same to `outer`.
static int follow_resize(PyObject* outer, PyObject* inner) {
  if (is_tensor(outer)) {
    DLTensor a, b;
    if (relabel_describe(outer, &a) || relabel_describe(inner, &b)) return -1;
    if (same_sizes(&a, &b)) return 0;
    PyObject* adopted = PyObject_CallFunctionObjArgs(kernel_environment.adopt, outer, inner, NULL);
    Py_XDECREF(adopted);
    return adopted ? 0 : -1;
  }
  if (!PyList_Check(outer) && !PyTuple_Check(outer)) return 0;
  for (Py_ssize_t i = 0; i < PySequence_Size(outer); i++) {
    PyObject* one = PySequence_GetItem(outer, i);
    PyObject* other = PySequence_GetItem(inner, i);
    int failed = !one || !other || follow_resize(one, other);
    Py_XDECREF(one);
    Py_XDECREF(other);
    if (failed) return -1;
  }
  return 0;
}

static int follow_resizes(Kernel* kernel, PyObject* args, PyObject* kwargs, PyObject* in_args, PyObject* in_kwargs) {
  for (int i = 0; i < kernel->num_written; i++) {
    PyObject* outer = argument(&kernel->written[i], args, kwargs);
    PyObject* inner = argument(&kernel->written[i], in_args, in_kwargs);
    if (!outer || !inner) {
      if (PyErr_Occurred()) return -1;
      continue;
    }
    if (outer != inner && follow_resize(outer, inner)) return -1;
  }
  return 0;
}

// ---- The call ------------------------------------------------------------------------------------------------------

// 1: a mode of this thread would apply to the inner call; -1: an exception.
static int is_guarded(void) {
  PyObject* checks = kernel_environment.is_guarded;
  for (Py_ssize_t i = 0; i < PyTuple_Size(checks); i++) {
    PyObject* answer = PyObject_CallNoArgs(PyTuple_GetItem(checks, i));
    if (!answer) return -1;
    int is_true = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    if (is_true) return is_true;
  }
  return 0;
}

static PyObject* call_inner(PyObject* inner, PyObject* args, PyObject* kwargs) {
  int guarded = is_guarded();
  if (guarded < 0) return NULL;
  if (!guarded) return PyObject_Call(inner, args, kwargs);
  return PyObject_CallFunctionObjArgs(kernel_environment.guarded, inner, args, kwargs ? kwargs : Py_None, NULL);
}

// Has an operator that failed try again with outputs that can be resized. Raises its own error if that was not the cause.
static PyObject* call_resizing(Kernel* kernel, PyObject* args, PyObject* kwargs) {
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  PyObject* result = PyObject_CallFunctionObjArgs(kernel_environment.resize, (PyObject*)kernel, args,
                                                  kwargs ? kwargs : Py_None, error ? error : Py_None, NULL);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(traceback);
  return result;
}

static PyObject* refuse(Kernel* kernel, PyObject* args, PyObject* kwargs) {
  PyObject* result =
      PyObject_CallFunctionObjArgs(kernel_environment.refuse, (PyObject*)kernel, args, kwargs ? kwargs : Py_None, NULL);
  Py_XDECREF(result);
  if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%U: operands on several devices", kernel->name);
  return NULL;
}

// Whether a tensor, or one of a list, was not unwrapped.
static int is_elsewhere(PyObject* outer, PyObject* inner) {
  if (is_tensor(outer)) return outer == inner;
  if (!PyList_Check(inner) || outer == inner) return 0;
  for (Py_ssize_t i = 0; i < PyList_Size(inner); i++) {
    PyObject* one = PyList_Check(outer) ? PyList_GetItem(outer, i) : PyTuple_GetItem(outer, i);
    if (one && is_elsewhere(one, PyList_GetItem(inner, i))) return 1;
  }
  return 0;
}

// Whether an output, be it a scalar, is on another device: then it was not unwrapped.
static int writes_elsewhere(Kernel* kernel, PyObject* args, PyObject* kwargs, PyObject* in_args, PyObject* in_kwargs) {
  for (int i = 0; i < kernel->num_written; i++) {
    PyObject* outer = argument(&kernel->written[i], args, kwargs);
    PyObject* inner = outer ? argument(&kernel->written[i], in_args, in_kwargs) : NULL;
    if (inner && is_elsewhere(outer, inner)) return 1;
  }
  return 0;
}

// Whether the operands' devices fit the operator.
static int takes_operands(Kernel* kernel, PyObject* args, PyObject* kwargs, PyObject* in_args, PyObject* in_kwargs,
                          const Conversion* state) {
  if (state->this_device) return 1;  // it copies from wherever they are
  if (writes_elsewhere(kernel, args, kwargs, in_args, in_kwargs)) return 0;
  if (!state->foreign) return 1;
  if (!(kernel->flags & kAnyDevice)) return 0;
  PyObject* first = PyTuple_GetItem(args, 0);
  return first && first != PyTuple_GetItem(in_args, 0);
}

// The bytes that a tensor's elements are among; none of one that cannot be described.
typedef struct {
  const char *begin, *end;
} Span;

static Span span_of(PyObject* tensor) {
  const Span nothing = {NULL, NULL};
  DLTensor t;
  if (relabel_describe(tensor, &t)) {
    PyErr_Clear();
    return nothing;
  }
  int64_t last = 0;
  for (int i = 0; i < t.ndim; i++) {
    if (t.shape[i] == 0) return nothing;
    last += (t.shape[i] - 1) * t.strides[i];
  }
  const char* begin = (const char*)t.data + t.byte_offset;
  return (Span){begin, begin + (last + 1) * (t.dtype.bits / 8 * t.dtype.lanes)};
}

static int meets(const Span* span, PyObject* written, PyObject* value) {
  if (value == written) return 0;
  if (is_tensor(value)) {
    Span other = span_of(value);
    return other.begin < span->end && span->begin < other.end;
  }
  if (!PyList_Check(value)) return 0;
  for (Py_ssize_t i = 0; i < PyList_Size(value); i++)
    if (meets(span, written, PyList_GetItem(value, i))) return 1;
  return 0;
}

// Whether an argument that is written has memory in common with another: PyTorch refuses some of that, or allows for it,
// and knows it by the storage, of which each unwrapped tensor has its own.
static int overlaps(Kernel* kernel, PyObject* in_args, PyObject* in_kwargs) {
  for (int i = 0; i < kernel->num_written; i++) {
    PyObject* written = argument(&kernel->written[i], in_args, in_kwargs);
    if (!written || !is_tensor(written)) continue;
    Span span = span_of(written);
    for (Py_ssize_t j = 0; j < PyTuple_Size(in_args); j++)
      if (meets(&span, written, PyTuple_GetItem(in_args, j))) return 1;
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (in_kwargs && PyDict_Next(in_kwargs, &at, &name, &value))
      if (meets(&span, written, value)) return 1;
  }
  return PyErr_Occurred() ? -1 : 0;
}

// Replaces the unwrapped arguments by ones that share their storages as the arguments do.
static int share(PyObject* args, PyObject* kwargs, PyObject** in_args, PyObject** in_kwargs) {
  PyObject* shared = PyObject_CallFunctionObjArgs(kernel_environment.share, args, kwargs ? kwargs : Py_None, *in_args,
                                                  *in_kwargs ? *in_kwargs : Py_None, NULL);
  if (!shared) return -1;
  for (int i = 0; i < 2; i++) {
    PyObject** place = i ? in_kwargs : in_args;
    if (!*place) continue;
    PyObject* before = *place;
    *place = PyTuple_GetItem(shared, i);
    Py_INCREF(*place);
    Py_DECREF(before);
  }
  Py_DECREF(shared);
  return 0;
}

static PyObject* run(Kernel* kernel, PyObject* args, PyObject* kwargs, PyObject* in_args, PyObject** in_kwargs,
                     const Conversion* state) {
  if (!takes_operands(kernel, args, kwargs, in_args, *in_kwargs, state)) return refuse(kernel, args, kwargs);
  if (state->pinned && !state->other_device) {  // in the words of PyTorch's own accelerators
    PyErr_SetString(PyExc_RuntimeError, "Only dense CPU tensors can be pinned");
    return NULL;
  }
  // What is drawn on another device comes from a generator of that one.
  if (kernel->flags & kRandom && !state->other_device && add_generator(kernel, in_args, in_kwargs)) return NULL;
  PyObject* inner = state->has_number && kernel->inner_number ? kernel->inner_number : kernel->inner;
  PyObject* value = call_inner(inner, in_args, *in_kwargs);
  if (!value) return kernel->flags & kResizes ? call_resizing(kernel, args, kwargs) : NULL;
  if (state->other_device) return value;
  PyObject* result = NULL;
  if (!(kernel->flags & kResizes) || !follow_resizes(kernel, args, kwargs, in_args, *in_kwargs))
    result = wrap_results(kernel, value, args, kwargs);
  Py_DECREF(value);
  return result;
}

static PyObject* kernel_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  Kernel* kernel = (Kernel*)self;
  Conversion state = {.kernel = kernel};
  if (kwargs && PyDict_Size(kwargs) == 0) kwargs = NULL;
  PyObject* in_args = convert_arguments(&state, args);
  if (!in_args) return NULL;
  PyObject* in_kwargs = NULL;
  PyObject* result = NULL;
  int ready = !kwargs || (in_kwargs = convert_keywords(&state, kwargs));
  int overlap = ready && kernel->num_written ? overlaps(kernel, in_args, in_kwargs) : 0;
  if (overlap > 0) overlap = share(args, kwargs, &in_args, &in_kwargs);
  if (ready && !overlap) result = run(kernel, args, kwargs, in_args, &in_kwargs, &state);
  Py_DECREF(in_args);
  Py_XDECREF(in_kwargs);
  return result;
}

// ---- The type ------------------------------------------------------------------------------------------------------

static int read_written(Kernel* kernel, PyObject* written) {
  Py_ssize_t size = PyTuple_Size(written);
  if (size < 0 || size > kMaxWritten) {
    PyErr_SetString(PyExc_ValueError, "too many written arguments");
    return -1;
  }
  for (Py_ssize_t i = 0; i < size; i++) {
    Argument* entry = &kernel->written[i];
    if (!PyArg_ParseTuple(PyTuple_GetItem(written, i), "iU", &entry->position, &entry->name)) return -1;
    Py_INCREF(entry->name);
    kernel->num_written++;
  }
  return 0;
}

static int read_returns(Kernel* kernel, PyObject* returns) {
  Py_ssize_t size = PyTuple_Size(returns);
  if (size < 0 || size > kMaxReturns) {
    PyErr_SetString(PyExc_ValueError, "too many results");
    return -1;
  }
  for (Py_ssize_t i = 0; i < size; i++) {
    long plan = PyLong_AsLong(PyTuple_GetItem(returns, i));
    if (plan == -1 && PyErr_Occurred()) return -1;
    if (plan < kAsIs || plan >= kernel->num_written) {
      PyErr_SetString(PyExc_ValueError, "a result is no written argument");
      return -1;
    }
    kernel->returns[i] = (int8_t)plan;
  }
  kernel->num_returns = (int)size;
  return 0;
}

static int kernel_init(PyObject* self, PyObject* args, PyObject* kwargs) {
  static char* names[] = {"name",    "inner", "inner_number", "tensor_positions", "generator", "flags", "written",
                          "returns", NULL};
  Kernel* kernel = (Kernel*)self;
  PyObject *name, *inner, *number, *written, *returns, *generator_name;
  unsigned long long tensor_positions;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UOOK(iU)iO!O!", names, &name, &inner, &number, &tensor_positions,
                                   &kernel->generator_position, &generator_name, &kernel->flags, &PyTuple_Type,
                                   &written, &PyTuple_Type, &returns))
    return -1;
  kernel->tensor_positions = tensor_positions;
  Py_INCREF(name);
  kernel->name = name;
  Py_INCREF(inner);
  kernel->inner = inner;
  Py_INCREF(generator_name);
  kernel->generator_name = generator_name;
  if (number != Py_None) {
    Py_INCREF(number);
    kernel->inner_number = number;
  }
  return read_written(kernel, written) || read_returns(kernel, returns) ? -1 : 0;
}

static void kernel_dealloc(PyObject* self) {
  Kernel* kernel = (Kernel*)self;
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(kernel->name);
  Py_XDECREF(kernel->inner);
  Py_XDECREF(kernel->inner_number);
  Py_XDECREF(kernel->generator_name);
  for (int i = 0; i < kernel->num_written; i++) Py_XDECREF(kernel->written[i].name);
  freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
  release(self);
  Py_DECREF(type);
}

static PyObject* kernel_repr(PyObject* self) { return PyUnicode_FromFormat("Kernel(%R)", ((Kernel*)self)->name); }

static PyMemberDef kernel_members[] = {
    {"name", T_OBJECT, offsetof(Kernel, name), READONLY, "The operator's overload, as aten::add.Tensor."},
    {"inner", T_OBJECT, offsetof(Kernel, inner), READONLY, "What computes: the operator itself."},
    {"flags", T_INT, offsetof(Kernel, flags), READONLY, "KernelFlag."},
    {NULL, 0, 0, 0, NULL}};

PyObject* kernel_type(void) {
  static PyType_Slot slots[] = {{Py_tp_doc, "An operator on the device flagos."},
                                {Py_tp_init, kernel_init},
                                {Py_tp_dealloc, kernel_dealloc},
                                {Py_tp_call, kernel_call},
                                {Py_tp_repr, kernel_repr},
                                {Py_tp_members, kernel_members},
                                {Py_tp_new, PyType_GenericNew},
                                {0, NULL}};
  static PyType_Spec spec = {"flagos_backend.frontends.torch.device._native.Kernel", sizeof(Kernel), 0,
                             Py_TPFLAGS_DEFAULT, slots};
  return PyType_FromSpec(&spec);
}
