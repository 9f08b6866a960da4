"""log(x) / log(2) and log(x) * (1 / log(2)), as frameworks write a logarithm to base 2, become one operation: it rounds
once, and is exact at powers of two. Of 16-bit floats only where excess precision is allowed, as two operations round
twice. Just before a region is written down, for hosts and accelerators."""

from __future__ import annotations

import math

from flagos_backend.codegen.transforms.excess_precision import HALF
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.literals import number_of
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced

_DIGITS = {ElementType.BF16: 8, ElementType.F16: 11, ElementType.F32: 24, ElementType.F64: 53}


#: What a logarithm is divided by or multiplied by. jax.numpy.log2 divides up to JAX 0.10, and multiplies from 0.11 on.
_CONSTANTS = {Opcode.DIVIDE: math.log(2), Opcode.MULTIPLY: 1 / math.log(2)}


def _rounded(value: float, digits: int) -> float:
    """A number to that many binary digits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, digits)), exponent - digits)


def _argument(expression: Expression) -> Expression | None:
    """x of a quotient or product as above, the constant rounded to the type; None for anything else."""
    if not isinstance(expression, Apply) or expression.opcode not in _CONSTANTS:
        return None
    log, constant = expression.operands
    if expression.opcode is Opcode.MULTIPLY and isinstance(log, Literal):
        log, constant = constant, log
    if not isinstance(log, Apply) or log.opcode is not Opcode.LOG or log.detail or not isinstance(constant, Literal):
        return None
    digits = _DIGITS.get(expression.element_type)
    if digits is None or number_of(constant) != _rounded(_CONSTANTS[expression.opcode], digits):
        return None
    return log.operands[0]


def with_base_two(region: Region, excess_precision: bool = False) -> Region:
    """``region`` itself where it has no such quotient or product."""
    allowed = [e for e in region.expressions() if excess_precision or e.element_type not in HALF]
    arguments = {e: argument for e in allowed if (argument := _argument(e)) is not None}

    def logarithm(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        argument = arguments[expression]
        return pool.apply(Apply(argument.element_type, Opcode.LOG, (), Intrinsic.BASE_TWO), (moved[argument],))

    return replaced(region, arguments, logarithm)
