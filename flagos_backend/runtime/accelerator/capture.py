"""Captures a plan as graphs of kernels, with its arrays in different places, for native/replay.h to compare.

An optional ability: of the devices that torch drives, those with CUDA graphs. Between the plan and the native replay.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flagos_backend.errors import CaptureRefused
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.runtime.accelerator.conditional import (
    BodyMemory,
    ConditionalNode,
    ConditionalRecorder,
    NativeConditionals,
)
from flagos_backend.runtime.plan import Plan

# torch's allocations are aligned so, and kernels are chosen for it.
_ALIGNMENT = 512
# begin, bytes
Range = tuple[int, int]
# storage, address, bytes
Place = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a graph has its temporaries: torch's pool, and the stream that its blocks belong to; and those of the
    bodies in it."""

    pool: torch.cuda._POOL_HANDLE
    stream: torch.cuda.Stream
    bodies: BodyMemory


@dataclass(frozen=True, slots=True)
class Captures:
    """Of each capture, in ``graphs``, the driver's handle, the memory of its own, and its conditional nodes. ``kept``:
    the first graph, with its temporaries in ``memory``.

    ``arrays``: arguments, then outputs: where each lay in the first capture, as in the third, where in the second, and
    its bytes. ``overwritten``: for each output the argument that it is written over, or -1. ``compared``: graphs that
    live until they are.
    """

    kept: object
    memory: Memory
    graphs: tuple[tuple[int, tuple[Range, ...], tuple[ConditionalNode, ...]], ...]
    arrays: tuple[tuple[int, int, int], ...]
    overwritten: tuple[int, ...]
    compared: object


# In which the three captures may be made. What a stack leaves may follow the turns, as if it followed the places.
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2))


def capture(
    plan: Plan,
    run: Run,
    shared: Memory | None = None,
    conditionals: NativeConditionals | None = None,
    order: tuple[int, int, int] = ORDERS[0],
) -> Captures:
    """Captures ``plan``, which has run before, with its arrays at their first, second and first places, in ``order``.
    Nothing is computed.

    ``conditionals``: for a plan in which data decides what runs.
    ``shared``: where another kept graph has its temporaries. Those of this one may lie there too: the two are launched
    one after another, and neither reads what the other left. Raises CaptureRefused.
    """
    shapes = (*plan.shapes_of(plan.parameters), *plan.result_shapes)
    # One piece of memory serves for all arrays, as nothing reads it; each has addresses of its own in it.
    count = len(shapes)
    largest = max((shape.num_bytes for shape in shapes), default=0)
    arena = torch.empty(largest + _ALIGNMENT * (3 * count + 1), dtype=torch.uint8, device=run.device)
    first_places = [number * _ALIGNMENT for number in range(count)]
    # Every array moves by another distance, so that the distance tells which one an address belongs to.
    second_places = [place + (count + number) * _ALIGNMENT for number, place in enumerate(first_places)]
    places = (first_places, second_places, first_places)
    made = {
        number: _recorded(
            plan, run, lay_out(arena, shapes, places[number]), conditionals, shared if number == 0 else None
        )
        for number in order
    }
    first, *others = (made[number] for number in range(len(places)))
    if any(recording.overwritten != first.overwritten for recording in others):
        raise CaptureRefused(reason="its results lie over other arguments in each capture")
    base = arena.data_ptr()
    arrays = tuple(
        (base + a, base + b, shape.num_bytes) for a, b, shape in zip(first_places, second_places, shapes, strict=True)
    )
    graphs = tuple((r.handle, r.owned(run.device), r.conditionals) for r in (first, *others))
    return Captures(
        (first.graph, first.memory.bodies),
        first.memory,
        graphs,
        arrays,
        first.overwritten,
        tuple(r.graph for r in others),
    )


def lay_out(arena: torch.Tensor, shapes: Sequence[ArrayShape], places: Sequence[int]) -> list[Any]:
    """Arrays of ``shapes``, each at its place in ``arena``."""
    arrays: list[Any] = []
    for shape, place in zip(shapes, places, strict=True):
        if shape.element_type.name == "TOKEN":
            arrays.append(())
            continue
        part = arena[place : place + shape.num_bytes].view(dtype_of(shape.element_type)).view(shape.dims)
        # A storage of its own: kernels that write in place refuse operands that overlap in one.
        arrays.append(torch._C._from_dlpack(torch._C._to_dlpack(part)))
    return arrays


def _recorded(
    plan: Plan,
    run: Run,
    arrays: list[Any],
    conditionals: NativeConditionals | None,
    shared: Memory | None = None,
) -> _Recording:
    """One capture. What other captures left is given back for it: while one goes on, torch frees nothing."""
    try:
        return _Recording(plan, run, arrays, conditionals, shared)
    except CaptureRefused as refusal:
        if not isinstance(refusal.__cause__, torch.OutOfMemoryError):
            raise
    torch.cuda.empty_cache()
    return _Recording(plan, run, arrays, conditionals, shared)


@contextlib.contextmanager
def _workspaces_of_its_own() -> Iterator[None]:
    """BLAS keeps a workspace for each stream, of which torch hands out a few in turns: the one that it finds would be
    memory of an earlier graph's."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class _Recording:
    """One capture. ``arrays``: arguments, then what the outputs are copied to: memory of the capture's own may be used
    for several things one after another, so that its addresses do not tell what they stand for."""

    _one_at_a_time = threading.Lock()

    def __init__(
        self,
        plan: Plan,
        run: Run,
        arrays: list[Any],
        conditionals: NativeConditionals | None,
        shared: Memory | None,
    ) -> None:
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        bodies = shared.bodies if shared else BodyMemory(run.device)
        recorder = ConditionalRecorder(conditionals, bodies, run.device) if conditionals else None
        spare = torch.empty(1, dtype=torch.uint8, device=run.device)
        with self._one_at_a_time, _workspaces_of_its_own():
            torch.cuda.synchronize(run.device)
            stream = shared.stream if shared else torch.cuda.Stream(run.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                try:
                    self.graph.capture_begin(shared.pool if shared else None, capture_error_mode="thread_local")
                except RuntimeError as error:
                    raise _refusal(plan, error) from error
                try:
                    self.overwritten = run_into(plan, replace(run, conditionals=recorder), arrays)
                except Exception as error:
                    self._abandon(run.device, spare, recorder is not None and recorder.has_lost_body)
                    raise _refusal(plan, error) from error
                self.graph.capture_end()
        self.handle = int(self.graph.raw_cuda_graph())
        self.memory = Memory(self.graph.pool(), stream, bodies)
        self.conditionals = tuple(recorder.nodes) if recorder else ()

    def _abandon(self, device: torch.device, spare: torch.Tensor, has_lost_body: bool) -> None:
        """Undoes a capture that broke: torch leaves its allocator and its generator as if it went on. Memory may be
        what is missing, so that ``spare`` is written to where a capture must have something in it."""
        try:
            self.graph.capture_end()
        except RuntimeError:  # what broke the capture is what is reported
            has_lost_body = False  # there is no graph
        if has_lost_body:
            # The driver has destroyed the body, and would do so again with the graph: that stays, without its memory.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.graph))
            torch._C._cuda_releasePool(device.index, self.graph.pool())
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, self.graph.pool())
        healthy = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            healthy.capture_begin(capture_error_mode="thread_local")
            spare.zero_()
            healthy.capture_end()

    def owned(self, device: torch.device) -> tuple[Range, ...]:
        """The memory of this capture's own."""
        pools = tuple(self.graph.pool()), tuple(self.memory.bodies.pool)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return tuple(
            (int(segment["address"]), int(segment["total_size"]))
            for segment in segments
            if segment["device"] == device.index and tuple(segment["segment_pool_id"]) in pools
        )


def run_into(plan: Plan, run: Run, arrays: Sequence[Any]) -> tuple[int, ...]:
    """Runs ``plan`` on ``arrays``, arguments and then outputs, each in storage of its own. Returns for each output the
    argument whose storage has that result; -1 when there is none, and then the output has it."""
    count = len(plan.parameters)
    arguments, outputs = arrays[:count], arrays[count:]
    places = [_place(argument) for argument in arguments]
    results = plan.run(run, [*arguments], outputs)
    return tuple(_settle(*pair, places) for pair in zip(results, outputs, strict=True))


def _settle(result: Any, output: Any, places: Sequence[Place | None]) -> int:
    place = _place(result)
    if place is None:
        return -1
    # A view, as of a part of an argument, is not what its storage holds.
    if place in places and result.is_contiguous() and not result.is_conj() and not result.is_neg():
        return places.index(place)
    if place != _place(output):
        output.copy_(result)
    return -1


def _place(array: Any) -> Place | None:
    """None for a token and for an array without elements. Arrays of one arena overlap, but have different storages."""
    if not isinstance(array, torch.Tensor) or array.numel() == 0:
        return None
    return array.untyped_storage()._cdata, array.data_ptr(), array.nbytes


def _refusal(plan: Plan, error: Exception) -> CaptureRefused:
    place = plan.place_of(error)
    refusal = CaptureRefused(reason=_first_line(error) + (f" in {place}" if place else ""))
    refusal.step = plan.step_of(error)
    return refusal


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
