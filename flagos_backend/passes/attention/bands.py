"""Which predicates over (query, key) positions are bands: key position between two lines along the diagonal.

A predicate is a conjunction; its bands need no array at run time, the rest stays a mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.passes.attention.labels import Labels, dims_of, element_type_of, peel, scalar_of
from flagos_backend.passes.attention.symbols import Term


@dataclass(frozen=True, slots=True)
class Band:
    """Visible: query - lower <= key <= query + upper; None is no bound."""

    upper: int | None = None
    lower: int | None = None

    def meet(self, other: Band) -> Band:
        uppers = [b for b in (self.upper, other.upper) if b is not None]
        lowers = [b for b in (self.lower, other.lower) if b is not None]
        return Band(min(uppers, default=None), min(lowers, default=None))

    @property
    def is_all(self) -> bool:
        return self.upper is None and self.lower is None


ALL = Band()

# Predicates, and what each has to be.
_Conjunction = list[tuple[Term, bool]]
# An integer that depends on positions: coefficient of each label, and a constant.
_Affine = tuple[dict[int, int], int]
Matrix = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


def split(predicate: Term, visible: bool, query: int | None, key: int) -> tuple[Band, _Conjunction]:
    """The band of ``predicate`` (of its negation unless ``visible``), and the rest of the conjunction."""
    return split_conjunction(_conjuncts(predicate, visible), query, key)


def split_conjunction(terms: _Conjunction, query: int | None, key: int) -> tuple[Band, _Conjunction]:
    band, rest = ALL, []
    for term, positive in terms:
        found = None if query is None else _band(term, positive, query, key)
        if found is None:
            rest.append((term, positive))
        else:
            band = band.meet(found)
    return band, rest


def _conjuncts(term: Term, positive: bool) -> _Conjunction:
    instruction, labels = peel(term.instruction, term.labels, exact=True, broadcasts=True)
    if instruction.opcode is Opcode.NOT:
        return _conjuncts(Term(instruction.operands[0], labels), not positive)
    if instruction.opcode is (Opcode.AND if positive else Opcode.OR):
        return [part for operand in instruction.operands for part in _conjuncts(Term(operand, labels), positive)]
    if instruction.opcode is Opcode.SELECT and dims_of(instruction.operands[0]) == dims_of(instruction):
        predicate, *choices = (Term(operand, labels) for operand in instruction.operands)
        values = tuple(scalar_of(choice.instruction) for choice in choices)
        if values in ((1.0, 0.0), (0.0, 1.0)):
            return _conjuncts(predicate, positive is (values == (1.0, 0.0)))
        for side in (0, 1):  # select(p, q, false) is p and q; select(p, true, q) is false where p and q are
            if values[side] == float(not positive):
                return [*_conjuncts(predicate, side == 1), *_conjuncts(choices[1 - side], positive)]
    found = _compared(instruction, labels, positive)
    if found is not None:
        return found
    if scalar_of(instruction) == float(positive):
        return []
    return [(Term(instruction, labels), positive)]


def _compared(instruction: Instruction, labels: Labels, positive: bool) -> _Conjunction | None:
    """The conjunction that a comparison of a number with one of two numbers (a mask that was made one) stands for."""
    if instruction.opcode is not Opcode.COMPARE:
        return None
    attributes = instruction.attributes_as(CompareAttributes)
    number, found = scalar_of(instruction.operands[1]), two_valued(Term(instruction.operands[0], labels))
    if number is None or found is None or attributes.direction not in _HOLDS:
        return None
    holds = [_HOLDS[attributes.direction](value, number) for value in (found.holds, found.fails)]
    return None if holds[0] == holds[1] else found.conjuncts(holds[0] is positive)


@dataclass(frozen=True, slots=True)
class TwoValued:
    """A number that is ``holds`` where all of ``terms`` are as they are wanted, and ``fails`` elsewhere."""

    terms: tuple[tuple[Term, bool], ...]
    holds: float
    fails: float

    def conjuncts(self, positive: bool) -> _Conjunction | None:
        """What the terms (or their negation, of which only one is a conjunction) say."""
        if positive:
            return [part for term, wanted in self.terms for part in _conjuncts(term, wanted)]
        return _conjuncts(self.terms[0][0], not self.terms[0][1]) if len(self.terms) == 1 else None

    def failing_with(self, value: float) -> TwoValued | None:
        """The same numbers, said so that elsewhere is where they are ``value``."""
        if self.fails == value:
            return self
        if self.holds != value or len(self.terms) > 1:
            return None
        ((term, wanted),) = self.terms
        return TwoValued(((term, not wanted),), self.fails, value)

    def mapped(self, function: Callable[[float], float]) -> TwoValued:
        return replace(self, holds=function(self.holds), fails=function(self.fails))


def two_valued(term: Term) -> TwoValued | None:
    """A mask as a number, and what arithmetic with written numbers makes of it."""
    instruction, labels = peel(term.instruction, term.labels, exact=True, broadcasts=True)
    operands = [Term(operand, labels) for operand in instruction.operands]
    if instruction.opcode is Opcode.CONVERT:
        if element_type_of(operands[0].instruction) is ElementType.PRED:
            return TwoValued(((operands[0], True),), 1.0, 0.0)
        return two_valued(operands[0]) if element_type_of(operands[0].instruction).is_integer else None
    if instruction.opcode is Opcode.SELECT and dims_of(instruction.operands[0]) == dims_of(instruction):
        return _selected(*operands)
    function, element = _ARITHMETIC.get(instruction.opcode), element_type_of(instruction)
    if function is None or not (element.is_float or (element.is_signed and element.bits >= 32)):
        return None  # other integers may wrap around
    numbers = [scalar_of(operand.instruction) for operand in operands]
    if numbers[1] is not None:
        found = two_valued(operands[0])
        return found and found.mapped(lambda value: function(value, numbers[1] or 0.0))
    if numbers[0] is not None:
        found = two_valued(operands[1])
        return found and found.mapped(lambda value: function(numbers[0] or 0.0, value))
    return _both(*operands) if instruction.opcode is Opcode.MULTIPLY else None


def _selected(predicate: Term, on_true: Term, on_false: Term) -> TwoValued | None:
    values = [scalar_of(choice.instruction) for choice in (on_true, on_false)]
    if values[0] is not None and values[1] is not None:
        return TwoValued(((predicate, True),), values[0], values[1])
    for value, other, wanted in ((values[0], on_false, False), (values[1], on_true, True)):
        found = None if value is None else two_valued(other)
        found = None if found is None or value is None else found.failing_with(value)
        if found is not None:
            return replace(found, terms=(*found.terms, (predicate, wanted)))
    return None


def _both(left: Term, right: Term) -> TwoValued | None:
    """The product of masks."""
    a, b = ((found := two_valued(term)) and found.failing_with(0.0) for term in (left, right))
    if a is None or b is None:
        return None
    return TwoValued((*a.terms, *b.terms), a.holds * b.holds, 0.0)


_ARITHMETIC: dict[Opcode, Callable[[float, float], float]] = {
    Opcode.ADD: operator.add,
    Opcode.MULTIPLY: operator.mul,
    Opcode.SUBTRACT: operator.sub,
}
_HOLDS: dict[Comparison, Callable[[float, float], bool]] = {
    Comparison.EQ: operator.eq,
    Comparison.NE: operator.ne,
    Comparison.GT: operator.gt,
    Comparison.GE: operator.ge,
    Comparison.LT: operator.lt,
    Comparison.LE: operator.le,
}


def _band(term: Term, positive: bool, query: int, key: int) -> Band | None:
    instruction = term.instruction
    if instruction.opcode is Opcode.CONSTANT:
        array = constant_array(instruction)
        return None if array is None else band_of_matrix(array.astype(bool) == positive, term.labels, query, key)
    if instruction.opcode is not Opcode.COMPARE:
        return None
    sides = [_affine(operand, term.labels) for operand in instruction.operands]
    if sides[0] is None or sides[1] is None:
        return None
    direction = instruction.attributes_as(CompareAttributes).direction
    direction = direction if positive else _NEGATED[direction]
    (left, a), (right, b) = sides[0], sides[1]
    slopes = {label: left.get(label, 0) - right.get(label, 0) for label in left | right}
    slopes = {label: slope for label, slope in slopes.items() if slope}
    bound = _BOUNDS.get(direction)
    if bound is None or slopes not in ({query: 1, key: -1}, {query: -1, key: 1}):
        return None
    # sign * (query - key) + offset >= 0, after strictness and direction are folded in
    sense, slack = bound
    sign, offset = sense * slopes[query], sense * (a - b) - slack
    return Band(upper=offset) if sign > 0 else Band(lower=offset)


_NEGATED = {
    Comparison.GE: Comparison.LT,
    Comparison.LT: Comparison.GE,
    Comparison.GT: Comparison.LE,
    Comparison.LE: Comparison.GT,
    Comparison.EQ: Comparison.NE,
    Comparison.NE: Comparison.EQ,
}
# left - right >= 0, > 0, ... as sense * (left - right) - slack >= 0.
_BOUNDS = {Comparison.GE: (1, 0), Comparison.GT: (1, 1), Comparison.LE: (-1, 0), Comparison.LT: (-1, 1)}


def _affine(instruction: Instruction, labels: Labels) -> _Affine | None:
    """An integer expression as a sum of positions. Types of 32 bits and more: positions cannot wrap around in them."""
    element = element_type_of(instruction)
    if not element.is_signed or element.bits < 32:
        return None
    scalar = scalar_of(instruction)
    if scalar is not None:
        return {}, int(scalar)
    source, labels = peel(instruction, labels, exact=True, broadcasts=True)
    if source is not instruction:
        return _affine(source, labels)
    if instruction.opcode is Opcode.IOTA:
        label = labels[instruction.attributes_as(DimensionAttributes).dimension]
        return ({} if label is None else {label: 1}), 0
    if instruction.opcode is Opcode.CONVERT:
        return _affine(instruction.operands[0], labels)
    if instruction.opcode is Opcode.CONSTANT:
        return _constant_positions(instruction, labels)
    if instruction.opcode not in (Opcode.ADD, Opcode.SUBTRACT):
        return None
    left, right = (_affine(operand, labels) for operand in instruction.operands)
    if left is None or right is None:
        return None
    sign = 1 if instruction.opcode is Opcode.ADD else -1
    slopes = {label: left[0].get(label, 0) + sign * right[0].get(label, 0) for label in left[0] | right[0]}
    return slopes, left[1] + sign * right[1]


def _constant_positions(instruction: Instruction, labels: Labels) -> _Affine | None:
    """A constant that counts up: an iota that was folded."""
    array = constant_array(instruction)
    present = [label for label in labels if label is not None]
    if array is None or len(present) != 1:
        return None
    flat = array.reshape(-1)
    first = int(flat[0])
    return ({present[0]: 1}, first) if np.array_equal(flat, np.arange(first, first + flat.size)) else None


def band_of_matrix(visible: Matrix, labels: Labels, query: int, key: int) -> Band | None:
    """A band that was written out."""
    present = [label for label in labels if label is not None]
    if sorted(present) != sorted((query, key)):
        return None
    matrix = visible.reshape([size for size in visible.shape if size != 1])
    matrix = matrix if present == [query, key] else matrix.T
    (queries, keys), (t, s) = matrix.shape, np.nonzero(matrix)
    if not t.size:
        return None
    upper, lower = int((s - t).max()), int((t - s).max())
    ahead = np.arange(keys) - np.arange(queries)[:, None]
    if not np.array_equal(matrix, (ahead <= upper) & (ahead >= -lower)):
        return None
    return Band(upper if upper < keys - 1 else None, lower if lower < queries - 1 else None)
