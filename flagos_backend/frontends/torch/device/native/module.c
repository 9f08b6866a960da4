// The extension module flagos_backend.frontends.torch.device._native: relabelling, kernels and the guard, in CPython's stable ABI.
#include "guard.h"
#include "kernel.h"

static PyObject* wrap(PyObject* module, PyObject* args) {
  (void)module;
  PyObject* inner;
  int counted = 1;
  return PyArg_ParseTuple(args, "O|p", &inner, &counted) ? relabel_wrap(inner, counted) : NULL;
}

static PyObject* unwrap(PyObject* module, PyObject* tensor) {
  (void)module;
  int32_t foreign_ndim;
  return relabel_unwrap(tensor, &foreign_ndim);
}

static PyObject* is_open(PyObject* module, PyObject* unused) {
  (void)module;
  (void)unused;
  return PyBool_FromLong(relabel_is_open());
}

static PyObject* open_exchange(PyObject* module, PyObject* args) {
  (void)module;
  PyObject* tensor_type;
  int type, id;
  PyObject* out_of_memory;
  if (!PyArg_ParseTuple(args, "OO(ii)", &tensor_type, &out_of_memory, &type, &id)) return NULL;
  if (relabel_open(tensor_type, out_of_memory)) return NULL;
  relabel_set_inner((DLDevice){type, id});
  Py_INCREF(tensor_type);
  kernel_environment.tensor_type = tensor_type;
  Py_RETURN_NONE;
}

static PyObject* refuse(PyObject* module, PyObject* message) {
  (void)module;
  relabel_refuse(message);
  Py_RETURN_NONE;
}

// Each field of the environment is a keyword.
static PyObject* configure(PyObject* module, PyObject* args, PyObject* kwargs) {
  (void)module;
  KernelEnvironment* env = &kernel_environment;
  const struct {
    const char* name;
    PyObject** field;
  } fields[] = {
      {"device_type", &env->device_type},
      {"devices", &env->devices},
      {"inner_device", &env->inner_device},
      {"is_conj", &env->is_conj},
      {"is_neg", &env->is_neg},
      {"conjugate", &env->conjugate},
      {"negate", &env->negate},
      {"resolve", &env->resolve},
      {"generator", &env->generator},
      {"is_guarded", &env->is_guarded},
      {"guarded", &env->guarded},
      {"refuse", &env->refuse},
      {"refuse_device", &env->refuse_device},
      {"check_generator", &env->check_generator},
      {"adopt", &env->adopt},
      {"share", &env->share},
      {"resize", &env->resize},
  };
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    PyObject* value = kwargs ? PyDict_GetItemString(kwargs, fields[i].name) : NULL;
    if (!value || PyTuple_Size(args)) {
      PyErr_Format(PyExc_TypeError, "configure() takes keywords only, and among them %s", fields[i].name);
      return NULL;
    }
    Py_INCREF(value);
    Py_XDECREF(*fields[i].field);
    *fields[i].field = value;
  }
  Py_RETURN_NONE;
}

static PyObject* install_guard(PyObject* module, PyObject* unused) {
  (void)module;
  (void)unused;
  if (guard_install()) return NULL;
  Py_RETURN_NONE;
}

static PyObject* memory_counters(PyObject* module, PyObject* unused) {
  (void)module;
  (void)unused;
  const MemoryCounters* all = &relabel_counters;
  return Py_BuildValue("(LLLLL)", (long long)__atomic_load_n(&all->allocated, __ATOMIC_RELAXED),
                       (long long)__atomic_load_n(&all->peak_allocated, __ATOMIC_RELAXED),
                       (long long)__atomic_load_n(&all->allocations, __ATOMIC_RELAXED),
                       (long long)__atomic_load_n(&all->frees, __ATOMIC_RELAXED),
                       (long long)__atomic_load_n(&all->total_allocated, __ATOMIC_RELAXED));
}

static PyObject* reset_peak(PyObject* module, PyObject* unused) {
  (void)module;
  (void)unused;
  int64_t now = __atomic_load_n(&relabel_counters.allocated, __ATOMIC_RELAXED);
  __atomic_store_n(&relabel_counters.peak_allocated, now, __ATOMIC_RELAXED);
  Py_RETURN_NONE;
}

static PyObject* set_limit(PyObject* module, PyObject* bytes) {
  (void)module;
  long long limit = PyLong_AsLongLong(bytes);
  if (limit == -1 && PyErr_Occurred()) return NULL;
  __atomic_store_n(&relabel_counters.limit, limit, __ATOMIC_RELAXED);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"open", open_exchange, METH_VARARGS,
     "open(Tensor, OutOfMemoryError, (DLPack type, id) of the inner device): before all else."},
    {"is_open", is_open, METH_NOARGS, "Whether open was called."},
    {"refuse", refuse, METH_O, "refuse(message): raises RuntimeError(message) for every tensor from here on."},
    {"configure", (PyCFunction)(void (*)(void))configure, METH_VARARGS | METH_KEYWORDS, "Sets what kernels share."},
    {"install_guard", install_guard, METH_NOARGS, "Replaces PyTorch's guard of a device of Python, once registered."},
    {"wrap", wrap, METH_VARARGS, "wrap(inner, counted=True): a tensor on the device over the inner tensor's memory."},
    {"unwrap", unwrap, METH_O, "unwrap(tensor): the tensor that computes for it, over the same memory."},
    {"memory_counters", memory_counters, METH_NOARGS,
     "(bytes allocated, their peak, allocations, frees, bytes allocated in all)"},
    {"set_limit", set_limit, METH_O, "Bytes that may be allocated at once; -1: any number."},
    {"reset_peak", reset_peak, METH_NOARGS, "The peak becomes what is allocated now."},
    {NULL, NULL, 0, NULL}};

static int execute(PyObject* module) {
  PyObject* type = kernel_type();
  int failed = !type || PyModule_AddObjectRef(module, "Kernel", type);
  Py_XDECREF(type);
  return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "_native",
                                        "The device's relabelling, kernels and guard.",
                                        0,
                                        methods,
                                        slots,
                                        NULL,
                                        NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
