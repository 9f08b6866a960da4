"""Powers of x whose exponent is half an odd number, as forces between particles have them, become products of a root: a
tenth of the instructions, and no branch. Of float32; the error is that of the root, once for each factor."""

from __future__ import annotations

import math

from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.literals import literal_of, number_of
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced

# Twice the exponents: with more factors the error would be more than a power's own formula has. That of 1 is a root in
# the graph already.
_HALVES = frozenset({-3, -1, 3})


def _halves(expression: Expression) -> int | None:
    """Twice the exponent of a power as above; None for anything else."""
    if not isinstance(expression, Apply) or expression.opcode is not Opcode.POWER:
        return None
    exponent = expression.operands[1]
    if expression.element_type is not ElementType.F32 or not isinstance(exponent, Literal):
        return None
    twice = 2 * float(number_of(exponent))
    return int(twice) if twice in _HALVES else None


def with_roots(region: Region) -> Region:
    """``region`` itself where it has no such power."""
    found = {e: halves for e in region.expressions() if (halves := _halves(e)) is not None}

    def power(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        x, halves = moved[expression.operands[0]], found[expression]

        def apply(opcode: Opcode, *operands: Expression) -> Expression:
            return pool.apply(Apply(ElementType.F32, opcode, operands), operands)

        root = apply(Opcode.RSQRT if halves < 0 else Opcode.SQRT, x)
        # A root of -0 is -0, or -infinity; a power is never negative.
        value = apply(Opcode.ABS, root)
        if abs(halves) == 3:
            factor = apply(Opcode.MULTIPLY, root, root) if halves < 0 else apply(Opcode.ABS, x)
            value = apply(Opcode.MULTIPLY, value, factor)
        # Of -infinity a power is what it is of infinity.
        least = literal_of(-math.inf, ElementType.F32)
        is_least = Apply(ElementType.PRED, Opcode.COMPARE, (x, least), "EQ")
        limit = literal_of(0.0 if halves < 0 else math.inf, ElementType.F32)
        return apply(Opcode.SELECT, pool.apply(is_least, is_least.operands), limit, value)

    return replaced(region, found, power)
