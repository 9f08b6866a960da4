"""Sums of exponentials below a maximum in the walk along a row that finds the maximum. What is summed so far is of the
maximum so far, and shrinks when that grows; each lane does this for a few elements at once, and at the end for all.
Used by writer.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flagos_backend.codegen.triton.elements import HALF, HELD_AS_F32, unconverted
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.literals import number_of, starts_neutral
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Reduce, Region

E = ElementType

#: How many elements that follow one another share a maximum and a sum: what a lane loads at once.
GROUP = 8


@dataclass(frozen=True, slots=True)
class Running:
    """What a sum of exp(x - m) waits for: ``most`` is the maximum of all x, and m is that; or, if it ``is_guarded``, 0
    in its stead where it is infinite or NaN."""

    most: Reduce
    is_guarded: bool

    def total(self, most: str, total: str) -> str:
        """What the sum is, by the texts of the maximum and of the sum of what is below it, where that is a number:
        without a largest number the program subtracts infinities, or adds one."""
        end, value = ("inf", "inf") if self.is_guarded else ("-inf", "nan")
        return f'tl.where({most} == float("{end}"), float("{value}"), {total})'


def difference(expression: Expression) -> tuple[Expression, Expression] | None:
    """x and y, where ``expression`` is exp(x - y)."""
    if not isinstance(expression, Apply) or expression.opcode is not Opcode.EXP:
        return None
    (operand,) = expression.operands
    if not isinstance(operand, Apply) or operand.opcode is not Opcode.SUBTRACT:
        return None
    x, y = operand.operands
    return x, y


def running_sums(region: Region) -> dict[Reduce, Running]:
    """Sums over rows, and what each waits for; not the same maximum for two of them. None of terms that are rounded to
    16 bits: they depend on the maximum of the whole row."""
    found: dict[Reduce, Running] = {}
    for reduction in region.reductions:
        running = None if _is_rounded(reduction) else as_running(reduction)
        if running is not None and all(running.most != other.most for other in found.values()):
            found[reduction] = running
    return found


def is_at_least_one(expression: Expression) -> bool:
    """Whether it is a sum of exponentials below their maximum, of which one is that of 0; or NaN. Finite all the same,
    also as bfloat16."""
    if isinstance(expression, Apply) and expression.opcode is Opcode.CONVERT and expression.element_type is E.BF16:
        (expression,) = expression.operands
    reduction = unconverted(expression)
    running = as_running(reduction) if isinstance(reduction, Reduce) and starts_neutral(reduction) else None
    return running is not None and not running.is_guarded


def exponential(reduction: Reduce) -> Apply:
    """What the terms of a running sum are, before they are converted to its type."""
    value = unconverted(reduction.value)
    assert isinstance(value, Apply) and difference(value)
    return Apply(value.element_type, Opcode.EXP, value.operands, Intrinsic.TERM) if value.detail else value


def as_running(reduction: Reduce) -> Running | None:
    """What ``reduction`` waits for, if it is a sum of exponentials below their maximum."""
    value = unconverted(reduction.value)
    parts = difference(value)
    if (
        reduction.combine is not Opcode.ADD
        or not {reduction.element_type, value.element_type} <= HELD_AS_F32
        or parts is None
    ):
        return None
    x, shift = parts
    guarded = _without_guard(shift)
    most = _as_reduction(guarded or shift)
    if most is None or most.combine is not Opcode.MAXIMUM or most.dims != reduction.dims or not starts_neutral(most):
        return None
    return Running(most, guarded is not None) if unconverted(most.value) == unconverted(x) else None


def _is_rounded(reduction: Reduce) -> bool:
    """Whether exponentials, or the differences that they are of, are of 16 bits."""
    value = unconverted(reduction.value)
    return value.element_type in HALF or any(operand.element_type in HALF for operand in value.operands)


def _without_guard(expression: Expression) -> Expression | None:
    """What ``expression`` is where that is finite, if it is 0 elsewhere."""
    expression = unconverted(expression)
    if not isinstance(expression, Apply) or expression.opcode is not Opcode.SELECT:
        return None
    condition, value, other = expression.operands
    is_guard = isinstance(condition, Apply) and condition.opcode is Opcode.IS_FINITE and condition.operands[0] == value
    return value if is_guard and isinstance(other, Literal) and number_of(other) == 0 else None


def _as_reduction(expression: Expression) -> Reduce | None:
    """The reduction that ``expression`` is the value of."""
    expression = unconverted(expression)
    if isinstance(expression, Apply) and expression.opcode is Opcode.MAXIMUM:
        others = [o for o in expression.operands if not (isinstance(o, Literal) and number_of(o) == -math.inf)]
        expression = unconverted(others[0]) if len(others) == 1 else expression
    return expression if isinstance(expression, Reduce) else None
