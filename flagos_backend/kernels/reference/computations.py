"""Recognises the plain ones among the scalar functions that an instruction calls."""

from __future__ import annotations

from flagos_backend.ir.hlo import Computation, parameter_number
from flagos_backend.ir.opcode import Opcode

_COMMUTATIVE = frozenset(
    {Opcode.ADD, Opcode.MULTIPLY, Opcode.MAXIMUM, Opcode.MINIMUM, Opcode.AND, Opcode.OR, Opcode.XOR}
)


def plain_combiner(computation: Computation) -> Opcode | None:
    """The opcode of a function (a, b) that is one commutative operation on both; None when it is something else."""
    root = computation.root
    if root.opcode not in _COMMUTATIVE:
        return None
    return root.opcode if {parameter_number(operand) for operand in root.operands} == {0, 1} else None


def returned_parameter(computation: Computation) -> int | None:
    """The number of the parameter that the function hands back unchanged, or None."""
    root = computation.root
    while root.opcode is Opcode.COPY:
        root = root.operands[0]
    return parameter_number(root)
