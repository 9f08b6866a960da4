"""Excess precision: 16-bit results that keep float32's digits from one operation of a kernel to the next. Only where
the user allows it; just before a region is written down, for hosts and accelerators.

Without it a region is computed as it stands: each 16-bit result is rounded to its type, whatever reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.literals import literal_of, number_of
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Reduce, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced

HALF = frozenset({ElementType.F16, ElementType.BF16})
# What these make of 16-bit floats is one of the operands, or that with another sign: as many digits as they have.
_CHOICES = frozenset(
    {Opcode.ABS, Opcode.NEGATE, Opcode.MAXIMUM, Opcode.MINIMUM, Opcode.CLAMP, Opcode.SELECT},
)
# What these make fits the type of their operands. A small change of an operand may move the result by a whole step.
_JUMPS = frozenset(
    {Opcode.CEIL, Opcode.FLOOR, Opcode.ROUND_AFZ, Opcode.ROUND_EVEN, Opcode.SIGN, Opcode.REMAINDER},
)
# What rounds by itself.
_CONVERSIONS = frozenset({Opcode.CONVERT, Opcode.BITCAST_CONVERT})


def rounds(expression: Expression) -> bool:
    """Whether it is an operation on 16-bit floats whose exact result its type may not hold."""
    if not isinstance(expression, Apply) or expression.element_type not in HALF:
        return False
    return expression.opcode not in _CHOICES | _JUMPS | _CONVERSIONS


def with_excess_precision(region: Region) -> Region:
    """``region`` with operations on 16-bit floats as operations on float32 where others read the result, or are read.

    Rounded they are all the same where they are stored, where the program converts to 16 bits, where the result jumps
    (comparisons, whole numbers), in reductions, of which a maximum is one of its elements, and as the terms of a
    difference that an exponential takes, which would make a factor of what is not rounded off.
    """
    expressions = region.expressions()
    rounded = _rounded_first(expressions)
    long = _with_digits(expressions)
    kept = long - rounded
    readers = {e for e in expressions if e in long or _widens(e)}
    read = {operand for e in readers for operand in e.operands if operand in kept}
    wide = {e for e in long if e in read or not kept.isdisjoint(e.operands)}
    held: dict[Expression, Expression] = {}

    def in_f32(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        if expression in held:
            return held[expression]
        if isinstance(expression, Literal) and expression.element_type in HALF:
            return literal_of(number_of(expression), ElementType.F32)
        if expression.element_type in HALF:
            return pool.apply(Apply(ElementType.F32, Opcode.CONVERT, ()), (moved[expression],))
        return moved[expression]  # what a select goes by

    def make(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        assert isinstance(expression, Apply)
        operands = tuple(in_f32(operand, moved, pool) for operand in expression.operands)
        if expression.opcode is Opcode.CONVERT:
            is_same = expression.element_type is ElementType.F32
            return operands[0] if is_same else pool.apply(expression, operands)
        value = pool.apply(Apply(ElementType.F32, expression.opcode, (), expression.detail, expression.order), operands)
        if expression not in rounded:
            held[expression] = value
        return pool.apply(Apply(expression.element_type, Opcode.CONVERT, ()), (value,))

    conversions = {e for e in readers - long if not kept.isdisjoint(e.operands)}
    return replaced(region, wide | conversions, make)


def _with_digits(expressions: Sequence[Expression]) -> set[Expression]:
    """16-bit floats that have more digits before they are rounded; ``expressions``: operands first."""
    found: set[Expression] = set()
    for e in expressions:
        chooses = isinstance(e, Apply) and e.element_type in HALF and e.opcode in _CHOICES
        if rounds(e) or (chooses and not found.isdisjoint(e.operands)):
            found.add(e)
    return found


def _widens(expression: Expression) -> bool:
    """Whether it converts to another float."""
    is_conversion = isinstance(expression, Apply) and expression.opcode is Opcode.CONVERT
    return is_conversion and expression.element_type.is_float


def _rounded_first(expressions: Collection[Expression]) -> set[Expression]:
    """What is rounded for all who read it, so that they read one number."""
    found: set[Expression] = set()
    for e in expressions:
        if isinstance(e, Reduce):
            found |= set(e.operands)
        elif isinstance(e, Apply) and e.opcode is Opcode.EXP:
            (operand,) = e.operands
            if isinstance(operand, Apply) and operand.opcode is Opcode.SUBTRACT:
                found |= set(operand.operands)
    return found
