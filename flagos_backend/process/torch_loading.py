"""torch, loaded by its first use: what is compiled to native code only does without it, and importing it takes longer
than all else of a short program. Modules outside torch/ take it from here, at any stage.

What torch would choose while the backend computes is chosen before. OpenMP threads spin at their barriers by default:
on a machine with other work each small parallel loop then waits for a time slice of every thread, which has cost 100 to
1000 times the loop itself. The policy is read once, when the OpenMP library is loaded with torch; a program that
imported torch before, or set a policy of its own, keeps what it has.

Functions of floats are those of MKL's vector library where torch has it, and MKL looks for the processor's code in the
first call. Threads that make that call at the same time, devices of the host or torch's own, may get code that is right
to 12 bits only (github.com/pytorch/pytorch/issues/188792): one thread makes it here.
"""

from __future__ import annotations

# Imported by torch, and only while Python does not end yet: torch itself may be needed first in an exit handler.
import concurrent.futures.thread  # noqa: F401
import os
import sys
import threading
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flagos_backend.process import interrupts
from plugin_abi import ending

__all__ = ["Tensor", "load", "loaded", "torch"]

_POLICY = "OMP_WAIT_POLICY"
# Those of ATen/cpu/vml.h, each for both types that it has.
_OF_MKL = (
    *("acos", "asin", "atan", "ceil", "cos", "erf", "erfc", "exp", "floor"),
    *("log", "log10", "log1p", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)
_lock = threading.RLock()
_loaded: ModuleType | None = None


def load() -> ModuleType:
    """The module torch, ready for the backend. Every module of the package has it in the placeholder's stead from then
    on, as with the lazy imports of PEP 810: a use costs no more than of a plain import."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                found = _import()
                _call_vector_functions(found)
                _replace_placeholders(found)
                _loaded = found
    return _loaded


def loaded() -> ModuleType | None:
    """The module torch if anybody has loaded it, ready for the backend."""
    return load() if "torch" in sys.modules else None


def _replace_placeholders(found: ModuleType) -> None:
    placeholders = {"torch": (torch, found), "Tensor": (Tensor, found.Tensor)}  # this module's own are replaced too
    for name, module in list(sys.modules.items()):
        if name.startswith("flagos_backend."):
            for attribute, (placeholder, value) in placeholders.items():
                if vars(module).get(attribute) is placeholder:
                    setattr(module, attribute, value)


def _import() -> ModuleType:
    chosen = "torch" not in sys.modules and _POLICY not in os.environ
    ending.register(_finalize)
    if chosen:
        os.environ[_POLICY] = "passive"
    try:
        # Half of it imported, it could not be imported again. In a thread it would wait for modules that wait for it.
        with interrupts.deferred():
            import torch
    finally:
        if chosen:
            del os.environ[_POLICY]
    return torch


def _finalize() -> None:
    """Runs torch's finalizers where it was loaded by an exit handler, after which atexit does not: it would have Python
    run them when their modules are gone."""
    if not weakref.finalize._shutdown:  # type: ignore[attr-defined]
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]


def _call_vector_functions(torch: Any) -> None:
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in _OF_MKL:
            getattr(torch, name)(one)


class _TensorType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, load().Tensor)


class _Tensor(metaclass=_TensorType):
    """Stands in types for the class until torch is there."""


class _Placeholder(ModuleType):
    """Loads torch when anything but the class of tensors is asked for."""

    Tensor = _Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(load(), name)


if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = _Placeholder("torch")
    Tensor = _Tensor
