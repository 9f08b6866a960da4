"""Bounds of l, comparisons of l, of a row's maximum and of weights, and what is chosen by them. For recognize.py.

l is one or more in each row whose maximum is a number, as e is one there. It is NaN, or, where e was set to zero or a
guard stands for the maximum (symbols.py), zero in a row that sees no key. So a lower bound changes only what is zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

from flagos_backend.ir.attributes import CompareAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import MIRRORED, Comparison
from flagos_backend.ir.types import ElementType
from flagos_backend.passes.attention.fully_masked_rows import compared, is_of_whole_row, zero_where_fully_masked
from flagos_backend.passes.attention.labels import SIGNIFICAND, element_type_of, scalar_of
from flagos_backend.passes.attention.symbols import (
    WEIGHTS,
    AbsoluteMaximum,
    FiniteMaximum,
    FullyMasked,
    Guard,
    Polynomial,
    Powers,
    RowMaximum,
    Symbol,
    Tested,
    polynomial,
)

_Symbols = Mapping[Instruction, Symbol]
_ORDERS: dict[Comparison, Callable[[float, float], bool]] = {
    Comparison.EQ: operator.eq,
    Comparison.NE: operator.ne,
    Comparison.GE: operator.ge,
    Comparison.GT: operator.gt,
    Comparison.LE: operator.le,
    Comparison.LT: operator.lt,
}
_LEAST_F16 = 2.0**-7


# ---- bounds ----


def bounded(symbol: Polynomial, bound: float, maximum: Instruction) -> Polynomial | None:
    """The maximum of l and a number."""
    if not symbol.is_row_sum or math.isnan(bound):
        return None
    if bound > 1:
        symbol.of.hint = symbol.of.hint or f"its sum is no less than {bound:g}"
        return None
    return _with_least(symbol, bound, maximum)


def with_epsilon(symbol: Polynomial, epsilon: float, add: Instruction) -> Polynomial | None:
    """l and a number: l, if half a unit in the last place of one is more than the number."""
    if not symbol.is_row_sum or not epsilon >= 0:
        return None
    if epsilon >= 2.0 ** -SIGNIFICAND.get(element_type_of(add), 0):
        symbol.of.hint = symbol.of.hint or f"its sum has {epsilon:g} added, which is not rounded away"
        return None
    return _with_least(symbol, epsilon, add)


def _with_least(symbol: Polynomial, number: float, instruction: Instruction) -> Polynomial | None:
    """None where ``number`` has a square of f16 that one cannot be divided by, as a gradient does."""
    if symbol.least != 0 or number <= 0:
        return symbol
    if element_type_of(instruction) is ElementType.F16 and number < _LEAST_F16:
        return None
    return replace(symbol, least=number)


# ---- comparisons ----


def tested(compare: Instruction, symbols: _Symbols) -> FullyMasked | FiniteMaximum | Tested | None:
    left, right = compare.operands
    a, b = symbols.get(left), symbols.get(right)
    direction = compare.attributes_as(CompareAttributes).direction
    if isinstance(a, AbsoluteMaximum):
        is_test = direction in (Comparison.EQ, Comparison.NE) and scalar_of(right) == math.inf
        return FiniteMaximum(a.of, a.labels, direction is Comparison.NE) if is_test else None
    if isinstance(a, Polynomial) and _is_weights(a):
        return _tested_weights(a, direction, scalar_of(right), is_same=left is right)
    if isinstance(a, Polynomial) and isinstance(b, Polynomial):
        return _tested_sums(a, b, direction)
    for symbol, other, order in ((a, right, direction), (b, left, MIRRORED[direction])):
        if isinstance(symbol, Polynomial):
            number = scalar_of(other)
            return None if number is None else _tested_sum(symbol, number, order)
    return compared(compare, a)


def is_finite(symbol: Symbol | None) -> FiniteMaximum | Tested | None:
    if isinstance(symbol, RowMaximum):
        return FiniteMaximum(symbol.of, symbol.labels)
    if isinstance(symbol, Polynomial) and _is_weights(symbol) and symbol.of.guard is not Guard.INFINITE:
        return Tested(symbol.of, symbol.labels, True, True, False, symbol)
    return None


def _is_weights(symbol: Polynomial) -> bool:
    return len(symbol.terms) == 1 and symbol.terms[0][0] == WEIGHTS and not symbol.factors


def _tested_weights(symbol: Polynomial, direction: Comparison, number: float | None, *, is_same: bool) -> Tested | None:
    """Weights are between zero and one, or all of a row are NaN: not those that a guard keeps beside an infinity."""
    if symbol.of.guard is Guard.INFINITE or direction not in (Comparison.EQ, Comparison.NE):
        return None
    differ = direction is Comparison.NE
    if is_same:
        return Tested(symbol.of, symbol.labels, not differ, not differ, differ, symbol)
    if number is not None and math.isinf(number):
        return Tested(symbol.of, symbol.labels, differ, differ, differ, symbol)
    return None


def _tested_sums(a: Polynomial, b: Polynomial, direction: Comparison) -> Tested | None:
    """l and l with a bound."""
    if not (a.is_row_sum and b.is_row_sum and a.of is b.of and a.labels == b.labels):
        return None
    order = _ORDERS[direction]
    return Tested(a.of, a.labels, order(1.0, 1.0), order(a.least, b.least), direction is Comparison.NE)


def _tested_sum(symbol: Polynomial, number: float, direction: Comparison) -> Tested | None:
    always = number < 1 or (number == 1 and direction in (Comparison.GE, Comparison.LT))
    if not symbol.is_row_sum or not always:
        return None
    order = _ORDERS[direction]
    holds, at_zero = order(1.0, number), order(symbol.least, number)
    return Tested(symbol.of, symbol.labels, holds, at_zero, direction is Comparison.NE)


# ---- choices ----


def chosen(select: Instruction, symbols: _Symbols) -> Symbol | None:
    """What a predicate that has a symbol chooses."""
    predicate, on_true, on_false = (symbols.get(operand) for operand in select.operands)
    numbers = [scalar_of(operand) for operand in select.operands[1:]]
    if isinstance(predicate, Tested):
        sides = ((on_true, numbers[0]), (on_false, numbers[1]))
        picked, other = sides if predicate.holds else sides[::-1]
        if predicate.weights is not None:
            return _of_weights(predicate, predicate.weights, picked[0], other[1])
        return _of_sums(select, predicate, picked, other)
    for kept, fill, holds in ((on_true, numbers[1], True), (on_false, numbers[0], False)):
        if isinstance(kept, RowMaximum) and fill is not None and math.isfinite(fill):
            return _guarded(predicate, kept, holds)
        if isinstance(kept, Polynomial) and fill == 0:
            return zero_where_fully_masked(predicate, kept, holds)
    return None


def _guarded(predicate: Symbol | None, maximum: RowMaximum, holds: bool) -> RowMaximum | None:
    if predicate is None or predicate.of is not maximum.of or predicate.labels != maximum.labels:
        return None
    if maximum.guard is not Guard.NONE:
        return None
    if isinstance(predicate, FiniteMaximum):
        return replace(maximum, guard=Guard.INFINITE) if predicate.holds is holds else None
    is_fully_masked = isinstance(predicate, FullyMasked) and is_of_whole_row(predicate) and predicate.holds is not holds
    return replace(maximum, guard=Guard.FULLY_MASKED) if is_fully_masked else None


def _of_weights(test: Tested, weights: Polynomial, picked: Symbol | None, other: float | None) -> Polynomial | None:
    """Zero for weights that are NaN, anything for those that are infinite, which none is."""
    if not isinstance(picked, Polynomial) or picked.of is not test.of or picked.labels != test.labels:
        return None
    if test.at_nan is test.holds:
        return picked if _is_weights(picked) and other is not None else None
    return replace(picked, nan_zero=True) if picked == weights and other == 0 else None


_Side = tuple[Symbol | None, float | None]


def _of_sums(select: Instruction, test: Tested, picked: _Side, other: _Side) -> Polynomial | None:
    """``picked`` where l is one or more. Where l is NaN a number may be chosen in the place of another, as all of an
    attention's results are divided by l; but what is divided by l already may not be lost."""
    symbol, number = picked
    instead = other[1]
    if isinstance(symbol, Polynomial):
        if symbol.of is not test.of or symbol.labels != test.labels:
            return None
        if test.at_zero is test.holds and _is_itself_or_negated(symbol, other[0]):
            return symbol
        if test.at_nan is not test.holds or instead is None or not math.isfinite(instead):
            return None
        is_bound = test.at_zero is not test.holds and symbol.is_row_sum and instead >= 0
        return _with_least(symbol, instead, select) if is_bound else symbol
    if instead is None or number is None or not math.isfinite(instead) or not math.isfinite(number) or number == 0:
        return None
    least = abs(number) if test.at_zero is test.holds else min(abs(number), abs(instead))
    found = polynomial(test.of, test.labels, {Powers(): number}, finite=True)
    return replace(found, fully_masked_zero=True, least=least)


def _is_itself_or_negated(symbol: Polynomial, other: Symbol | None) -> bool:
    """Whether a choice of the two is the first one: it is chosen unless l is NaN, and then both are, whatever their
    sign."""
    if not isinstance(other, Polynomial) or not all(powers.row_sum for powers, _ in symbol.terms):
        return False
    negated = tuple((powers, -coefficient) for powers, coefficient in symbol.terms)
    return other in (symbol, replace(symbol, terms=negated))
