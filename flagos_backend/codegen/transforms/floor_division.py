"""Quotients and remainders that are rounded down, as Python's // and % of integers, become one operation each where the
divisor is a constant; frameworks write them with truncated ones. Just before a region is written down for the host."""

from __future__ import annotations

from collections.abc import Sequence

from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.literals import number_of
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced


def with_floors(region: Region) -> Region:
    """``region`` itself where it has no such quotient or remainder."""
    floors = {e: found for e in region.expressions() if (found := _floor(e)) is not None}

    def rounded_down(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        truncated = floors[expression]
        operands = tuple(moved[operand] for operand in truncated.operands)
        return pool.apply(Apply(truncated.element_type, truncated.opcode, (), Intrinsic.FLOOR), operands)

    return replaced(region, floors, rounded_down)


def _floor(expression: Expression) -> Apply | None:
    """The truncated quotient or remainder of which ``expression`` is the one that is rounded down."""
    if not _is(expression, Opcode.SELECT) or not expression.element_type.is_integer:
        return None
    condition, corrected, truncated = expression.operands
    divided = _by_literal(truncated, Opcode.DIVIDE) or _by_literal(truncated, Opcode.REMAINDER)
    if divided is None or not divided.element_type.is_signed or not _is(condition, Opcode.AND):
        return None
    x, divisor = divided.operands
    if divided.opcode is Opcode.REMAINDER:
        is_corrected = _is(corrected, Opcode.ADD) and set(corrected.operands) == {divided, divisor}
    else:
        is_corrected = _is_one_less(corrected, divided)
    for inexact, differs in (condition.operands, condition.operands[::-1]):
        remainder = _not_equal_to(inexact, 0)
        if remainder is None or not _same_operands(remainder, divided):
            continue
        if is_corrected and _differ_in_sign(differs, remainder if divided.opcode is Opcode.REMAINDER else x, divisor):
            return divided
    return None


def _is(expression: Expression, opcode: Opcode) -> bool:
    return isinstance(expression, Apply) and expression.opcode is opcode and not expression.detail


def _by_literal(expression: Expression, opcode: Opcode) -> Apply | None:
    if not isinstance(expression, Apply) or not _is(expression, opcode):
        return None
    divisor = expression.operands[1]
    return expression if isinstance(divisor, Literal) and number_of(divisor) else None


def _same_operands(remainder: Expression, divided: Apply) -> bool:
    return _is(remainder, Opcode.REMAINDER) and list(remainder.operands) == list(divided.operands)


def _is_one_less(expression: Expression, quotient: Apply) -> bool:
    for opcode, one in ((Opcode.SUBTRACT, 1), (Opcode.ADD, -1)):
        if _is(expression, opcode) and expression.operands[0] is quotient and _is_number(expression.operands[1], one):
            return True
    return False


def _is_number(expression: Expression, number: int) -> bool:
    return isinstance(expression, Literal) and number_of(expression) == number


def _comparison(expression: Expression, direction: Comparison) -> Sequence[Expression]:
    """What is compared in that direction; nothing for anything else."""
    if not isinstance(expression, Apply) or expression.opcode is not Opcode.COMPARE or expression.detail != direction:
        return ()
    return expression.operands


def _not_equal_to(expression: Expression, number: int) -> Expression | None:
    compared = _comparison(expression, Comparison.NE)
    return compared[0] if compared and _is_number(compared[1], number) else None


def _differ_in_sign(expression: Expression, value: Expression, divisor: Expression) -> bool:
    """Whether ``expression`` says that ``value`` and ``divisor`` differ in sign. 0 may do either."""
    assert isinstance(divisor, Literal)
    is_negative = number_of(divisor) < 0
    by_sign = _not_equal_to(expression, -1 if is_negative else 1)
    if by_sign is not None:
        return _is(by_sign, Opcode.SIGN) and by_sign.operands[0] is value
    by_order = _not_equal_to(expression, int(is_negative))
    below = _comparison(expression if by_order is None else by_order, Comparison.LT)
    return bool(below) and below[0] is value and _is_number(below[1], 0) and (by_order is not None or not is_negative)
