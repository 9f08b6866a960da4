"""Sums of exponentials below a maximum in the walk along a row that finds the maximum. What is summed so far is of the
maximum so far, and shrinks when that grows; each lane does this for a few elements at once, and at the end for all.
Used by writer.py."""

from __future__ import annotations

import math

from flagos_backend.codegen.triton.exponentials import unconverted
from flagos_backend.fusion.literals import number_of, starts_neutral
from flagos_backend.fusion.region import Apply, Expression, Fold, Literal, Region
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType

#: How many elements that follow one another share a maximum and a sum: what a lane loads at once.
GROUP = 8
_HELD_AS_F32 = frozenset({ElementType.F32, ElementType.F16, ElementType.BF16})


def running_sums(region: Region) -> dict[Fold, Fold]:
    """Sums over rows, and the maximum that each waits for; none that another sum waits for as well."""
    found: dict[Fold, Fold] = {}
    for fold in region.folds:
        most = _maximum_of(fold)
        if most is not None and most not in found.values():
            found[fold] = most
    return found


def exponential(fold: Fold) -> Apply:
    """What the terms of a running sum are, before they are converted to its type."""
    value = unconverted(fold.value)
    assert isinstance(value, Apply) and value.opcode is Opcode.EXP
    return value


def _maximum_of(fold: Fold) -> Fold | None:
    """The maximum m where ``fold`` is a sum of exp(x - m), and m that of all x."""
    value = unconverted(fold.value)
    if fold.combine is not Opcode.ADD or fold.element_type not in _HELD_AS_F32:
        return None
    if not isinstance(value, Apply) or value.opcode is not Opcode.EXP or value.element_type not in _HELD_AS_F32:
        return None
    (operand,) = value.operands
    if not isinstance(operand, Apply) or operand.opcode is not Opcode.SUBTRACT:
        return None
    x, most = operand.operands[0], _as_fold(operand.operands[1])
    if most is None or most.combine is not Opcode.MAXIMUM or most.dims != fold.dims or not starts_neutral(most):
        return None
    return most if unconverted(most.value) == unconverted(x) else None


def _as_fold(expression: Expression) -> Fold | None:
    """The fold that ``expression`` is the value of."""
    expression = unconverted(expression)
    if isinstance(expression, Apply) and expression.opcode is Opcode.MAXIMUM:
        others = [o for o in expression.operands if not (isinstance(o, Literal) and number_of(o) == -math.inf)]
        expression = unconverted(others[0]) if len(others) == 1 else expression
    return expression if isinstance(expression, Fold) else None
