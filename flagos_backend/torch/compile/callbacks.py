"""Calls back into PyTorch out of a running program: higher-order operators, custom operators, collectives.

The context's host callback; program.py registers a function for each such call and keeps it as long as the program.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import torch

from flagos_backend.ir.types import ElementType
from flagos_backend.torch.compile.drawing import drawing_as_outside
from flagos_backend.torch.compile.dtypes import TORCH_DTYPE
from plugin_abi.host import HostArray

# Takes tensors, returns tensors.
HostFunction = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

_numbers = itertools.count(1)
_functions: dict[int, HostFunction] = {}


class Callback:
    """A registered function; ``identifier`` names it in programs while this object lives."""

    def __init__(self, function: HostFunction) -> None:
        self.identifier = next(_numbers)
        _functions[self.identifier] = function

    def __del__(self) -> None:
        _functions.pop(self.identifier, None)


class Failures:
    """The exceptions that functions raised, by identifier and thread, until the launch that failed of them takes them.
    On the host that is one of the same thread; an accelerator's may have run in another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[tuple[int, int], BaseException] = {}

    def put(self, identifier: int, error: BaseException) -> None:
        with self._lock:
            self._errors[identifier, threading.get_ident()] = error

    def take(self, identifiers: Sequence[int]) -> BaseException | None:
        here = threading.get_ident()
        with self._lock:
            known = sorted(self._errors, key=lambda key: key[1] != here)
            found = next((key for key in known if key[0] in identifiers), None)
            return None if found is None else self._errors.pop(found)


failures = Failures()


def host_callback(identifier: int, arguments: Sequence[HostArray], results: Sequence[HostArray]) -> None:
    """The context's HostCallback."""
    try:
        # The program runs in inference mode; user code must not see that.
        with torch.inference_mode(False), torch.no_grad(), drawing_as_outside():
            outcome = _functions[identifier]([_tensor(array) for array in arguments])
            for array, value in zip(results, outcome, strict=True):
                target = _tensor(array)
                if target.shape != value.shape or target.dtype != value.dtype:
                    expected, given = (f"{t.dtype} {tuple(t.shape)}" for t in (target, value))
                    raise RuntimeError(f"the call returned {given} where {expected} was traced")
                target.copy_(value)
    except BaseException as error:
        failures.put(identifier, error)
        raise


def _tensor(array: HostArray) -> torch.Tensor:
    dtype = TORCH_DTYPE[ElementType(array.element_type)]
    if not array.data.nbytes:
        return torch.empty(array.dims, dtype=dtype)
    return torch.frombuffer(array.data, dtype=dtype).reshape(array.dims)
