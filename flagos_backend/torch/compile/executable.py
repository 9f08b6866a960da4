"""A compiled program that takes and returns tensors without copying them: the launch path of torch.compile.

What a launch costs is what a small graph costs, so the launch itself is native: see torch/native/launcher.cc.
"""

from __future__ import annotations

import builtins
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from flagos_backend.torch.compile import _launcher, placement
from flagos_backend.torch.compile.callbacks import Callback, failures, host_callback
from flagos_backend.torch.compile.dtypes import STORED_TYPE
from flagos_backend.torch.compile.errors import BackendUnavailable
from flagos_backend.torch.compile.layout import Strided
from flagos_backend.torch.compile.program import BuiltProgram, InputSpec, ResultSpec
from plugin_abi import loader
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Context, Executable

_lock = threading.Lock()


@functools.cache
def _open_context() -> Context:
    backend = loader.load().accepted
    if backend is None:
        raise BackendUnavailable(reason=loader.no_such_device_message())
    # Every launch is waited for, and PyTorch's own threads are those of the thread that calls.
    return Context(backend, {"inline_launches": 1}, host_callback=host_callback)


def context() -> Context:
    """The one context of this process. Raises BackendUnavailable with the loader's reason."""
    with _lock:
        return _open_context()


def launcher_of(program: BuiltProgram) -> Callable[[list[Any]], list[torch.Tensor]]:
    """Compiles the program; gives what runs it on the inputs of its graph and waits for its outputs. May be called from
    several threads at once; raises what the program's operators raise, and StridesDiffer before anything ran."""
    assert program.serialized is not None
    opened = context()
    executable = Executable.compile(opened, program.serialized)
    memory = opened.addressable_devices[0].default_memory
    table, ffi = opened.api.backend.api, opened.api.ffi

    def address(handle: Any) -> int:
        return int(ffi.cast("uintptr_t", handle))

    specs = tuple(spec for _, spec in program.inputs)
    launcher = _launcher.Launcher(
        (address(table), address(opened.pointer), address(memory.pointer), address(executable.pointer)),
        tuple((source, *_described_input(spec)) for source, spec in program.inputs),
        tuple((_prototype(spec), spec.layout.sizes, spec.layout.strides) for spec in program.results),
        placement.wrap,
        functools.partial(_laid_out, specs),
        functools.partial(_fail, executable, program.callbacks),
    )
    if not program.draws_on_flagos:
        return launcher.run

    def run(inputs: list[Any]) -> list[torch.Tensor]:
        with placement.drawing_on_flagos():
            return launcher.run(inputs)

    return run


class StridesDiffer(Exception):
    """An input has other strides than the program takes, and its values cannot be copied into memory of those."""


def _described_input(spec: InputSpec) -> tuple[torch.Tensor, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    layout = spec.layout
    return _prototype(spec), int(STORED_TYPE[spec.dtype]), layout.physical, layout.sizes, layout.strides


@functools.cache
def _prototype_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _prototype(spec: InputSpec | ResultSpec) -> torch.Tensor:
    return _prototype_of(spec.dtype, spec.device)


def _laid_out(specs: Sequence[InputSpec], number: int, tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the memory layout that the program takes. Raises StridesDiffer where that repeats elements."""
    spec = specs[number]
    traced = f"a {spec.dtype} tensor of sizes {list(spec.layout.sizes)} on {spec.device}"
    given = _described(tensor)
    if given != traced:
        raise RuntimeError(f"Expected input {number} of the compiled graph to be {traced}, but got {given}")
    layout = spec.layout
    if isinstance(layout, Strided) and layout.overlaps:
        raise StridesDiffer
    return torch.empty_strided(layout.sizes, layout.strides, dtype=spec.dtype, device=spec.device).copy_(tensor)


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a {value.dtype} tensor of sizes {list(value.shape)} on {value.device}"


def _fail(executable: Executable, callbacks: Sequence[Callback], error: int) -> NoReturn:
    """Raises what a launch raises: the exception of PyTorch or of the user's own code where there was one."""
    api = executable.api
    status = api.take_error(api.ffi.cast("FlagosError*", error))
    own = failures.take([callback.identifier for callback in callbacks])
    if own is not None:
        raise own
    raise _translated(status)


def _translated(status: FlagosStatusError) -> Exception:
    name = status.payloads.get("flagos.exception", b"").decode()
    kind = getattr(builtins, name, None) or getattr(torch._C, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(status.payloads["flagos.message"].decode())
    return RuntimeError(str(status))
