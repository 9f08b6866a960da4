"""What fusion decides: loop nests and library calls, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from flagos_backend.fusion.updates import sources, targets
from flagos_backend.ir.hlo import Instruction
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.indexing import View
from flagos_backend.loop_ir.region import Region


@dataclass(frozen=True, slots=True)
class Schedule:
    """What to run, in order. ``buffers`` maps an instruction to the one whose buffer holds its value (itself, or the
    operand of a reshape that costs nothing). ``views``: operands of library calls, by their number, that have none."""

    items: tuple[Region | Instruction, ...]
    buffers: dict[Instruction, Instruction] = field(repr=False)
    views: dict[tuple[Instruction, int], View] = field(repr=False, default_factory=dict)

    def reads(self, computation: FlatComputation, item: Region | Instruction) -> tuple[Instruction, ...]:
        """The buffers that ``item``, of a schedule of ``computation``, loads or takes."""
        if isinstance(item, Region):
            return sources(item)
        operands = computation.operands(item)
        views = (self.views.get((item, number)) for number in range(len(operands)))
        return tuple(v.buffer if v else self.buffers[o] for o, v in zip(operands, views, strict=True))

    def writes(self, computation: FlatComputation, item: Region | Instruction) -> tuple[Instruction, ...]:
        """The buffers that ``item`` makes, or a part of each."""
        return targets(item) if isinstance(item, Region) else computation.leaves_of[item]
