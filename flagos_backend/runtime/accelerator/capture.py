"""Captures a plan as graphs of kernels, with its arrays in different places, for native/replay.h to compare.

An optional ability: of the devices that torch drives, those with CUDA graphs. Between the plan and the native replay.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flagos_backend.devices.device_lock import device_lock
from flagos_backend.errors import CaptureRefused
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.registry import Conditionals, Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.process.torch_loading import torch
from flagos_backend.runtime.accelerator.communication import CommunicationStream
from flagos_backend.runtime.accelerator.conditional import ConditionalNode, ConditionalRecorder, NativeConditionals
from flagos_backend.runtime.accelerator.lending import LentArrays
from flagos_backend.runtime.accelerator.memory import GraphMemory, lent_stream
from flagos_backend.runtime.plan import Plan

# torch's allocations are aligned so, and kernels are chosen for it.
_ALIGNMENT = 512
# How far from one another moves need not be.
_LARGEST_UNIT = 1 << 20
# What a step is told whose capture was broken before: by another thread, as it is not the step that broke it.
_INVALIDATED = "due to a previous error during capture"
# begin, bytes
Range = tuple[int, int]
# storage, address, bytes
Place = tuple[int, int, int]
# the driver's handle, where its temporaries are, its conditional nodes
NativeGraph = tuple[int, tuple[Range, ...], tuple[ConditionalNode, ...]]


@dataclass(slots=True)
class Captures:
    """Three captures of one plan, each with temporaries in memory of its own: ``first``, and what it is compared with.

    ``arrays``: arguments, then outputs: where each lay in the first capture, as in the third, where in the second, and
    its bytes. ``stand_ins``: the number of each array that collectives were given by another address, and where that
    lay in the first and in the second. ``capture_in``: captures the plan once more, with arrays where the first had
    them and temporaries in that memory; raises CaptureRefused.
    """

    first: Recording
    others: tuple[Recording, ...]
    arrays: tuple[tuple[int, int, int], ...]
    stand_ins: tuple[tuple[int, int, int], ...]
    capture_in: Callable[[GraphMemory], Recording]

    @property
    def graphs(self) -> tuple[NativeGraph, ...]:
        return tuple(recording.native() for recording in (self.first, *self.others))


# In which the three captures may be made. What a stack leaves may follow the iterations, as if it followed the places.
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2))
# An order, and what the captures may take for moving their arrays around. Moves in less memory are shorter, so that
# more of what a stack left may be one: what a comparison then refuses is captured again with longer ones.
Attempt = tuple[tuple[int, int, int], int]
ATTEMPTS: tuple[Attempt, ...] = ((ORDERS[0], 32 << 20), *((order, 256 << 20) for order in ORDERS))
# What is lent to collectives must be found in the graph's nodes, by the longest moves.
LENT_ATTEMPT: Attempt = ATTEMPTS[1]


def capture(
    plan: Plan,
    run: Run,
    conditionals: NativeConditionals | None = None,
    attempt: Attempt = ATTEMPTS[0],
    lent: Sequence[int] = (),
) -> Captures:
    """Captures ``plan``, which has run before, with its arrays at their first, second and first places, in the order of
    ``attempt``. Nothing is computed.

    ``conditionals``: for a plan in which data decides what runs. ``lent``: the numbers of arrays that collectives may
    be given without a copy. Raises CaptureRefused.
    """
    of_arrays = (*plan.shapes_of(plan.parameters), *plan.result_shapes)
    shapes = (*of_arrays, *(of_arrays[number] for number in lent))
    # One piece of memory serves for all arrays, as nothing reads it; each has addresses of its own in it.
    sizes = [shape.num_bytes for shape in shapes]
    order, moved_bytes = attempt
    first_places, second_places = _places(sizes, moved_bytes)
    ends = (place + size for place, size in zip(second_places, sizes, strict=True))
    arena = torch.empty(max(ends, default=0), dtype=torch.uint8, device=run.device)
    places = (first_places, second_places, first_places)

    def recorded(number: int, memory: GraphMemory) -> Recording:
        laid_out = lay_out(arena, shapes, places[number])
        arrays, stand_ins = laid_out[: len(of_arrays)], dict(zip(lent, laid_out[len(of_arrays) :], strict=True))
        return _recorded(plan, run, LentArrays(arrays, stand_ins), conditionals, memory)

    made = {number: recorded(number, GraphMemory(run.device)) for number in order}
    first, *others = (made[number] for number in range(len(places)))

    def checked(recording: Recording) -> Recording:
        if recording.overwritten != first.overwritten:
            raise CaptureRefused(reason="its results lie over other arguments in each capture")
        if recording.lent != first.lent:
            raise CaptureRefused(reason="its collectives are given other arrays in each capture")
        return recording

    base = arena.data_ptr()
    placed = [(base + a, base + b) for a, b in zip(first_places, second_places, strict=True)]
    arrays = tuple((*place, shape.num_bytes) for place, shape in zip(placed, of_arrays, strict=False))
    stand_ins = tuple(
        (number, *place) for number, place in zip(lent, placed[len(of_arrays) :], strict=True) if number in first.lent
    )
    return Captures(first, tuple(map(checked, others)), arrays, stand_ins, lambda memory: checked(recorded(0, memory)))


def _places(sizes: Sequence[int], moved_bytes: int) -> tuple[list[int], list[int]]:
    """Where arrays of ``sizes`` bytes lie first, and second. Each moves by another distance, so that the distance tells
    which one an address belongs to. The larger ones move less, for which less memory is enough."""
    count = len(sizes)
    unit = _unit_of_moves(count, moved_bytes)
    first = [number * _ALIGNMENT for number in range(count)]
    second = list(first)
    for rank, number in enumerate(sorted(range(count), key=lambda number: -sizes[number])):
        second[number] += (count + rank) * unit
    return first, second


def _unit_of_moves(count: int, moved_bytes: int) -> int:
    """Moves are multiples of it: small numbers that a stack left, and that change, are then no moves, in elements of
    whatever size."""
    wanted = moved_bytes // max(2 * count, 1)
    return max(_ALIGNMENT, min(1 << max(wanted.bit_length() - 1, 0), _LARGEST_UNIT))


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
    plan: Plan, run: Run, arrays: LentArrays, conditionals: NativeConditionals | None, memory: GraphMemory
) -> Recording:
    """One capture, which is made again where that may help. What other captures left is given back for it: while one
    goes on, torch frees nothing."""
    try:
        return Recording(plan, run, arrays, conditionals, memory)
    except CaptureRefused as refusal:
        has_no_memory = isinstance(refusal.__cause__, torch.OutOfMemoryError)
        if not has_no_memory and _INVALIDATED not in str(refusal.__cause__):
            raise
    if has_no_memory:
        with device_lock:
            torch.cuda.empty_cache()
    return Recording(plan, run, arrays, conditionals, memory)


@contextlib.contextmanager
def _leaving_no_workspace() -> Iterator[None]:
    """BLAS keeps a workspace for each stream: the next capture on this one would find memory of this one's graph. torch
    drops those of all streams, which is not done more often than it must: of a product that another thread is about to
    enqueue, too, whose workspace is anybody's then."""
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Recording:
    """One capture, with its temporaries in ``memory``.

    ``arrays``: arguments, then what the outputs are copied to: memory of the capture's own may be used for several
    things one after another, so that its addresses do not tell what they stand for. ``overwritten``: for each output
    the argument that it is written over, or -1. ``lent``: the numbers of the arrays that collectives were given.
    """

    def __init__(
        self,
        plan: Plan,
        run: Run,
        arrays: LentArrays,
        conditionals: NativeConditionals | None,
        memory: GraphMemory,
    ) -> None:
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.memory = memory
        recorder = ConditionalRecorder(conditionals, memory.bodies, run.device) if conditionals else None
        spare = torch.empty(1, dtype=torch.uint8, device=run.device)
        with device_lock, _leaving_no_workspace():
            # Not for the device as a whole, where another thread may capture.
            torch.cuda.current_stream(run.device).synchronize()
            with torch.cuda.stream(memory.stream):
                try:
                    self.graph.capture_begin(memory.pool.handle, capture_error_mode="thread_local")
                except RuntimeError as error:
                    raise _refusal(plan, error) from error
                launch = run
                try:
                    launch = recorded(run, recorder, arrays, memory)
                    self.overwritten = run_into(plan, launch, arrays.arrays)
                    self.graph.capture_end()
                except Exception as error:
                    if launch.communication is not None:
                        with contextlib.suppress(RuntimeError):
                            launch.communication.wait_for_all()
                    self._abandon(run.device, spare, recorder is not None and recorder.has_lost_body)
                    raise _refusal(plan, error) from error
        memory.add(self.graph)
        self.conditionals = tuple(recorder.nodes) if recorder else ()
        self.lent = arrays.lent

    def native(self) -> NativeGraph:
        return int(self.graph.raw_cuda_graph()), self.memory.segments(), self.conditionals

    def give_up(self) -> None:
        """The graph goes, and what libraries keep for it, at the first call; its memory does not."""
        with contextlib.suppress(AttributeError):
            del self.graph

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
            torch._C._cuda_releasePool(device.index, self.memory.pool.handle)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, self.memory.pool.handle)
        healthy = torch.cuda.CUDAGraph()
        with lent_stream(device) as stream, torch.cuda.stream(stream):
            healthy.capture_begin(capture_error_mode="thread_local")
            spare.zero_()
            healthy.capture_end()


def recorded(run: Run, conditionals: Conditionals | None, arrays: LentArrays, memory: GraphMemory) -> Run:
    """A launch of ``run`` that is recorded with its arguments and outputs in ``arrays``."""
    meets = run.communicator is not None and not run.communicator.no_recording
    if not meets:
        return replace(run, conditionals=conditionals)
    assert run.communicator is not None
    communicator = run.communicator.recorded(arrays)
    communication = CommunicationStream(memory.communication, run.device)
    return replace(run, conditionals=conditionals, communicator=communicator, communication=communication)


def run_into(plan: Plan, run: Run, arrays: Sequence[Any]) -> tuple[int, ...]:
    """Runs ``plan`` on ``arrays``, arguments and then outputs, each in storage of its own. Returns for each output the
    argument whose storage has that result; -1 when there is none, and then the output has it."""
    count = len(plan.parameters)
    arguments, outputs = arrays[:count], arrays[count:]
    places = [_place(argument) for argument in arguments]
    results = plan.run(run, [*arguments], outputs)
    if run.communication is not None:
        run.communication.wait_for_all()  # a part of a plan may start what a later one waits for
    return tuple(_argument_or_copy(*pair, places) for pair in zip(results, outputs, strict=True))


def _argument_or_copy(result: Any, output: Any, places: Sequence[Place | None]) -> int:
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
    refusal = CaptureRefused(reason=reason_of(plan, error))
    refusal.step = plan.step_of(error)
    return refusal


def reason_of(plan: Plan, error: Exception) -> str:
    """What happened in ``plan``, and in which step."""
    place = plan.place_of(error)
    return _first_line(error) + (f" in {place}" if place else "")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
