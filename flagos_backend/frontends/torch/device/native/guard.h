// The device's guard: what PyTorch asks for the current device and stream, also while a C++ exception passes through.
// PyTorch's own guard for devices of Python answers by calling Python, which it cannot do with an exception pending: a
// hook that raised in a backward pass ended the process.
#ifndef FLAGOS_TORCH_DEVICE_GUARD_H_
#define FLAGOS_TORCH_DEVICE_GUARD_H_

#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Puts the guard in the place of PyTorch's own, which must be registered. -1 with an exception where that is not the one
// that this build knows.
int guard_install(void);

#endif  // FLAGOS_TORCH_DEVICE_GUARD_H_
