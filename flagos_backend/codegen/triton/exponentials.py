"""Exponentials of what lies below a row's maximum, in fewer instructions than others. Just before a region is written
down for an accelerator that has the function."""

from __future__ import annotations

from flagos_backend.codegen.triton.elements import HELD_AS_F32, unconverted
from flagos_backend.fusion.region import Apply, Expression, Fold, Region
from flagos_backend.fusion.rewriting import Moved, Pool, replaced
from flagos_backend.ir.opcode import Opcode

#: The ``detail`` of an EXP whose operand is known to be 0, below, or NaN.
BELOW = "below"


def below_maximum(region: Region) -> Region:
    """``region`` itself where there is no such exponential."""

    def below(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        return pool.apply(Apply(expression.element_type, Opcode.EXP, (), BELOW), (moved[expression.operands[0]],))

    return replaced(region, {e for e in region.expressions() if is_below(e)}, below)


def difference(expression: Expression) -> tuple[Expression, Expression] | None:
    """x and y, where ``expression`` is exp(x - y)."""
    if not isinstance(expression, Apply) or expression.opcode is not Opcode.EXP:
        return None
    (operand,) = expression.operands
    if not isinstance(operand, Apply) or operand.opcode is not Opcode.SUBTRACT:
        return None
    x, y = operand.operands
    return x, y


def is_below(expression: Expression) -> bool:
    """Whether it is exp(x - m), m being the maximum of what x is one of, or more."""
    parts = difference(expression)
    if parts is None or expression.element_type not in HELD_AS_F32:
        return False
    x, most = parts
    known = {x, unconverted(x)}
    return any(fold.value in known or unconverted(fold.value) in known for fold in _maxima(most))


def _maxima(expression: Expression) -> list[Fold]:
    """The maxima that ``expression`` is not below."""
    expression = unconverted(expression)
    if isinstance(expression, Fold):
        return [expression] if expression.combine is Opcode.MAXIMUM else []
    if isinstance(expression, Apply) and expression.opcode is Opcode.MAXIMUM:
        return [fold for operand in expression.operands for fold in _maxima(operand)]
    return []
