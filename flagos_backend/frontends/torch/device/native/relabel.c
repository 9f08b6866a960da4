#include "relabel.h"

#include <stdlib.h>

// DLPackExchangeAPI, its version 1.x.
typedef struct {
  uint32_t major, minor;
  void* previous;
  int (*allocate)(DLTensor*, DLManagedTensor**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void* object, DLManagedTensor** out);
  int (*managed_to_object)(DLManagedTensor* tensor, void** out);
  int (*describe)(void* object, DLTensor* out);
  int (*current_stream)(int32_t, int32_t, void**);
} ExchangeApi;

static const ExchangeApi* api;
static DLDevice inner_device = {1, 0};
static PyObject* out_of_memory_error;
static PyObject* refusal;
MemoryCounters relabel_counters = {.limit = -1};

int relabel_open(PyObject* tensor_type, PyObject* out_of_memory) {
  PyObject* capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
  if (!capsule) return -1;
  api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  Py_DECREF(capsule);  // its memory is static
  if (!api) return -1;
  if (api->major != 1) {
    PyErr_Format(PyExc_ImportError, "PyTorch exchanges tensors by DLPack %u.%u; this build knows 1.x", api->major,
                 api->minor);
    return -1;
  }
  Py_INCREF(out_of_memory);
  out_of_memory_error = out_of_memory;
  return 0;
}

void relabel_set_inner(DLDevice inner) { inner_device = inner; }

// ---- Counting ------------------------------------------------------------------------------------------------------

// Stands before the deleter of memory that counts.
typedef struct {
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
  int64_t bytes;
} Counted;

static void free_counted(DLManagedTensor* managed) {
  Counted* counted = managed->manager_ctx;
  __atomic_fetch_sub(&relabel_counters.allocated, counted->bytes, __ATOMIC_RELAXED);
  __atomic_fetch_add(&relabel_counters.frees, 1, __ATOMIC_RELAXED);
  managed->manager_ctx = counted->manager_ctx;
  managed->deleter = counted->deleter;
  free(counted);
  if (managed->deleter) managed->deleter(managed);
}

static int64_t bytes_of(const DLTensor* tensor) {
  int64_t last = 0;
  for (int32_t i = 0; i < tensor->ndim; i++) {
    if (tensor->shape[i] == 0) return 0;
    last += (tensor->shape[i] - 1) * tensor->strides[i];
  }
  return (last + 1) * (((int64_t)tensor->dtype.bits * tensor->dtype.lanes + 7) / 8);
}

static int refuse_memory(int64_t bytes, int64_t limit) {
  PyErr_Format(out_of_memory_error,
               "flagos out of memory. Tried to allocate %lld bytes; tensors hold %lld of the %lld that "
               "torch.flagos.set_per_process_memory_fraction allows.",
               (long long)bytes, (long long)relabel_counters.allocated, (long long)limit);
  return -1;
}

static int count(DLManagedTensor* managed) {
  int64_t limit = __atomic_load_n(&relabel_counters.limit, __ATOMIC_RELAXED);
  int64_t wanted = bytes_of(&managed->tensor);
  if (limit >= 0 && relabel_counters.allocated + wanted > limit) return refuse_memory(wanted, limit);
  Counted* counted = malloc(sizeof *counted);
  if (!counted) {
    PyErr_NoMemory();
    return -1;
  }
  counted->manager_ctx = managed->manager_ctx;
  counted->deleter = managed->deleter;
  counted->bytes = wanted;
  managed->manager_ctx = counted;
  managed->deleter = free_counted;
  MemoryCounters* all = &relabel_counters;
  int64_t now = __atomic_add_fetch(&all->allocated, counted->bytes, __ATOMIC_RELAXED);
  int64_t peak = __atomic_load_n(&all->peak_allocated, __ATOMIC_RELAXED);
  while (now > peak &&
         !__atomic_compare_exchange_n(&all->peak_allocated, &peak, now, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  __atomic_fetch_add(&all->allocations, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&all->total_allocated, counted->bytes, __ATOMIC_RELAXED);
  return 0;
}

// ---- Relabelling ---------------------------------------------------------------------------------------------------

static void discard(DLManagedTensor* managed) {
  if (managed->deleter) managed->deleter(managed);
}

// PyTorch exports stride 1 for dimensions of size 0 and 1, whatever the tensor's own are.
static int keep_strides(PyObject* tensor, DLManagedTensor* managed) {
  DLTensor own;
  for (int32_t i = 0; i < managed->tensor.ndim; i++) {
    if (managed->tensor.shape[i] < 2) {
      if (api->describe(tensor, &own)) return -1;
      for (int32_t k = i; k < own.ndim; k++) managed->tensor.strides[k] = own.strides[k];
      return 0;
    }
  }
  return 0;
}

static PyObject* relabel(PyObject* tensor, DLManagedTensor* managed, DLDevice device) {
  if (keep_strides(tensor, managed)) {
    discard(managed);
    return NULL;
  }
  void* result = NULL;
  managed->tensor.device = device;
  return api->managed_to_object(managed, &result) ? NULL : result;
}

int relabel_is_open(void) { return api != NULL; }

void relabel_refuse(PyObject* message) {
  Py_INCREF(message);
  refusal = message;
}

static int require_open(void) {
  if (refusal) PyErr_SetObject(PyExc_RuntimeError, refusal);
  if (!api) PyErr_SetString(PyExc_RuntimeError, "the device flagos is not open; torch.flagos.init() opens it");
  return api && !refusal;
}

PyObject* relabel_wrap(PyObject* inner, int counted) {
  if (!require_open()) return NULL;
  DLManagedTensor* managed;
  if (api->managed_from_object(inner, &managed)) return NULL;
  if (managed->tensor.device.type != inner_device.type) {
    discard(managed);
    PyErr_Format(PyExc_RuntimeError, "flagos has no memory on the device of %R", inner);
    return NULL;
  }
  if (counted && count(managed)) {
    discard(managed);
    return NULL;
  }
  return relabel(inner, managed, (DLDevice){kDLExtDev, managed->tensor.device.id});
}

PyObject* relabel_unwrap(PyObject* tensor, int32_t* foreign_ndim) {
  if (!require_open()) return NULL;
  DLManagedTensor* managed;
  if (api->managed_from_object(tensor, &managed)) return NULL;
  if (managed->tensor.device.type != kDLExtDev) {
    *foreign_ndim = managed->tensor.ndim;
    discard(managed);
    Py_INCREF(tensor);
    return tensor;
  }
  *foreign_ndim = -1;
  return relabel(tensor, managed, inner_device);
}

int relabel_describe(PyObject* tensor, DLTensor* out) { return api->describe(tensor, out); }
