"""Exponentials of what lies below a row's maximum, in fewer instructions than others, and in fewest where they are
summed up or rounded to 16 bits. Just before a region is written down for an accelerator that has the functions."""

from __future__ import annotations

from flagos_backend.codegen.triton.elements import HELD_AS_F32, unconverted
from flagos_backend.codegen.triton.loop_transforms.rounding import rounded_away
from flagos_backend.codegen.triton.loop_transforms.running import as_running, difference
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.region import Apply, Expression, Reduce, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced


def below_maximum(region: Region) -> Region:
    """``region`` itself where there is no such exponential. The terms of a guarded sum (``Running``) may be of more
    than 0 where the maximum is infinite, and so is the sum."""
    terms = {unconverted(reduction.value) for reduction in region.reductions if as_running(reduction)}
    below = {e for e in region.expressions() if is_below(e)}
    rounded = rounded_away(region) if terms or below else set()

    def cheaper(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        detail = Intrinsic.TERM if expression in rounded else Intrinsic.BELOW
        return pool.apply(Apply(expression.element_type, Opcode.EXP, (), detail), (moved[expression.operands[0]],))

    return replaced(region, below | terms & rounded, cheaper)


def is_below(expression: Expression) -> bool:
    """Whether it is exp(x - m), m being the maximum of what x is one of, or more."""
    parts = difference(expression)
    if parts is None or expression.element_type not in HELD_AS_F32:
        return False
    x, most = parts
    known = {x, unconverted(x)}
    return any(reduction.value in known or unconverted(reduction.value) in known for reduction in _maxima(most))


def _maxima(expression: Expression) -> list[Reduce]:
    """The maxima that ``expression`` is not below."""
    expression = unconverted(expression)
    if isinstance(expression, Reduce):
        return [expression] if expression.combine is Opcode.MAXIMUM else []
    if isinstance(expression, Apply) and expression.opcode is Opcode.MAXIMUM:
        return [reduction for operand in expression.operands for reduction in _maxima(operand)]
    return []
