"""Quotients by what many numbers share: its reciprocal once, then a product and a correction for each number, where a
correctly rounded division takes thrice the instructions. And quotients that a row shares: without a branch, ahead of
which compilers would compute, and hold, what follows for each element. Just before a region is written down for an
accelerator. A sum of exponentials below their maximum is one at least, and needs no scale."""

from __future__ import annotations

import math
import struct
from math import prod

from flagos_backend.codegen.triton.elements import HELD_AS_F32
from flagos_backend.codegen.triton.loop_transforms.exponentials import is_below
from flagos_backend.codegen.triton.loop_transforms.rounding import rounded_away
from flagos_backend.codegen.triton.loop_transforms.running import is_at_least_one
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.literals import literal_of, number_of
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced

E = ElementType
# Numbers to a divisor from which on its reciprocal pays.
_LEAST_SHARING = 16


def with_reciprocals(region: Region) -> Region:
    """``region`` itself where no divisor is shared."""
    shared = {e for e in region.expressions() if isinstance(e, Apply) and _is_shared(e, region)}
    rounded = rounded_away(region) if shared else set()
    return replaced(region, shared, lambda e, moved, pool: _by_reciprocal(e, e in rounded, moved, pool))


def _by_reciprocal(expression: Expression, is_rounded_away: bool, moved: Moved, pool: Pool) -> Expression:
    """In float32, and rounded once to the type of ``expression``."""

    def apply(opcode: Opcode, *operands: Expression, form: str = "") -> Expression:
        return pool.apply(Apply(E.F32, opcode, (), form), operands)

    def rounded(value: Expression) -> Expression:
        to = expression.element_type
        return value if to is E.F32 else pool.apply(Apply(to, Opcode.CONVERT, ()), (value,))

    dividend, divisor = (_in_f32(moved[operand], pool) for operand in expression.operands)
    if (exact := _exact_inverse(divisor)) is not None:
        return rounded(apply(Opcode.MULTIPLY, dividend, exact))
    by_sum = is_at_least_one(expression.operands[1])
    quotient = Intrinsic.BY_SUM if by_sum and is_below(expression.operands[0]) else Intrinsic.CORRECTED
    if not by_sum:
        scale = apply(Opcode.DIVIDE, divisor, form=Intrinsic.SCALE)
        dividend, divisor = apply(Opcode.MULTIPLY, dividend, scale), apply(Opcode.MULTIPLY, divisor, scale)
    inverse = apply(Opcode.DIVIDE, _literal(1.0), divisor)
    # Quotients of BF16 are 2**-17 of themselves away from a tie, or exact. Those of F16 are as near as the error of the
    # product; those of exponentials in float32 are hardly further off where a tie is rounded the other way.
    is_near = expression.element_type is E.BF16 or (expression.element_type is E.F32 and quotient is Intrinsic.BY_SUM)
    if is_rounded_away and is_near:
        return rounded(apply(Opcode.MULTIPLY, dividend, inverse))
    return rounded(apply(Opcode.DIVIDE, dividend, divisor, inverse, form=quotient))


def _in_f32(expression: Expression, pool: Pool) -> Expression:
    """A float of up to 32 bits as the same number of float32."""
    if expression.element_type is E.F32:
        return expression
    if isinstance(expression, Literal):
        return literal_of(number_of(expression), E.F32)
    return pool.apply(Apply(E.F32, Opcode.CONVERT, ()), (expression,))


def without_branches(region: Region) -> Region:
    """``region`` with straight quotients where a row shares them."""
    rows = {frozenset(reduction.dims) for reduction in region.reductions}
    quotients = [e for e in region.expressions() if isinstance(e, Apply) and _is_plain_quotient(e)]
    return replaced(region, {e for e in quotients if any(not region.reach[e] & row for row in rows)}, _straight)


def _straight(expression: Expression, moved: Moved, pool: Pool) -> Expression:
    straight = Apply(expression.element_type, Opcode.DIVIDE, (), Intrinsic.STRAIGHT)
    return pool.apply(straight, tuple(moved[operand] for operand in expression.operands))


def _is_plain_quotient(expression: Apply) -> bool:
    return expression.opcode is Opcode.DIVIDE and expression.element_type in HELD_AS_F32 and not expression.detail


def _is_shared(expression: Apply, region: Region) -> bool:
    if not _is_plain_quotient(expression):
        return False
    divisor = expression.operands[1]
    if prod(region.dims[d] for d in region.reach[expression] - region.reach[divisor]) < _LEAST_SHARING:
        return False
    # What is the same along a row costs little, however it is computed.
    row = frozenset(region.reduced)
    return not row or bool(region.reach[expression] & row) or _exact_inverse(divisor) is not None


def _exact_inverse(divisor: Expression) -> Literal | None:
    """Of a power of two whose inverse is one as well: products with it are quotients."""
    if not isinstance(divisor, Literal):
        return None
    value = float(number_of(divisor))
    if not math.isfinite(value) or abs(math.frexp(value)[0]) != 0.5 or not 2.0**-126 <= abs(value) <= 2.0**126:
        return None
    return _literal(1.0 / value)


def _literal(value: float) -> Literal:
    return Literal(E.F32, struct.pack("<f", value))
