"""Graphs that the native side patches and launches, over host memory: a simulated device whose driver is driver.c, and
whose graphs run their plans again. Everything of a replay but the device."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["FLAGOS_DEVICE"] = "simulated"
os.environ["FLAGOS_NUM_CPU_DEVICES"] = "2"
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
os.environ["JAX_PLATFORMS"] = "flagos,cpu"

import pytest
import torch

from flagos_backend.devices.accelerator import StreamKind
from flagos_backend.devices.simulated import SimulatedAccelerator
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.runtime.accelerator import capture
from flagos_backend.runtime.plan import Plan
from support.backend import backend, context, memory
from support.poisoned_replays import PoisonedReplay

__all__ = ["backend", "context", "driver", "memory"]

_ALIGNMENT = 512


def _build() -> ctypes.CDLL:
    """The driver, under the name that the backend asks for: who has loaded it is given it."""
    folder = Path(tempfile.mkdtemp(dir=os.environ["FLAGOS_TEST_SCRATCH"]))
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    source, library = Path(__file__).with_name("driver.c"), folder / "libcuda.so.1"
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class Driver:
    """``launches``: the plans launched, in order. ``refuse``: to patch graphs of the plan of that number."""

    def __init__(self) -> None:
        self._library = _build()
        self._library.driver_function.restype = self._library.driver_graph.restype = ctypes.c_void_p
        self._library.driver_function.argtypes = [ctypes.c_int64, ctypes.c_size_t]
        self._library.driver_graph.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._plans: list[tuple[Plan, PoisonedReplay, int]] = []
        self.launches: list[Plan] = []
        signature = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
        self._callback = signature(self._launch)
        self._library.driver_set_launch(self._callback)

    def record(self, plan: Plan, run: Run, arrays: Sequence[Any]) -> int:
        """The handle of a graph that is ``plan`` on ``arrays``."""
        number = next((i for i, (known, _, _) in enumerate(self._plans) if known is plan), None)
        addresses = [array.data_ptr() for array in arrays if _has_memory(array)]
        if number is None:
            number = len(self._plans)
            function = self._library.driver_function(number, len(addresses))
            self._plans.append((plan, PoisonedReplay(plan, run), function))
        values = (ctypes.c_uint64 * len(addresses))(*addresses)
        return int(self._library.driver_graph(self._plans[number][2], values))

    @property
    def execs(self) -> int:
        """Graphs that can be launched."""
        return int(self._library.driver_execs())

    def refuse(self, number: int) -> None:
        self._library.driver_refuse(ctypes.c_int64(number))

    def delay(self, seconds: float) -> None:
        """Launches take so long."""
        self._library.driver_set_delay(int(seconds * 1e6))

    @property
    def next_number(self) -> int:
        return len(self._plans)

    def on_launch(self) -> None:
        """Called first of all in a launch."""

    def _launch(self, number: int, addresses: Any, count: int) -> None:
        self.on_launch()
        plan, replay, _ = self._plans[number]
        left = iter(addresses[:count])
        shapes = (*plan.shapes_of(plan.parameters), *plan.result_shapes)
        with torch.inference_mode():
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


_DRIVER = Driver()


class _Graph:
    """Stands for torch.cuda.CUDAGraph: has what was run into arrays while it was captured."""

    recording: _Graph | None = None

    def __init__(self, keep_graph: bool = False) -> None:
        self._handle = 0

    def capture_begin(self, pool: tuple[int, int] | None = None, *, capture_error_mode: str) -> None:
        type(self).recording = self

    def capture_end(self) -> None:
        type(self).recording = None

    def raw_cuda_graph(self) -> int:
        return self._handle

    def pool(self) -> tuple[int, int]:
        return 0, 1


_run_into = capture.run_into


def _recorded(plan: Plan, run: Run, arrays: Sequence[Any]) -> tuple[int, ...]:
    if _Graph.recording is not None:
        graph, _Graph.recording = _Graph.recording, None
        graph._handle = _DRIVER.record(plan, run, arrays)
    return _run_into(plan, run, arrays)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    monkeypatch.setattr(capture, "run_into", _recorded)
    monkeypatch.setattr(_DRIVER, "launches", [])
    _DRIVER.refuse(-1)
    _DRIVER.delay(0)
    return _DRIVER


def _allocate(self: SimulatedAccelerator, num_bytes: int, stream: StreamKind) -> torch.Tensor:
    """As devices do: where replays take their arrays."""
    whole = torch.full((num_bytes + _ALIGNMENT,), 0xA5, dtype=torch.uint8)
    start = -whole.data_ptr() % _ALIGNMENT
    return whole[start : start + num_bytes]


SimulatedAccelerator.handles = lambda self: ("cuda", (1, 2, 3))  # type: ignore[method-assign]
SimulatedAccelerator.allocate = _allocate  # type: ignore[method-assign]
