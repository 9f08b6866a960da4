"""Piecewise polynomials of two pieces, of which a comparison chooses each coefficient, and the argument, as in the
inverse of the error function that normal random numbers are made of. Just before a region is written down for NVIDIA's
chips, where a choice takes as long as two multiply-adds, and correct rounding of what is rounded again longer than all
of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.literals import literal_of, number_of
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced

E = ElementType
O = Opcode  # noqa: E741
# Multiply-adds from which on a polynomial is computed twice.
_LEAST_DEGREE = 2


def chosen_last(region: Region) -> Region:
    """``region`` with both pieces computed, and one chosen after: the same numbers. Itself where there are none."""
    steps = {e: step for e in region.expressions() if (step := _step_of(e)) is not None}
    inner = {s.sum for s in steps.values() if region.uses[s.sum] == 1 and _follows(s, steps.get(s.sum))}

    def polynomial(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        argument = steps[expression].argument
        constants: list[Apply] = []
        while expression in steps and (not constants or expression in inner):
            constants.append(steps[expression].constants)
            expression = steps[expression].sum
        choice, *arguments = (moved[operand] for operand in argument.operands)
        pieces = []
        for piece, x in enumerate(arguments):
            value = moved[_piece(expression, argument, piece)]
            for pair in reversed(constants):
                value = pool.apply(_F32[O.MULTIPLY], (value, x))
                value = pool.apply(_F32[O.ADD], (value, moved[pair.operands[1 + piece]]))
            pieces.append(value)
        return pool.apply(_F32[O.SELECT], (choice, *pieces))

    return replaced(region, {e for e in steps.keys() - inner if _length(e, steps, inner) >= _LEAST_DEGREE}, polynomial)


def with_near_arguments(region: Region) -> Region:
    """``region`` with near functions in the argument of a polynomial that is log - c, or sqrt(log) - d where the log is
    larger than a constant, the log being -log1p(-x * x). Itself where there is none.

    The differences, c and d being 1 at least, are rounded absolutely, and what near functions lose is absolute, too, up
    to 2**-22 of the log (PTX), and 2**-23 of a root that is large. A polynomial as steep as that of the inverse of
    the error function is within five units in the last place so; of steeper ones nothing is known.
    """
    uses = region.uses
    arguments = Counter(step.argument for e in region.expressions() if (step := _step_of(e)) is not None)
    polynomials = [e for e, count in arguments.items() if uses[e] == count]
    found = [a for e in polynomials if (a := _argument_of(e, uses)) is not None]
    logs: dict[Expression, _Argument] = {a.log: a for a in found}
    differences: dict[Expression, _Argument] = {a.difference: a for a in found}
    roots: set[Expression] = {a.root for a in found}

    def near(expression: Expression, moved: Moved, pool: Pool) -> Expression:
        if expression in roots:
            return pool.apply(Apply(E.F32, O.SQRT, (), Intrinsic.NEAR), (moved[expression.operands[0]],))
        if expression in differences:  # one multiply-add
            constant = literal_of(-number_of(differences[expression].constant), E.F32)
            return pool.apply(_F32[O.ADD], (moved[differences[expression].log], constant))
        log = pool.apply(Apply(E.F32, O.LOG, (), Intrinsic.NEAR), (moved[logs[expression].x],))
        return pool.apply(_F32[O.MULTIPLY], (log, literal_of(-math.log(2), E.F32)))

    return replaced(region, logs.keys() | differences.keys() | roots, near)


_F32 = {opcode: Apply(E.F32, opcode, ()) for opcode in (O.ADD, O.MULTIPLY, O.SELECT)}


@dataclass(frozen=True, eq=False)
class _Step:
    """sum * argument + constants: the last two are chosen, by the same condition."""

    sum: Expression
    argument: Apply
    constants: Apply


@dataclass(frozen=True, eq=False)
class _Argument:
    """A choice of ``log`` - ``constant``, the ``difference``, and of a difference from ``root``, that of the log."""

    x: Expression
    log: Apply
    root: Apply
    difference: Apply
    constant: Literal


def _step_of(expression: Expression) -> _Step | None:
    addition = _operation(expression, O.ADD)
    for first, second in (addition.operands, addition.operands[::-1]) if addition else ():
        product, constants = _operation(first, O.MULTIPLY), _operation(second, O.SELECT)
        if product is None or constants is None or not all(isinstance(o, Literal) for o in constants.operands[1:]):
            continue
        for total, factor in (product.operands, product.operands[::-1]):
            argument = _operation(factor, O.SELECT)
            if argument is not None and argument.operands[0] is constants.operands[0]:
                return _Step(total, argument, constants)
    return None


def _length(expression: Expression, steps: dict[Expression, _Step], inner: set[Expression]) -> int:
    length = 1
    while (expression := steps[expression].sum) in inner:
        length += 1
    return length


def _follows(step: _Step, before: _Step | None) -> bool:
    return before is not None and before.argument is step.argument


def _piece(expression: Expression, argument: Apply, piece: int) -> Expression:
    """What it is in one piece, if it is chosen by what chooses the argument."""
    choice = _operation(expression, O.SELECT)
    return choice.operands[1 + piece] if choice and choice.operands[0] is argument.operands[0] else expression


def _argument_of(expression: Expression, uses: Counter[Expression]) -> _Argument | None:
    choice = _operation(expression, O.SELECT)
    if choice is None:
        return None
    condition, difference, other = choice.operands
    first, second = _less_constant(difference), _less_constant(other)
    if first is None or second is None or uses[difference] != 1 or uses[other] != 1:
        return None
    log, root = _operation(first[0], O.NEGATE), _operation(second[0], O.SQRT)
    if log is None or root is None or root.operands[0] is not log or uses[root] != 1 or uses[log] != 3:
        return None
    x = _of_square(log)
    if x is None or uses[log.operands[0]] != 1 or not _is_less(condition, log):
        return None
    assert isinstance(difference, Apply)
    return _Argument(x, log, root, difference, first[1])


def _of_square(negated: Apply) -> Expression | None:
    """x of -log1p(x * -x)."""
    log = _operation(negated.operands[0], O.LOG1P)
    product = None if log is None else _operation(log.operands[0], O.MULTIPLY)
    for x, other in (product.operands, product.operands[::-1]) if product else ():
        negation = _operation(other, O.NEGATE)
        if negation is not None and negation.operands[0] is x:
            return x
    return None


def _is_less(condition: Expression, than: Expression) -> bool:
    """Whether it says that ``than`` is less than a constant from 1 on."""
    if not isinstance(condition, Apply) or condition.opcode is not O.COMPARE or condition.detail != Comparison.LT:
        return False
    x, bound = condition.operands
    return x is than and _is_large(bound)


def _less_constant(expression: Expression) -> tuple[Expression, Literal] | None:
    """x and c of x - c, c from 1 on."""
    difference = _operation(expression, O.SUBTRACT)
    if difference is None:
        return None
    x, constant = difference.operands
    return (x, constant) if isinstance(constant, Literal) and _is_large(constant) else None


def _is_large(expression: Expression) -> bool:
    return isinstance(expression, Literal) and expression.element_type is E.F32 and number_of(expression) >= 1


def _operation(expression: Expression, opcode: Opcode) -> Apply | None:
    """The expression, if it is this operation on float32."""
    if not isinstance(expression, Apply) or expression.element_type is not E.F32:
        return None
    return expression if expression.opcode is opcode and not expression.detail else None
