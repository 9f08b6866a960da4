"""Makes the device known to PyTorch: its name at once; its operators, and the backend behind it, when it is first used.

Until then a program that does not use the device finds PyTorch as it would be without it; see neutrality.py.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Final

import torch
from torch._C import _acc
from torch._ops import OpOverload
from torch.utils import backend_registration

from flagos_backend.frontends.torch.device import _native, api, autocast, moving, neutrality, patches, sharing, traced
from flagos_backend.frontends.torch.device.opening import (
    DEVICE_TYPE,
    is_accepted,
    is_open,
    is_registered,
    open_device,
    opens_by,
)
from flagos_backend.frontends.torch.distributed import registration as distributed
from flagos_backend.frontends.torch.tracing import leave_alone
from plugin_abi import ending

_lock = threading.RLock()
_libraries: list[torch.library.Library] = []


class _Hooks(_acc.PrivateUse1Hooks):
    def is_built(self) -> bool:
        return True

    def is_available(self) -> bool:
        return is_accepted()

    def has_primary_context(self, device_index: int) -> bool:
        return is_open()


class _Guard(_acc.DeviceGuard):
    """PyTorch's own; the native one, which native/guard.h tells of, is made from it and takes its place."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Dispatch:
    """The fallback for all operators: opens the device when the first of them is called."""

    def __init__(self) -> None:
        self.opened: Any = None

    def __call__(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        if self.opened is None:
            open_device()
            return op(*args, **kwargs)
        return self.opened(op, *args, **kwargs)


_dispatch: Final = _Dispatch()


def register(*, accepted: bool) -> None:
    """Has PyTorch know the device's name; a second call does nothing.

    ``accepted``: whether a backend is there for it.
    """
    with _lock:
        if is_registered():
            return
        _acc.register_python_privateuseone_device_guard(_Guard())
        _native.install_guard()  # first: where it fails, PyTorch stays as it was
        leave_alone()
        host_memory = neutrality.install(is_open)
        backend_registration.rename_privateuse1_backend(DEVICE_TYPE)
        backend_registration.generate_methods_for_privateuse1_backend()
        torch._register_device_module(DEVICE_TYPE, api)  # type: ignore[no-untyped-call]
        _acc.register_python_privateuseone_hook(_Hooks())
        opens_by(_open, accepted=accepted)
        _library("_").fallback(_dispatch, "PrivateUse1")
        autocast.expect(host_memory)  # until the backend says it: a program may ask before it uses the device
        patches.install()
        distributed.install(host_memory=host_memory)
        sharing.install()
        traced.install()


def _open() -> None:
    from flagos_backend.frontends.torch.device import kernels
    from flagos_backend.frontends.torch.device.runtime import runtime

    opened = runtime()
    kernels.configure(opened)
    aten = _library("aten")
    for name, kernel in kernels.registrations():
        aten.m.impl(name, "PrivateUse1", kernel)
    for name, function in kernels.of_the_host():
        aten.m.impl(name, "CPU", function)
    for name, key, function in (*kernels.above_autograd(), *kernels.of_other_layouts()):
        aten.m.impl(name, key, function)
    inductor = _library("inductor")
    for name, function in kernels.of_compiled_programs():
        inductor.m.impl(name, "PrivateUse1", function)
    everything = _library("_")
    for key, fallback in kernels.fallbacks():
        everything.fallback(fallback, key)
    everything.fallback(torch.library.fallthrough_kernel, autocast.KEY)
    for name, kernel in autocast.registrations():
        aten.m.impl(name, autocast.KEY, kernel)
    distributed.install_opened(_library)
    moving.install_opened()
    autocast.expect(opened.device.is_host_memory)
    sharing.install_opened(host_memory=opened.device.is_host_memory)
    _dispatch.opened = kernels.Fallback()
    ending.register(_await_autograd, os.getpid())


def _await_autograd(opener: int) -> None:
    """Has the device's autograd thread drop what it holds of Python while the interpreter still works.

    The thread drops its part of a backward pass after the program has gone on from it. Where that was the last
    reference to a Python object, such as a mode, and the interpreter was being finalized, CPython ended the thread and
    C++ the process. The thread takes up a pass when it is done with the one before. This one is empty.
    """
    if os.getpid() != opener:
        return  # the engine's threads are not those of a forked process, which PyTorch refuses to let have its own
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        leaf = torch.empty(0, device=DEVICE_TYPE, requires_grad=True)
        gradient = torch.empty(0, device=DEVICE_TYPE)
        # What Tensor.backward calls. Itself it would import what only traced programs need.
        torch.autograd.Variable._execution_engine.run_backward(
            (leaf,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def _library(namespace: str) -> Any:
    library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    _keep_at_exit(library)
    _libraries.append(library)
    return library


def _keep_at_exit(library: torch.library.Library) -> None:
    """Exit handlers still compute: PyTorch, which takes the kernels of a library away in one of them, must not."""
    registry = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer in list(registry):
        found = finalizer.peek()
        if found is not None and found[0] is library:
            finalizer.atexit = False
