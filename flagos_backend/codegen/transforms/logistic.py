"""1 / (1 + exp(-x)), as frameworks write the logistic function, becomes one operation, which rounds once and does not
overflow on the way. Of 16-bit floats only where excess precision is allowed. Just before a region is written down for
the host."""

from __future__ import annotations

from collections import Counter

from flagos_backend.codegen.transforms.excess_precision import HALF
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.literals import number_of
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced


def with_logistics(region: Region, excess_precision: bool = False) -> Region:
    """``region`` itself where it has no such quotient, or reads its parts elsewhere."""
    allowed = [e for e in region.expressions() if excess_precision or e.element_type not in HALF]
    arguments = {e: x for e in allowed if (x := _argument(e, region.uses)) is not None}

    def logistic(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        argument = arguments[expression]
        return pool.apply(Apply(argument.element_type, Opcode.LOGISTIC, ()), (moved[argument],))

    return replaced(region, arguments, logistic)


def _argument(expression: Expression, uses: Counter[Expression]) -> Expression | None:
    """x of a quotient as above; None for anything else."""
    quotient = _operation(expression, Opcode.DIVIDE)
    if quotient is None or not quotient.element_type.is_float or not _is_one(quotient.operands[0]):
        return None
    divisor = _operation(quotient.operands[1], Opcode.ADD)
    if divisor is None or uses[divisor] != 1 or not any(_is_one(o) for o in divisor.operands):
        return None
    exponential = next((e for o in divisor.operands if (e := _operation(o, Opcode.EXP)) is not None), None)
    if exponential is None or uses[exponential] != 1:
        return None
    negated = _operation(exponential.operands[0], Opcode.NEGATE)
    return None if negated is None else negated.operands[0]


def _operation(expression: Expression, opcode: Opcode) -> Apply | None:
    is_one = isinstance(expression, Apply) and expression.opcode is opcode and not expression.detail
    return expression if is_one and isinstance(expression, Apply) else None


def _is_one(expression: Expression) -> bool:
    return isinstance(expression, Literal) and expression.element_type.is_float and number_of(expression) == 1
