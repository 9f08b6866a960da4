"""Graphs that the native side patches and launches, over host memory: a simulated device whose driver is driver.c, and
whose graphs run their plans again, or kernel by kernel where data decides. Everything of a replay but the device."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

os.environ["FLAGOS_DEVICE"] = "simulated"
os.environ["FLAGOS_NUM_CPU_DEVICES"] = "2"
os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
os.environ["JAX_PLATFORMS"] = "flagos,cpu"

import pytest
import torch

from cpu.replay.driver import DRIVER, HANDLES, Driver, StreamTape
from cpu.replay.pools import Handle
from flagos_backend.codegen.triton import RegionKernel
from flagos_backend.devices.accelerator import StreamKind
from flagos_backend.devices.simulated import SimulatedAccelerator
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator import capture
from flagos_backend.runtime.accelerator import memory as memory_module
from flagos_backend.runtime.control_flow import Conditional, While
from flagos_backend.runtime.plan import Plan, Step
from support.backend import backend, context, memory

__all__ = ["backend", "context", "driver", "memory"]

_ALIGNMENT = 512


class _CurrentStream:
    def __init__(self) -> None:
        self.cuda_stream = DRIVER.stream

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
            DRIVER.pools.leave(self._pool)

    def capture_begin(self, pool: Handle | None = None, *, capture_error_mode: str) -> None:
        handle = pool or DRIVER.pools.handle()
        DRIVER.pools.begin(handle)
        self._pool = handle
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
    DRIVER.captures_in.add(threading.get_ident())
    try:
        return _captured(graph, plan, run, arrays)
    finally:
        DRIVER.captures_in.clear()


def _captured(graph: _Graph, plan: Plan, run: Run, arrays: Sequence[Any]) -> tuple[int, ...]:
    is_decided = any(map(_is_decided_by_data, plan.steps))
    if not is_decided and not DRIVER.by_kernel:
        overwritten = _run_into(plan, run, arrays)
        graph._handle = DRIVER.record(plan, run, arrays, _lent(run))
        return overwritten
    # What the native side of conditional nodes is given lies where it lies.
    tape = StreamTape.current = StreamTape(plan, None if is_decided else DRIVER.pools)
    try:
        with DRIVER.captured() as handle, tape:
            overwritten = _run_into(plan, run, arrays)
    finally:
        StreamTape.current = None
        if is_decided:
            DRIVER.pools.adopt(tape.own_storages)
    (graph._handle,) = handle
    return overwritten


def _lent(run: Run) -> dict[int, torch.Tensor]:
    """What was given to collectives in the place of which arrays."""
    places = getattr(run.communicator, "_places", None)
    return {} if places is None else {number: places._stand_ins[number] for number in sorted(places.lent)}


def _is_decided_by_data(step: Step) -> bool:
    nested = any(_is_decided_by_data(inner) for plan in step.nested for inner in plan.steps)
    return isinstance(step.kernel, While | Conditional) or nested


def _launched(self: RegionKernel, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    kernel = functools.partial(_launch_region, self)
    if StreamTape.current is None:
        kernel(inputs, outputs)
    else:
        StreamTape.current.generated(kernel, inputs, outputs)


_launch_region = RegionKernel.__call__


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    # What is recorded is regions and operators of torch: kernels that Triton launches would run at once.
    monkeypatch.setenv("FLAGOS_PREFER", "reference")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "Stream", DRIVER.pooled_stream)
    monkeypatch.setattr(memory_module, "own_stream", DRIVER.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", DRIVER.on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: _CurrentStream())
    monkeypatch.setattr(torch.cuda, "memory_snapshot", DRIVER.pools.snapshot)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", DRIVER.pools.handle)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    begin, end, release = "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"
    monkeypatch.setattr(torch._C, begin, lambda _, pool: DRIVER.pools.take(pool), raising=False)
    monkeypatch.setattr(torch._C, end, lambda *_: None, raising=False)
    monkeypatch.setattr(torch._C, release, lambda _, pool: DRIVER.pools.release(pool), raising=False)
    monkeypatch.setattr(capture, "run_into", _recorded)
    monkeypatch.setattr(RegionKernel, "__call__", _launched)
    monkeypatch.setattr(DRIVER, "launches", [])
    monkeypatch.setattr(DRIVER, "by_kernel", False)
    monkeypatch.setattr(DRIVER, "events", False)
    monkeypatch.setattr(DRIVER, "keeps_addresses", False)
    monkeypatch.setattr(DRIVER.pools, "misplaced", None)
    DRIVER.refuse(-1)
    DRIVER.delay(0)
    DRIVER.run_side_by_side(False)
    return DRIVER


def _allocate(self: SimulatedAccelerator, num_bytes: int, stream: StreamKind) -> torch.Tensor:
    """As devices do: where replays take their arrays."""
    whole = torch.full((num_bytes + _ALIGNMENT,), 0xA5, dtype=torch.uint8)
    start = -whole.data_ptr() % _ALIGNMENT
    return whole[start : start + num_bytes]


SimulatedAccelerator.handles = lambda self: ("cuda", HANDLES)  # type: ignore[method-assign]
SimulatedAccelerator.allocate = _allocate  # type: ignore[method-assign]
