"""Which predicates over (query, key) positions are bands: key position between two lines along the diagonal.

A predicate is a conjunction; its bands need no array at run time, the rest stays a mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.passes.match.labels import Labels, dims_of, element_type_of, peel, scalar_of
from flagos_backend.passes.match.symbols import Term


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

# An integer that depends on positions: coefficient of each label, and a constant.
_Affine = tuple[dict[int, int], int]


def split(predicate: Term, visible: bool, query: int | None, key: int) -> tuple[Band, list[tuple[Term, bool]]]:
    """The band of ``predicate`` (of its negation unless ``visible``), and the rest of the conjunction."""
    band, rest = ALL, []
    for term, positive in _conjuncts(predicate, visible):
        found = None if query is None else _band(term, positive, query, key)
        if found is None:
            rest.append((term, positive))
        else:
            band = band.meet(found)
    return band, rest


def _conjuncts(term: Term, positive: bool) -> list[tuple[Term, bool]]:
    instruction, labels = peel(term.instruction, term.labels, exact=True, broadcasts=True)
    if instruction.opcode is Opcode.NOT:
        return _conjuncts(Term(instruction.operands[0], labels), not positive)
    if instruction.opcode is (Opcode.AND if positive else Opcode.OR):
        return [part for operand in instruction.operands for part in _conjuncts(Term(operand, labels), positive)]
    if instruction.opcode is Opcode.SELECT and dims_of(instruction.operands[0]) == dims_of(instruction):
        values = tuple(scalar_of(operand) for operand in instruction.operands[1:])
        if values in ((1.0, 0.0), (0.0, 1.0)):
            return _conjuncts(Term(instruction.operands[0], labels), positive is (values == (1.0, 0.0)))
        if positive and values[1] == 0.0:  # select(p, q, false) is p and q
            return [p for operand in instruction.operands[:2] for p in _conjuncts(Term(operand, labels), True)]
    compared = _compared(instruction, labels)
    if compared is not None:
        return _conjuncts(compared[0], positive is compared[1])
    if scalar_of(instruction) == float(positive):
        return []
    return [(Term(instruction, labels), positive)]


def _compared(instruction: Instruction, labels: Labels) -> tuple[Term, bool] | None:
    """For a comparison of a number with what is one number where a predicate holds and another where not (a mask that
    was made a float): the predicate, and whether the comparison holds with it."""
    if instruction.opcode is not Opcode.COMPARE:
        return None
    attributes = instruction.attributes_as(CompareAttributes)
    left, number = instruction.operands[0], scalar_of(instruction.operands[1])
    source, labels = peel(left, labels, exact=True, broadcasts=True)
    values = _TRUTH if _is_flag(source) else _selected(source)
    if number is None or values is None or attributes.direction not in _HOLDS:
        return None
    holds = [_HOLDS[attributes.direction](value, number) for value in values]
    return None if holds[0] == holds[1] else (Term(source.operands[0], labels), holds[0])


_TRUTH = (1.0, 0.0)
_HOLDS: dict[Comparison, Callable[[float, float], bool]] = {
    Comparison.EQ: operator.eq,
    Comparison.NE: operator.ne,
    Comparison.GT: operator.gt,
    Comparison.GE: operator.ge,
    Comparison.LT: operator.lt,
    Comparison.LE: operator.le,
}


def _is_flag(instruction: Instruction) -> bool:
    return instruction.opcode is Opcode.CONVERT and element_type_of(instruction.operands[0]) is ElementType.PRED


def _selected(instruction: Instruction) -> tuple[float, float] | None:
    if instruction.opcode is not Opcode.SELECT or dims_of(instruction.operands[0]) != dims_of(instruction):
        return None
    on_true, on_false = (scalar_of(operand) for operand in instruction.operands[1:])
    return None if on_true is None or on_false is None else (on_true, on_false)


def _band(term: Term, positive: bool, query: int, key: int) -> Band | None:
    instruction = term.instruction
    if instruction.opcode is Opcode.CONSTANT and positive:
        return _constant_band(term, query, key)
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


def _constant_band(term: Term, query: int, key: int) -> Band | None:
    """A lower triangle that was written out."""
    array = constant_array(term.instruction)
    present = [label for label in term.labels if label is not None]
    if array is None or sorted(present) != sorted((query, key)):
        return None
    matrix = array.reshape([size for size in array.shape if size != 1])
    matrix = matrix if present == [query, key] else matrix.T
    upper = int(np.count_nonzero(matrix[0])) - 1
    triangle = np.tri(matrix.shape[0], matrix.shape[1], upper, dtype=bool)
    return Band(upper=upper) if np.array_equal(matrix, triangle) else None
