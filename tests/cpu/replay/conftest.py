"""Graphs that the native side patches and launches, over host memory: a simulated device whose driver is driver.c, and
whose graphs run their plans again, or kernel by kernel where data decides. Everything of a replay but the device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["FLAGOS_DEVICE"] = "simulated"
os.environ["FLAGOS_NUM_CPU_DEVICES"] = "2"
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
os.environ["JAX_PLATFORMS"] = "flagos,cpu"

import pytest
import torch

from cpu.replay.pools import Handle, Pools
from flagos_backend.codegen.triton import RegionKernel
from flagos_backend.devices.accelerator import StreamKind
from flagos_backend.devices.simulated import SimulatedAccelerator
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.runtime.accelerator import capture
from flagos_backend.runtime.accelerator import memory as memory_module
from flagos_backend.runtime.control_flow import Conditional, While
from flagos_backend.runtime.plan import Plan, Step
from support.backend import backend, context, memory
from support.poisoned_replays import PoisonedReplay
from support.tape import Kernel, Tape

__all__ = ["backend", "context", "driver", "memory"]

_ALIGNMENT = 512
# The device's streams: for computing, for copies to it, and from it.
_HANDLES = 1, 2, 3
# The driver's kinds of nodes.
_WAIT, _RECORD = 6, 7


def _build() -> ctypes.CDLL:
    """The driver, under the name that the backend asks for: who has loaded it is given it."""
    folder = Path(tempfile.mkdtemp(dir=os.environ["FLAGOS_TEST_SCRATCH"]))
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    source, library = Path(__file__).with_name("driver.c"), folder / "libcuda.so.1"
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class Driver:
    """``launches``: the plans launched, in order, but for those recorded kernel by kernel. ``refuse``: to patch graphs
    of the plan, or the kernel, of that number. ``stream``: the current one. ``captures_in``: the threads that capture.
    ``by_kernel``: record all plans so, with their temporaries in ``pools``. ``events``: kernels are captured between
    nodes of events, as collectives are."""

    def __init__(self) -> None:
        self._library = _build()
        self._library.driver_function.restype = self._library.driver_end.restype = ctypes.c_void_p
        self._library.driver_function.argtypes = [ctypes.c_int64, ctypes.c_size_t]
        self._library.driver_begin.argtypes = self._library.driver_end.argtypes = [ctypes.c_size_t]
        self._library.driver_kernel.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        self._calls: list[tuple[int, Callable[[list[int]], None]]] = []
        self._plans: dict[tuple[Plan, int, int], int] = {}
        self._kernels: dict[tuple[Plan, int, str], int] = {}
        self.launches: list[Plan] = []
        self.captures_in: set[int] = set()
        self.stream, self._streams = 1, max(_HANDLES)
        self._pooled = itertools.cycle(_HANDLES[1:])
        self.pools = Pools()
        self.by_kernel = self.events = False
        self._launched = 0
        signature = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
        self._callback = signature(self._launch)
        self._library.driver_set_launch(self._callback)

    def record(self, plan: Plan, run: Run, arrays: Sequence[Any]) -> int:
        """The handle of a graph that is ``plan`` on ``arrays``."""
        addresses = [array.data_ptr() for array in arrays if _has_memory(array)]
        key = plan, run.replica_id, run.partition_id
        if key not in self._plans:
            replay = PoisonedReplay(plan, replace(run, conditionals=None, communication=None))
            self._plans[key] = self._new_function(functools.partial(self._launch_plan, plan, replay), len(addresses))
        with self.captured() as graph:
            self._capture(self._plans[key], addresses)
        return graph[0]

    @contextlib.contextmanager
    def captured(self) -> Iterator[list[int]]:
        """The handle of a graph of what is captured meanwhile."""
        graph: list[int] = []
        self._library.driver_begin(self.stream)
        try:
            self.on_capture()
            yield graph
        finally:
            handle = self._library.driver_end(self.stream)
        assert handle, "what was captured does not follow one another"
        graph.append(int(handle))

    def capture_kernel(self, plan: Plan, number: int, kernel: Kernel) -> None:
        """Kernel ``number`` of a recording of ``plan``, which is the same in each."""
        assert _StreamTape.current is not None
        key = plan, number, kernel.name
        if key not in self._kernels:
            call = functools.partial(_call_kernel, kernel.call, [_Layout(tensor) for tensor in kernel.tensors])
            self._kernels[key] = self._new_function(call, len(kernel.tensors))
        self._capture(self._kernels[key], [_StreamTape.current.place(tensor) for tensor in kernel.tensors])

    def _new_function(self, call: Callable[[list[int]], None], count: int) -> int:
        self._calls.append((int(self._library.driver_function(len(self._calls), count)), call))
        return len(self._calls) - 1

    def _capture(self, number: int, addresses: Sequence[int]) -> None:
        values = (ctypes.c_uint64 * len(addresses))(*addresses)
        self._capture_event(_WAIT)
        assert self._library.driver_kernel(self.stream, self._calls[number][0], values) == 0
        self._capture_event(_RECORD)

    def _capture_event(self, kind: int) -> None:
        assert not self.events or self._library.driver_event(ctypes.c_size_t(self.stream), kind) == 0

    def new_stream(self, device: torch.device) -> SimpleNamespace:
        self._streams += 1
        return SimpleNamespace(
            cuda_stream=self._streams, wait_stream=lambda stream: None, record_event=lambda: SimpleNamespace()
        )

    def pooled_stream(self, device: torch.device) -> SimpleNamespace:
        """As torch's: those that it gave the device for copies, in turns."""
        return SimpleNamespace(cuda_stream=next(self._pooled))

    @contextlib.contextmanager
    def on_stream(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.stream = self.stream, stream.cuda_stream
        try:
            yield
        finally:
            self.stream = before

    @property
    def graph_launches(self) -> int:
        return int(self._library.driver_launches())

    @property
    def execs(self) -> int:
        """Graphs that can be launched."""
        return int(self._library.driver_execs())

    def refuse(self, number: int) -> None:
        self._library.driver_refuse(ctypes.c_int64(number))

    def run_side_by_side(self, parallel: bool) -> None:
        """Whether graphs of several devices run at one time, as those do in which they meet."""
        self._library.driver_set_parallel(int(parallel))

    def delay(self, seconds: float) -> None:
        """Launches take so long."""
        self._library.driver_set_delay(int(seconds * 1e6))

    @property
    def next_number(self) -> int:
        return len(self._calls)

    def on_launch(self) -> None:
        """Called first of all in a launch."""

    def on_capture(self) -> None:
        """Called first of all while something is captured."""

    def _launch(self, number: int, addresses: Any, count: int) -> None:
        self.on_launch()
        if self.graph_launches != self._launched:
            self._launched = self.graph_launches
            self.pools.spoil()
        with torch.inference_mode():
            self._calls[number][1](list(addresses[:count]))

    def _launch_plan(self, plan: Plan, replay: PoisonedReplay, addresses: list[int]) -> None:
        left = iter(addresses)
        shapes = (*plan.shapes_of(plan.parameters), *plan.result_shapes)
        replay.launch([_array_at(left, shape) for shape in shapes])
        self.launches.append(plan)


def _has_memory(array: Any) -> bool:
    return isinstance(array, torch.Tensor) and array.numel() > 0


def _array_at(addresses: Any, shape: ArrayShape) -> Any:
    if shape.element_type is ElementType.TOKEN:
        return ()
    if shape.num_bytes == 0:
        return torch.empty(shape.dims, dtype=dtype_of(shape.element_type))
    memory = (ctypes.c_uint8 * shape.num_bytes).from_address(next(addresses))
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype_of(shape.element_type)).view(shape.dims)


class _Layout:
    """How a tensor lies at its address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._dims, self._strides, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        last = sum((size - 1) * stride for size, stride in zip(self._dims, self._strides, strict=True))
        self._bytes = (last + 1) * tensor.itemsize if tensor.numel() else 0

    def at(self, address: int) -> torch.Tensor:
        if self._bytes == 0:
            return torch.empty(self._dims, dtype=self._dtype)
        memory = (ctypes.c_uint8 * self._bytes).from_address(address)
        line = torch.frombuffer(memory, dtype=torch.uint8).view(self._dtype)
        return line.as_strided(self._dims, self._strides)


def _call_kernel(
    call: Callable[[Sequence[torch.Tensor]], None], layouts: Sequence[_Layout], addresses: Sequence[int]
) -> None:
    call([layout.at(address) for layout, address in zip(layouts, addresses, strict=True)])


class _StreamTape(Tape):
    """Every kernel goes to the graph that the current stream is captured in."""

    current: _StreamTape | None = None

    def __init__(self, plan: Plan, pools: Pools | None) -> None:
        super().__init__()
        self._plan = plan
        self._count = 0
        self._pools = pools
        self._places: dict[int, int] = {}

    def add(self, kernel: Kernel) -> None:
        super().add(kernel)
        _DRIVER.capture_kernel(self._plan, self._count, kernel)
        self._count += 1

    def place(self, tensor: torch.Tensor) -> int:
        """Its address, or in ``pools`` if it is a temporary."""
        storage = tensor.untyped_storage()
        if self._pools is None or not self.owns(storage):
            return tensor.data_ptr()
        if storage._cdata not in self._places:
            self._places[storage._cdata] = self._pools.place(storage.nbytes())
        return self._places[storage._cdata] + tensor.data_ptr() - storage.data_ptr()


_DRIVER = Driver()


class _CurrentStream:
    def __init__(self) -> None:
        self.cuda_stream = _DRIVER.stream

    def synchronize(self) -> None:
        """Streams are done at once."""

    def wait_event(self, event: object) -> None:
        """Here, too."""


class _Graph:
    """Stands for torch.cuda.CUDAGraph: has what was run into arrays while it was captured."""

    recording: _Graph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self._handle = 0
        self._pool: Handle | None = None

    def __del__(self) -> None:
        if self._pool:
            _DRIVER.pools.release(self._pool)

    def capture_begin(self, pool: Handle | None = None, *, capture_error_mode: str) -> None:
        self._pool = pool or _DRIVER.pools.handle()
        _DRIVER.pools.begin(self._pool)
        type(self).recording = self

    def capture_end(self) -> None:
        type(self).recording = None

    def raw_cuda_graph(self) -> int:
        return self._handle

    def pool(self) -> Handle:
        assert self._pool is not None
        return self._pool


_run_into = capture.run_into


def _recorded(plan: Plan, run: Run, arrays: Sequence[Any]) -> tuple[int, ...]:
    graph, _Graph.recording = _Graph.recording, None
    if graph is None:
        return _run_into(plan, run, arrays)
    _DRIVER.captures_in.add(threading.get_ident())
    try:
        return _captured(graph, plan, run, arrays)
    finally:
        _DRIVER.captures_in.clear()


def _captured(graph: _Graph, plan: Plan, run: Run, arrays: Sequence[Any]) -> tuple[int, ...]:
    is_decided = any(map(_is_decided_by_data, plan.steps))
    if not is_decided and not _DRIVER.by_kernel:
        graph._handle = _DRIVER.record(plan, run, arrays)
        return _run_into(plan, run, arrays)
    # What the native side of conditional nodes is given lies where it lies.
    tape = _StreamTape.current = _StreamTape(plan, None if is_decided else _DRIVER.pools)
    try:
        with _DRIVER.captured() as handle, tape:
            overwritten = _run_into(plan, run, arrays)
    finally:
        _StreamTape.current = None
        if is_decided:
            _DRIVER.pools.adopt(tape.own_storages)
    (graph._handle,) = handle
    return overwritten


def _is_decided_by_data(step: Step) -> bool:
    nested = any(_is_decided_by_data(inner) for plan in step.nested for inner in plan.steps)
    return isinstance(step.kernel, While | Conditional) or nested


def _launched(self: RegionKernel, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    kernel = functools.partial(_launch_region, self)
    if _StreamTape.current is None:
        kernel(inputs, outputs)
    else:
        _StreamTape.current.generated(kernel, inputs, outputs)


_launch_region = RegionKernel.__call__


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    # What is recorded is regions and operators of torch: kernels that Triton launches would run at once.
    monkeypatch.setenv("FLAGOS_PREFER", "reference")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "Stream", _DRIVER.pooled_stream)
    monkeypatch.setattr(memory_module, "own_stream", _DRIVER.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", _DRIVER.on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _CurrentStream())
    monkeypatch.setattr(torch.cuda, "memory_snapshot", _DRIVER.pools.snapshot)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", _DRIVER.pools.handle)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    begin, end, release = "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"
    monkeypatch.setattr(torch._C, begin, lambda _, pool: _DRIVER.pools.take(pool), raising=False)
    monkeypatch.setattr(torch._C, end, lambda *_: None, raising=False)
    monkeypatch.setattr(torch._C, release, lambda _, pool: _DRIVER.pools.release(pool), raising=False)
    monkeypatch.setattr(capture, "run_into", _recorded)
    monkeypatch.setattr(RegionKernel, "__call__", _launched)
    monkeypatch.setattr(_DRIVER, "launches", [])
    monkeypatch.setattr(_DRIVER, "by_kernel", False)
    monkeypatch.setattr(_DRIVER, "events", False)
    monkeypatch.setattr(_DRIVER.pools, "misplaced", None)
    _DRIVER.refuse(-1)
    _DRIVER.delay(0)
    _DRIVER.run_side_by_side(False)
    return _DRIVER


def _allocate(self: SimulatedAccelerator, num_bytes: int, stream: StreamKind) -> torch.Tensor:
    """As devices do: where replays take their arrays."""
    whole = torch.full((num_bytes + _ALIGNMENT,), 0xA5, dtype=torch.uint8)
    start = -whole.data_ptr() % _ALIGNMENT
    return whole[start : start + num_bytes]


SimulatedAccelerator.handles = lambda self: ("cuda", _HANDLES)  # type: ignore[method-assign]
SimulatedAccelerator.allocate = _allocate  # type: ignore[method-assign]
