"""log(x) / log(2), as frameworks write a logarithm to base 2, becomes one operation: it rounds once, and is exact at
powers of two. Just before a region is written down, for hosts and accelerators."""

from __future__ import annotations

import math

from flagos_backend.fusion.literals import number_of
from flagos_backend.fusion.region import Apply, Expression, Literal, Region
from flagos_backend.fusion.rewriting import Pool, rewrite, rewrite_store, unmoved
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType

#: The ``detail`` of a LOG to base 2.
BASE_TWO = "2"
_DIGITS = {ElementType.BF16: 8, ElementType.F16: 11, ElementType.F32: 24, ElementType.F64: 53}


def _rounded(value: float, digits: int) -> float:
    """A number between 1/2 and 1 to that many binary digits."""
    return round(value * 2.0**digits) / 2.0**digits


def _argument(expression: Expression) -> Expression | None:
    """x of log(x) / log(2), the constant rounded to the type; None for anything else."""
    if not isinstance(expression, Apply) or expression.opcode is not Opcode.DIVIDE:
        return None
    log, base = expression.operands
    if not isinstance(log, Apply) or log.opcode is not Opcode.LOG or log.detail or not isinstance(base, Literal):
        return None
    digits = _DIGITS.get(expression.element_type)
    if digits is None or number_of(base) != _rounded(math.log(2), digits):
        return None
    return log.operands[0]


def with_base_two(region: Region) -> Region:
    """``region`` itself where it has no such quotient."""
    expressions = region.expressions()
    if not any(_argument(expression) is not None for expression in expressions):
        return region
    pool = Pool()
    moved: dict[Expression, Expression] = {}

    def replace(expression: Expression) -> Expression | None:
        argument = _argument(expression)
        if argument is None:
            return None
        return pool.apply(Apply(argument.element_type, Opcode.LOG, (), BASE_TWO), (moved[argument],))

    rewrite(expressions, pool, unmoved, lambda dims: dims, replace, moved)
    return Region(region.dims, tuple(rewrite_store(s, unmoved, moved) for s in region.stores))
