"""Arrays whose elements alternate, as an associative scan puts its results together: sums of two pads with zeros, each
of which has its elements where the other has none. Used by fuse.py and merge.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from flagos_backend.ir.attributes import PadAttributes
from flagos_backend.ir.elementwise import is_arithmetic
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.indexing import Indices, dims_of
from flagos_backend.loop_ir.literals import literal_of, uniform_literal
from flagos_backend.loop_ir.region import Apply, Expression

_JOINS = (Opcode.ADD, Opcode.OR)

Operands = Callable[[Instruction], Sequence[Instruction]]


@dataclass(frozen=True, slots=True)
class Part:
    """``operand``: whose elements begin at ``low`` of ``dimension`` and are ``step`` apart there."""

    operand: Instruction
    dimension: int
    low: int
    step: int

    def places(self, indices: Indices) -> Indices:
        """Where elements ``indices`` of the operand go."""
        moved = indices[self.dimension].scaled(self.step, self.low)
        return (*indices[: self.dimension], moved, *indices[self.dimension + 1 :])


def is_put_together(buffer: Instruction) -> bool:
    """Of one that several regions write: whether their parts do not meet."""
    return buffer.opcode in (Opcode.CONCATENATE, *_JOINS)


def interleaved(instruction: Instruction, operands: Operands) -> tuple[Part, ...] | None:
    """The parts of ``instruction``, which together have each of its elements once; None where it is no such sum."""
    if instruction.opcode not in _JOINS or not is_arithmetic(instruction):
        return None
    pads = operands(instruction)
    if len(pads) != 2 or any(pad.opcode is not Opcode.PAD for pad in pads):
        return None
    parts = [_part(pad, operands) for pad in pads]
    first, second = parts
    if first is None or second is None or first.dimension != second.dimension or first.step != second.step:
        return None
    elements = sum(prod(dims_of(part.operand)) for part in (first, second))
    apart = first.low % first.step != second.low % second.step
    return (first, second) if apart and elements == prod(dims_of(instruction)) else None


def _part(pad: Instruction, operands: Operands) -> Part | None:
    """What ``pad`` pads with zeros, along one dimension, and between elements too."""
    array, padding = operands(pad)
    attributes, zero = pad.attributes_as(PadAttributes), uniform_literal(padding)
    if zero is None or any(zero.data) or 0 in dims_of(array):
        return None
    sides = list(zip(attributes.low, attributes.high, attributes.interior, strict=True))
    padded = [d for d, side in enumerate(sides) if any(side)]
    if len(padded) != 1 or min(sides[padded[0]]) < 0 or not sides[padded[0]][2]:
        return None
    low, _, interior = sides[padded[0]]
    return Part(array, padded[0], low, interior + 1)


def joined(value: Expression, instruction: Instruction) -> Expression:
    """What ``instruction``, of which the other part is zero there, makes of ``value``: a sum makes -0 to 0."""
    if instruction.opcode is not Opcode.ADD or not value.element_type.is_float:
        return value
    return Apply(value.element_type, Opcode.ADD, (value, literal_of(0, value.element_type)))
