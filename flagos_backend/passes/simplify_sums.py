"""The rule of the pass simplify for sums of rows that are a multiple of a one-hot row, as the gradient of a
cross-entropy has them: all numbers but one are zeros, so that the sum is that one."""

from __future__ import annotations

from flagos_backend.ir.attributes import DimensionsAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.one_hot import ADDABLE, Rows, adds
from flagos_backend.passes.rewrite import Emitter, Rule, array_shape


def _reduce(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    """A sum of multiples of a one-hot row is one multiple, and one more of what all the others are: a zero, or the NaN
    that a number which is not finite makes of it."""
    dims = instruction.attributes_as(DimensionsAttributes).dimensions
    if len(dims) != 1 or len(instruction.operands) != 2 or not adds(instruction.called[0]):
        return None
    value, initial = instruction.operands
    shape = array_shape(value)
    row = Rows(dims[0], shape.dims, emitter, instruction)
    if shape.element_type not in ADDABLE or row.size < 2 or not row.is_multiple(value):
        return None
    total = emitter.emit(Opcode.BROADCAST, instruction.shape, (initial,), DimensionsAttributes(()), like=instruction)
    for hit in (True, False):
        part = row.sole(value, hit=hit)
        total = emitter.emit(Opcode.ADD, instruction.shape, (total, part), like=instruction)
    return total


RULES: dict[Opcode, Rule] = {Opcode.REDUCE: _reduce}
