"""A driver in C whose graphs run over host memory, and the simulated device above it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cpu.replay.pools import Pools
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.runtime.plan import Plan
from support.poisoned_replays import PoisonedReplay
from support.tape import Kernel, Tape

# The device's streams: for computing, for copies to it, and from it.
HANDLES = 1, 2, 3
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
    nodes of events, as collectives are. ``keeps_addresses``: the addresses of what collectives are given are elsewhere
    than in graphs."""

    def __init__(self) -> None:
        self._library = _build()
        self._library.driver_function.restype = self._library.driver_end.restype = ctypes.c_void_p
        self._library.driver_function.argtypes = [ctypes.c_int64, ctypes.c_size_t]
        self._library.driver_begin.argtypes = self._library.driver_end.argtypes = [ctypes.c_size_t]
        self._library.driver_kernel.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        self._calls: list[tuple[int, Callable[[list[int]], None]]] = []
        self._plans: dict[tuple[Plan, int, int, tuple[int, ...]], int] = {}
        self._kernels: dict[tuple[Plan, int, str], int] = {}
        self.launches: list[Plan] = []
        self.captures_in: set[int] = set()
        self.stream, self._streams = 1, max(HANDLES)
        self._pooled = itertools.cycle(HANDLES[1:])
        self.pools = Pools()
        self.by_kernel = self.events = self.keeps_addresses = False
        self._launched = 0
        signature = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
        self._callback = signature(self._launch)
        self._library.driver_set_launch(self._callback)

    def record(self, plan: Plan, run: Run, arrays: Sequence[Any], stand_ins: Mapping[int, torch.Tensor]) -> int:
        """The handle of a graph that is ``plan`` on ``arrays``, of which some were lent by what stands in for them."""
        if self.keeps_addresses:
            stand_ins = {}
        addresses = [array.data_ptr() for array in (*arrays, *stand_ins.values()) if _has_memory(array)]
        key = plan, run.replica_id, run.partition_id, tuple(stand_ins)
        if key not in self._plans:
            replay = PoisonedReplay(plan, replace(run, conditionals=None, communication=None))
            launch = functools.partial(self._launch_plan, plan, replay, tuple(stand_ins))
            self._plans[key] = self._new_function(launch, len(addresses))
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
        assert StreamTape.current is not None
        key = plan, number, kernel.name
        if key not in self._kernels:
            call = functools.partial(_call_kernel, kernel.call, [_Layout(tensor) for tensor in kernel.tensors])
            self._kernels[key] = self._new_function(call, len(kernel.tensors))
        self._capture(self._kernels[key], [StreamTape.current.place(tensor) for tensor in kernel.tensors])

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

    def _launch_plan(self, plan: Plan, replay: PoisonedReplay, lent: Sequence[int], addresses: list[int]) -> None:
        left = iter(addresses)
        shapes = (*plan.shapes_of(plan.parameters), *plan.result_shapes)
        arrays = [_array_at(left, shape) for shape in shapes]
        assert [arrays[number].data_ptr() for number in lent] == list(left)
        replay.launch(arrays)
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


class StreamTape(Tape):
    """Every kernel goes to the graph that the current stream is captured in."""

    current: StreamTape | None = None

    def __init__(self, plan: Plan, pools: Pools | None) -> None:
        super().__init__()
        self._plan = plan
        self._count = 0
        self._pools = pools
        self._places: dict[int, int] = {}

    def add(self, kernel: Kernel) -> None:
        super().add(kernel)
        DRIVER.capture_kernel(self._plan, self._count, kernel)
        self._count += 1

    def place(self, tensor: torch.Tensor) -> int:
        """Its address, or in ``pools`` if it is a temporary."""
        storage = tensor.untyped_storage()
        if self._pools is None or not self.owns(storage):
            return tensor.data_ptr()
        if storage._cdata not in self._places:
            self._places[storage._cdata] = self._pools.place(storage.nbytes())
        return self._places[storage._cdata] + tensor.data_ptr() - storage.data_ptr()


DRIVER = Driver()
