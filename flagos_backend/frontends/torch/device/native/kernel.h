// Kernel: one operator on the device. Called by PyTorch's dispatcher with the operator's arguments, it unwraps tensors,
// calls the operator on the tensors that compute for them, and wraps what is new. Built by kernels.py.
#ifndef FLAGOS_TORCH_DEVICE_KERNEL_H_
#define FLAGOS_TORCH_DEVICE_KERNEL_H_

#include "relabel.h"

// What every kernel shares; set once by kernel_configure. Borrowed for the life of the process.
typedef struct {
  PyObject* tensor_type;      // torch.Tensor
  PyObject* device_type;      // torch.device
  PyObject* devices;          // tuple of the torch.device that mean this device
  PyObject* inner_device;     // the torch.device that computes for it
  PyObject* is_conj;          // "is_conj"
  PyObject* is_neg;           // "is_neg"
  PyObject* conjugate;        // conjugate(inner): lazily
  PyObject* negate;           // negate(inner): lazily
  PyObject* resolve;          // resolve(inner): the same values without laziness
  PyObject* generator;        // what random operators draw from where no generator is given
  PyObject* is_guarded;       // tuple of callables: does a mode of the thread apply to tensors of the inner device?
  PyObject* guarded;          // call(inner, args, kwargs) that keeps those modes away
  PyObject* refuse;           // refuse(kernel, args, kwargs): raises for operands that are on several devices
  PyObject* refuse_device;    // refuse_device(kernel, device): raises for a device that is not there
  PyObject* check_generator;  // check_generator(generator): raises for a generator of another device
  PyObject* adopt;            // adopt(tensor, inner): gives a tensor the memory and the sizes of another
  PyObject* share;            // share(args, kwargs, inner_args, inner_kwargs): the inner ones, over one storage
  PyObject* resize;           // resize(kernel, args, kwargs, error): calls again with outputs that can be resized
} KernelEnvironment;

extern KernelEnvironment kernel_environment;

// The type Kernel. New reference.
PyObject* kernel_type(void);

#endif  // FLAGOS_TORCH_DEVICE_KERNEL_H_
