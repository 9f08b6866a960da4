"""What the kernels of a program may be, before any of them is taken. Between the schedules of its computations and
accelerator_plan.py.

Compiling takes longest of all that an accelerator's first call does. So whatever may be needed, of every computation
that the program runs, is compiled at once, side by side, and measured one after the other meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from flagos_backend.codegen.triton import Measurement, RegionKernel, RegionKernels, schedule, warm_up_together
from flagos_backend.compile.memory_order import ordered_by_memory
from flagos_backend.compile.overlap import Wait, overlapped
from flagos_backend.compile.plan_builder import RUN_OTHERS, WITHOUT_KERNEL
from flagos_backend.devices.target import Target
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.updates import Item, copied
from flagos_backend.ir.attributes import WhileAttributes
from flagos_backend.ir.effects import Effects
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.choice import Candidates, Choice, candidates
from flagos_backend.kernels.implementation import signature_of
from flagos_backend.loop_ir.flat import FlatComputation, flatten
from flagos_backend.loop_ir.region import Region
from flagos_backend.process.torch_loading import torch


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A computation as kernels: ``items`` in the order in which they run. ``temporary_bytes``,
    ``handed_on``: as of Ordered."""

    flat: FlatComputation
    schedule: Schedule
    items: tuple[Item | Wait, ...]
    temporary_bytes: int
    handed_on: int


class KernelCandidates:
    """Of one program on one target; ``excess_precision`` as in codegen/transforms/excess_precision.py. Its methods
    raise what codegen and ``candidates`` raise."""

    def __init__(self, target: Target, excess_precision: bool) -> None:
        self._target, self._excess_precision = target, excess_precision
        self._scheduled: dict[Computation, Scheduled] = {}
        self._regions: dict[int, RegionKernels] = {}  # by the identity of a region in ``_scheduled``
        self._calls: dict[Instruction, Candidates] = {}
        self._fastest: dict[int, RegionKernel] = {}  # as _regions
        self._chosen: dict[Instruction, Choice] = {}

    def scheduled(self, computation: Computation) -> Scheduled:
        found = self._scheduled.get(computation)
        if found is None:
            flat = flatten(computation)
            ordered = ordered_by_memory(flat, schedule(flat, self._target), self._bytes_of_called)
            items = overlapped(flat, ordered.schedule)
            found = self._scheduled[computation] = Scheduled(
                flat, ordered.schedule, items, ordered.peak, ordered.handed_on
            )
        return found

    def _bytes_of_called(self, instruction: Instruction) -> int:
        """Of the computations that the plan of ``instruction`` runs; scalar functions of kernels take nothing. A loop
        has what an iteration hands on beside what it was given."""
        run = _run_by(instruction) if instruction.opcode in RUN_OTHERS else ()
        scheduled = [self.scheduled(computation) for computation in run]
        twice = scheduled[-1].handed_on if instruction.opcode is Opcode.WHILE else 0
        return max((each.temporary_bytes for each in scheduled), default=0) + twice

    def region_kernel(self, region: Region) -> RegionKernel:
        """The kernel of a region of ``scheduled``."""
        found = self._fastest.get(id(region))
        if found is None:
            found = self._fastest[id(region)] = self._region(region).fastest()
        return found

    def choice(self, instruction: Instruction) -> Choice:
        """The kernel of a library instruction."""
        found = self._chosen.get(instruction)
        if found is None:
            found = self._chosen[instruction] = self._call(instruction).choose()
        return found

    def warm_up(self, computation: Computation, device: torch.device) -> None:
        """Returns when all that ``region_kernel`` and ``choice`` need is compiled, of ``computation`` and of what it
        runs, and measured. What fails is left to who needs it, who reports it."""
        kernels: list[RegionKernel] = []
        warm_ups: dict[str, Callable[[], object]] = {}
        measurements: list[Measurement] = []
        waiting, seen = [computation], {computation}
        while waiting:
            for item in self.scheduled(waiting.pop()).items:
                if isinstance(item, Region):
                    if copied(item) is None:
                        awaited = self._region(item).awaited
                        kernels += awaited
                        if len(self._region(item).kernels) > 1:
                            measurements.append(Measurement(partial(self.region_kernel, item), awaited))
                elif not isinstance(item, Wait) and item.opcode in RUN_OTHERS:
                    run = [c for c in dict.fromkeys(_run_by(item)) if c not in seen]
                    waiting += run
                    seen.update(run)
                elif not isinstance(item, Wait) and item.opcode not in WITHOUT_KERNEL:
                    text = "; ".join(signature_of(item))
                    call = self._call(item)
                    own = {f"{text}; {name}": warm_up for name, warm_up in call.warm_ups.items()}
                    warm_ups |= own
                    if call.several:
                        measurements.append(Measurement(partial(self.choice, item), warm_ups=own))
        warm_up_together(kernels, warm_ups, device, measurements)

    def _region(self, region: Region) -> RegionKernels:
        found = self._regions.get(id(region))
        if found is None:
            found = RegionKernels.of(region, self._target, excess_precision=self._excess_precision)
            self._regions[id(region)] = found
        return found

    def _call(self, instruction: Instruction) -> Candidates:
        if instruction not in self._calls:
            self._calls[instruction] = candidates(instruction, self._target)
        return self._calls[instruction]


def _run_by(instruction: Instruction) -> Sequence[Computation]:
    """A loop of so many iterations needs no condition, unless that has effects."""
    is_counted = (
        instruction.opcode is Opcode.WHILE
        and instruction.attributes_as(WhileAttributes).trip_count is not None
        and not Effects().of_computation(instruction.called[0])
    )
    return instruction.called[1:] if is_counted else instruction.called
