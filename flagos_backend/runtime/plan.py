"""A compiled computation: a straight line of steps over numbered slots, run by one loop. Built by plan_builder.py and
called by bridge.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference import storage
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.loop_ir.region import Region
from flagos_backend.process.torch_loading import torch

# A step as Plan.run reads it: kernel, operands unless it works on the slots itself, the slot to set, slots to free
CompiledStep = tuple[Callable[..., Any], tuple[int, ...] | None, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Step:
    """The one of ``results`` is set to kernel(run, *operands); ``on_slots``, the kernel works on the slots itself.

    ``operands`` and ``results`` are slots, ``frees`` those that nobody reads afterwards. ``instruction``: what the step
    computes, or prepares an operand of; None for a step that only decides where a result lies, or waits for one.
    ``enqueues``: whether it gives a device anything to do, as views and tuples do not. ``nest``: of a generated kernel,
    what it was written from.
    """

    kernel: Callable[..., Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    frees: tuple[int, ...]
    text: str
    on_slots: bool = False
    instruction: Instruction | None = field(default=None, repr=False)
    nested: tuple[Plan, ...] = ()
    enqueues: bool = True
    nest: Region | None = field(default=None, repr=False)

    def compiled(self) -> CompiledStep:
        result = self.results[0] if self.results else -1
        return self.kernel, None if self.on_slots else self.operands, result, self.frees


@dataclass(frozen=True, slots=True)
class ResultBuffer:
    """The slot in whose storage a result is made from the first step that fills it on, and what lies there first."""

    slot: int
    shape: ArrayShape

    def of(self, output: torch.Tensor) -> torch.Tensor:
        """The same storage as the slot has it; ``output`` is row major."""
        return output.view(-1).view(storage.dtype_of(self.shape.element_type)).view(self.shape.dims)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that steps take for the value of ``slot``, in use from step ``first`` through step ``last``, by position.
    Other slots may lie in it, too."""

    slot: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """``run`` may be called by several threads at once. A value of a tuple shape is passed as its leaves, in order."""

    name: str
    steps: tuple[Step, ...]
    parameters: Sequence[int]
    results: tuple[int, ...]
    result_buffers: Mapping[int, ResultBuffer]
    """For each slot that has one, where it is made, if whoever runs the plan may say where that is."""
    shapes: Sequence[ArrayShape | None]
    """Of what lies in each slot; None for a tuple, which is made for the step behind it."""
    initial: list[Any] = field(repr=False)
    """What lies in each slot before the first step: constants."""
    allocations: tuple[Allocation, ...] = ()
    """Of what is no result, in the order of ``first``; those of nested plans are theirs."""
    temporary_bytes: int = 0
    """Of an entry computation: the most bytes that live at once beside arguments, constants and results, those of
    nested plans included."""
    _compiled: tuple[CompiledStep, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", tuple(step.compiled() for step in self.steps))

    @property
    def result_shapes(self) -> tuple[ArrayShape, ...]:
        return self.shapes_of(self.results)

    def shapes_of(self, slots: Iterable[int]) -> tuple[ArrayShape, ...]:
        """Of slots that hold arrays."""
        shapes = [self.shapes[slot] for slot in slots]
        assert all(shape is not None for shape in shapes), f"{self.name} passes a tuple"
        return tuple(shape for shape in shapes if shape is not None)

    def run(
        self, run: Run, arguments: list[Any], outputs: Sequence[Any] = (), times: list[int] | None = None
    ) -> list[Any]:
        """Executes on the flat ``arguments`` and returns the flat results. Empties ``arguments``, so that the plan can
        free each at its last use. Callers enter torch.inference_mode() once per thread.

        ``outputs``: nothing, or an array for each result, where it is put if it has a result buffer; others lie
        elsewhere. ``times``: unless None, gets when each step begins and the last ends, in nanoseconds of the monotonic
        clock.
        """
        if len(arguments) != len(self.parameters):
            raise ValueError(f"{self.name} takes {len(self.parameters)} arrays, got {len(arguments)}")
        values = self.initial.copy()
        for slot in reversed(self.parameters):
            values[slot] = arguments.pop()
        if outputs:
            for slot, output in zip(self.results, outputs, strict=True):
                if result_buffer := self.result_buffers.get(slot):
                    values[result_buffer.slot] = result_buffer.of(output)
        for kernel, operands, result, frees in self._compiled if times is None else self._timed(times):
            if operands is None:
                kernel(run, values)
            else:
                values[result] = kernel(run, *[values[slot] for slot in operands])
            for slot in frees:
                values[slot] = None
        return [values[slot] for slot in self.results]

    def _timed(self, times: list[int]) -> Iterator[CompiledStep]:
        for step in self._compiled:
            times.append(time.monotonic_ns())
            yield step
        times.append(time.monotonic_ns())

    def step_of(self, failure: Exception) -> int | None:
        """The number of the step that ``failure`` came out of; None when it was none of this plan's."""
        for locals in _runs_of(failure):
            if locals["self"] is self:
                return _number_of(locals)
        return None

    def place_of(self, failure: Exception) -> str:
        """What the step, or the nested plan's step, computes that ``failure`` came out of; "" when it was none."""
        found = ""
        for locals in _runs_of(failure):
            number = _number_of(locals)
            if number is not None:
                found = locals["self"].steps[number].text
        return found

    def explain(self) -> str:
        """One line for each step: what it computes, what it writes over, what is free afterwards."""
        return "\n".join(self._lines(""))

    def _lines(self, indent: str) -> Iterator[str]:
        yield f"{indent}{self.name}: {len(self.parameters)} parameters, {len(self.steps)} steps"
        for step in self.steps:
            freed = f"  frees {', '.join(f'#{slot}' for slot in step.frees)}" if step.frees else ""
            yield f"{indent}  {step.text}{freed}"
            for plan in step.nested:
                yield from plan._lines(indent + "    ")
        yield f"{indent}  returns {', '.join(f'#{slot}' for slot in self.results)}"


def _runs_of(failure: Exception) -> Iterator[dict[str, Any]]:
    """The variables of the calls of Plan.run that ``failure`` came through, the outermost first."""
    trace = failure.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is Plan.run.__code__:
            yield trace.tb_frame.f_locals
        trace = trace.tb_next


def _number_of(locals: Mapping[str, Any]) -> int | None:
    """The step that a call of Plan.run was at. A kernel may serve several steps, each of which sets another slot."""
    at = (locals.get("kernel"), locals.get("result"))
    for number, (kernel, _, result, _) in enumerate(locals["self"]._compiled):
        if (kernel, result) == at:
            return number
    return None
