"""A compiled program that takes and returns tensors without copying them: the launch path of torch.compile.

Calls the function table directly, with structs that are made once: what a launch costs is what a small graph costs.
"""

from __future__ import annotations

import builtins
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from flagos_backend.torch.compile.callbacks import Callback, failures, host_callback
from flagos_backend.torch.compile.dtypes import ELEMENT_TYPE
from flagos_backend.torch.compile.errors import BackendUnavailable
from flagos_backend.torch.compile.program import BuiltProgram, TensorSpec
from plugin_abi import loader
from plugin_abi.errors import FlagosStatusError
from plugin_abi.host import Context, Executable

_lock = threading.Lock()


@functools.cache
def _open_context() -> Context:
    backend = loader.load().accepted
    if backend is None:
        raise BackendUnavailable(reason=loader.no_such_device_message())
    return Context(backend, host_callback=host_callback)


def context() -> Context:
    """The one context of this process. Raises BackendUnavailable with the loader's reason."""
    with _lock:
        return _open_context()


class _Frame:
    """The structs of one launch at a time. Remembers the buffer of each input as long as its address stays."""

    def __init__(self, launcher: Launcher) -> None:
        api, ffi = launcher.api, launcher.api.ffi
        memory = launcher.memory
        self.views, self.kept = [], []
        for spec in launcher.inputs:
            dims = api.int64s(spec.layout.physical)
            view = api.new("FlagosBufferViewArgs", context=memory.context.pointer, memory=memory.pointer, dims=dims)
            view.rank, view.element_type = len(spec.layout.sizes), int(ELEMENT_TYPE[spec.dtype])
            self.views.append(view)
            self.kept.append(dims)
        self.addresses = [-1] * len(self.views)
        self.inputs: Any = ffi.new("FlagosBuffer*[]", max(len(self.views), 1))
        self.outputs: Any = ffi.new("FlagosBuffer*[]", max(len(launcher.results), 1))
        self.done: Any = ffi.new("FlagosEvent*[]", 1)
        rows: list[Any] = [ffi.new("FlagosBuffer**[]", [row]) for row in (self.inputs, self.outputs)]
        self.kept.extend(rows)
        self.args = api.new("FlagosExecuteArgs", executable=launcher.executable.pointer, num_devices=1)
        self.args.num_arguments = len(self.views)
        self.args.arguments, self.args.outputs = rows
        self.args.done = self.done if not launcher.results else ffi.NULL
        self.pointer = api.new("FlagosBufferPointerArgs")
        weakref.finalize(self, _destroy_buffers, api.function("buffer_destroy"), self.inputs, len(self.views))


def _destroy_buffers(destroy: Any, buffers: Any, count: int) -> None:
    for index in range(count):
        if buffers[index]:
            destroy(buffers[index])


class Launcher:
    """Runs one program. May be called from several threads at once."""

    def __init__(self, program: BuiltProgram) -> None:
        assert program.serialized is not None
        opened = context()
        self.api = opened.api
        self.memory = opened.addressable_devices[0].default_memory
        self.executable = Executable.compile(opened, program.serialized)
        self.inputs = [spec for _, spec in program.inputs]
        self.results = program.results
        self._callbacks: tuple[Callback, ...] = program.callbacks
        self._strides = [spec.layout.strides for spec in self.inputs]
        self._frames: list[_Frame] = []
        self._null = self.api.ffi.NULL
        self._view, self._execute = self.api.function("buffer_view"), self.api.function("execute")
        self._pointer, self._destroy = self.api.function("buffer_pointer"), self.api.function("buffer_destroy")
        self._make = [_maker(spec) for spec in self.results]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of the sizes and dtypes of the program's inputs to its outputs. Waits for them."""
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self)
        copies = self._place(frame, tensors)
        error = self._execute(frame.args)
        if error != self._null:
            raise self._failure(error)
        outputs = self._take(frame)
        self._frames.append(frame)
        copies.clear()
        return outputs

    def _place(self, frame: _Frame, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Points the frame's inputs at the tensors; returns the copies that had to be made."""
        addresses, copies = frame.addresses, []
        for index, tensor in enumerate(tensors):
            if tensor.stride() != self._strides[index] or tensor.is_neg() or tensor.is_conj():
                tensor = _laid_out(tensor, self.inputs[index])
                copies.append(tensor)
            address = tensor.data_ptr()
            if address == addresses[index]:
                continue
            view = frame.views[index]
            view.data = self.api.ffi.cast("void*", address)
            error = self._view(view)
            if error != self._null:
                raise self._failure(error)
            if frame.inputs[index]:
                self._destroy(frame.inputs[index])
            frame.inputs[index] = view.buffer
            addresses[index] = address
        return copies

    def _take(self, frame: _Frame) -> list[torch.Tensor]:
        """The outputs as tensors that own their buffers. Waits for the program's end."""
        ffi, args, destroy = self.api.ffi, frame.pointer, self._destroy
        if not self.results:
            return self._await(frame)
        buffers = [frame.outputs[index] for index in range(len(self.results))]
        outputs = []
        for index, buffer in enumerate(buffers):
            args.buffer = buffer
            error = self._pointer(args)
            if error != self._null:
                for rest in buffers[index:]:
                    destroy(rest)
                raise self._failure(error)
            owner = ffi.gc(ffi.cast("char*", args.pointer), functools.partial(_release, destroy, buffer))
            outputs.append(self._make[index](ffi, owner))
        return outputs

    def _await(self, frame: _Frame) -> list[torch.Tensor]:
        event = frame.done[0]
        try:
            self.api.call("event_await", self.api.new("FlagosEventAwaitArgs", event=event, timeout_ns=-1))
        except FlagosStatusError as error:
            raise self._raised(error) from None
        finally:
            self.api.function("event_destroy")(event)
        return []

    def _failure(self, error: Any) -> BaseException:
        return self._raised(self.api.take_error(error))

    def _raised(self, status: FlagosStatusError) -> BaseException:
        """What the launch raises: the exception of PyTorch or of the user's own code where there was one."""
        own = failures.take([callback.identifier for callback in self._callbacks])
        if own is not None:
            return own
        name = status.payloads.get("flagos.exception", b"").decode()
        kind = getattr(builtins, name, None) or getattr(torch._C, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(status.payloads["flagos.message"].decode())
        return RuntimeError(str(status))


def _release(destroy: Any, buffer: Any, _address: Any) -> None:
    destroy(buffer)


def _laid_out(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The same values in the memory layout that the program takes."""
    return torch.empty_strided(spec.layout.sizes, spec.layout.strides, dtype=spec.dtype).copy_(tensor)


def _maker(spec: TensorSpec) -> Any:
    """What makes an output's tensor over the memory that ``owner`` holds."""
    sizes, strides, dtype = spec.layout.sizes, spec.layout.strides, spec.dtype
    count = 1
    for size in sizes:
        count *= size
    bytes_ = count * dtype.itemsize
    if not bytes_:
        return lambda ffi, owner: torch.empty_strided(sizes, strides, dtype=dtype)

    def make(ffi: Any, owner: Any) -> torch.Tensor:
        flat = torch.frombuffer(ffi.buffer(owner, bytes_), dtype=dtype)
        # Not as_strided: to autograd this is a tensor of its own, and not a view of another.
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, sizes, strides)

    return make
