// A tensor's memory under another device's name: the seam between the device flagos and the tensors that compute for it.
// It rests on DLPack and on PyTorch's exchange functions for it, which are C; nothing here knows PyTorch's classes.
#ifndef FLAGOS_TORCH_DEVICE_RELABEL_H_
#define FLAGOS_TORCH_DEVICE_RELABEL_H_

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

// DLPack 1.x, laid out as its specification freezes it.
typedef struct {
  int32_t type;
  int32_t id;
} DLDevice;

typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor DLManagedTensor;
struct DLManagedTensor {
  uint32_t major, minor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
  uint64_t flags;
  DLTensor tensor;
};

enum { kDLExtDev = 12 };

// Bytes of the device's memory. Read and written without the GIL.
typedef struct {
  int64_t allocated, peak_allocated;
  int64_t allocations, frees;
  int64_t total_allocated;  // since the process began
  int64_t limit;            // -1: none
} MemoryCounters;

extern MemoryCounters relabel_counters;

// Whether relabel_open has succeeded.
int relabel_is_open(void);

// Looks PyTorch's exchange functions up. -1 with an exception where it has none that fit. `out_of_memory` is raised where
// the limit is exceeded.
int relabel_open(PyObject* tensor_type, PyObject* out_of_memory);

// From here on RuntimeError(message) is raised wherever a tensor gets or loses the device's name.
void relabel_refuse(PyObject* message);

// What the device's memory is called by DLPack where it computes.
void relabel_set_inner(DLDevice inner);

// New reference to a tensor on the device, over the memory of `inner`, which counts as the device's if `counted`.
PyObject* relabel_wrap(PyObject* inner, int counted);

// New reference to the tensor that computes for `tensor`; to `tensor` itself, with *foreign_ndim set, where that is not
// on the device. *foreign_ndim is -1 otherwise.
PyObject* relabel_unwrap(PyObject* tensor, int32_t* foreign_ndim);

// The tensor's fields, borrowed. -1 with an exception for layouts that DLPack does not know.
int relabel_describe(PyObject* tensor, DLTensor* out);

#endif  // FLAGOS_TORCH_DEVICE_RELABEL_H_
