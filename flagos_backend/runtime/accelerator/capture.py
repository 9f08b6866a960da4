"""Captures a plan as graphs of kernels, with its arrays in different places, for native/replay.h to compare.

An optional ability: of the devices that torch drives, those with CUDA graphs. Between the plan and the native replay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flagos_backend.errors import CaptureRefused
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.aten import drops_out
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from flagos_backend.runtime.plan import Plan

# torch's allocations are aligned so, and kernels are chosen for it.
_ALIGNMENT = 512
# Beyond this a graph takes longer to make than the runs it saves.
MAX_STEPS = 100_000
_WAITS = frozenset(
    {
        Opcode.ALL_GATHER,
        Opcode.ALL_REDUCE,
        Opcode.ALL_TO_ALL,
        Opcode.COLLECTIVE_BROADCAST,
        Opcode.COLLECTIVE_PERMUTE,
        Opcode.RAGGED_ALL_TO_ALL,
        Opcode.REDUCE_SCATTER,
    }
)
# Draws of a hidden generator: a graph would draw the same numbers for ever.
_RANDOM_CALLS = (
    "rand",
    "dropout",
    "bernoulli",
    "multinomial",
    "normal",
    "exponential",
    "cauchy",
    "geometric",
    "poisson",
)

_HOST_CALLBACK = "flagos.host_callback"

# begin, bytes
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Captures:
    """What native/replays.cc reads, in its order. ``kept``: the first graph, and the memory of its temporaries.

    ``graphs``: of each capture the driver's handle, and the memory of its own. ``arrays``: arguments, then outputs:
    where each lay in the first capture, as in the third, where in the second, and its bytes. ``overwritten``: for each
    output the argument that it is written over, or -1. ``compared``: graphs that live until they are.
    """

    kept: object
    graphs: tuple[tuple[int, tuple[Range, ...]], ...]
    arrays: tuple[tuple[int, int, int], ...]
    overwritten: tuple[int, ...]
    compared: object

    def as_tuple(self) -> tuple[Any, ...]:
        return self.kept, *self.graphs, self.arrays, self.overwritten, self.compared


def reason_against(module: Module, steps: float) -> str:
    """Why a program of ``steps`` steps is not captured, or ""."""
    if steps > MAX_STEPS:
        return f"it has {steps:.0f} steps, more than {MAX_STEPS}"
    for computation in module.computations():
        for instruction in computation.instructions:
            if instruction.opcode in _WAITS:
                return f"{instruction.opcode} {instruction.name} waits for other devices"
            if instruction.opcode is Opcode.RNG or _is_random(instruction):
                return f"{instruction.name} draws from a generator"
            attributes = instruction.attributes
            if not isinstance(attributes, CustomCallAttributes):
                continue
            if attributes.has_side_effect:
                return f"{instruction.opcode} {instruction.name} has a side effect"
            if attributes.target == _HOST_CALLBACK:
                return f"{instruction.opcode} {instruction.name} calls the host"
    return ""


def _is_random(instruction: Instruction) -> bool:
    attributes = instruction.attributes
    if not isinstance(attributes, CustomCallAttributes) or not attributes.target.startswith("aten::"):
        return False
    return any(word in attributes.target for word in _RANDOM_CALLS) or drops_out(instruction)


def capture(plan: Plan, run: Run, arguments: Sequence[ArrayShape]) -> Captures:
    """Captures ``plan``, which has run before. Nothing is computed. Raises CaptureRefused."""
    shapes = (*arguments, *plan.result_shapes)
    # One piece of memory serves for all arrays, as nothing reads it; each has addresses of its own in it.
    count = len(shapes)
    largest = max((shape.num_bytes for shape in shapes), default=0)
    arena = torch.empty(largest + _ALIGNMENT * (3 * count + 1), dtype=torch.uint8, device=run.device)
    first_places = [number * _ALIGNMENT for number in range(count)]
    # Every array moves by another distance, so that the distance tells which one an address belongs to.
    second_places = [place + (count + number) * _ALIGNMENT for number, place in enumerate(first_places)]
    recordings = [
        _Recording(plan, run, _lay_out(arena, shapes, places)) for places in (first_places, second_places, first_places)
    ]
    first = recordings[0]
    if any(recording.overwritten != first.overwritten for recording in recordings):
        raise CaptureRefused(reason="its results lie over other arguments in each capture")
    base = arena.data_ptr()
    arrays = tuple(
        (base + a, base + b, shape.num_bytes) for a, b, shape in zip(first_places, second_places, shapes, strict=True)
    )
    graphs = tuple((recording.handle, recording.owned(run.device)) for recording in recordings)
    return Captures(first.graph, graphs, arrays, first.overwritten, tuple(r.graph for r in recordings[1:]))


def _lay_out(arena: torch.Tensor, shapes: Sequence[ArrayShape], places: Sequence[int]) -> list[Any]:
    arrays: list[Any] = []
    for shape, place in zip(shapes, places, strict=True):
        if shape.element_type.name == "TOKEN":
            arrays.append(())
            continue
        part = arena[place : place + shape.num_bytes].view(dtype_of(shape.element_type)).view(shape.dims)
        # A storage of its own: kernels that write in place refuse operands that overlap in one.
        arrays.append(torch._C._from_dlpack(torch._C._to_dlpack(part)))
    return arrays


class _Recording:
    """One capture. ``arrays``: arguments, then what the outputs are copied to: memory of the capture's own may be used
    for several things one after another, so that its addresses do not tell what they stand for."""

    _one_at_a_time = threading.Lock()

    def __init__(self, plan: Plan, run: Run, arrays: list[Any]) -> None:
        arguments, outputs = arrays[: plan.num_parameters], arrays[plan.num_parameters :]
        addresses = [_address(argument) for argument in arguments]
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with self._one_at_a_time:
            torch.cuda.synchronize(run.device)
            stream = torch.cuda.Stream(run.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                self.graph.capture_begin(capture_error_mode="thread_local")
                try:
                    results = plan.run(run, arguments, outputs)
                    self.overwritten = tuple(_settle(*pair, addresses) for pair in zip(results, outputs, strict=True))
                except Exception as error:
                    self._abandon(run.device)
                    step = plan.step_of(error)
                    raise CaptureRefused(reason=_first_line(error) + (f" in {step}" if step else "")) from error
                self.graph.capture_end()
        self.handle = int(self.graph.raw_cuda_graph())

    def _abandon(self, device: torch.device) -> None:
        """Undoes a capture that broke: torch leaves its allocator and its generator as if it went on."""
        with contextlib.suppress(RuntimeError):  # what broke the capture is what is reported
            self.graph.capture_end()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, self.graph.pool())
        healthy = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            healthy.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=device)
            healthy.capture_end()

    def owned(self, device: torch.device) -> tuple[Range, ...]:
        """The memory of this capture's own."""
        pool = tuple(self.graph.pool())
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return tuple(
            (int(segment["address"]), int(segment["total_size"]))
            for segment in segments
            if segment["device"] == device.index and tuple(segment["segment_pool_id"]) == pool
        )


def _address(array: Any) -> int:
    """0 for a token and for an array without elements."""
    return array.data_ptr() if isinstance(array, torch.Tensor) and array.numel() else 0


def _settle(result: Any, output: Any, arguments: Sequence[int]) -> int:
    """The argument that ``result`` was written over; -1 when there is none, and ``output`` holds the result then."""
    address = _address(result)
    if address and address in arguments:
        return arguments.index(address)
    if address and address != _address(output):
        output.copy_(result)
    return -1


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
