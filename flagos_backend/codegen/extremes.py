"""Finds reduces that give the position of a greatest or least element, as argmax is written, and their native step.

Between native.py, whose computations lose the positions that such a reduce compares, and native/cpu/arg_extreme.cc.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from flagos_backend.codegen.tiles import is_arithmetic_type
from flagos_backend.fusion.flat import FlatComputation
from flagos_backend.fusion.indexing import dims_of
from flagos_backend.fusion.literals import identity_of, number_of, uniform_literal
from flagos_backend.fusion.support import element_type
from flagos_backend.ir.attributes import (
    CompareAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    ParameterAttributes,
)
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ElementType

_INDICES = (ElementType.S32, ElementType.S64, ElementType.U32, ElementType.U64)
_MAX_SIZE = (1 << 31) - 1
# Parameters of the computation: an element and its position, and another.
_VALUE, _INDEX, _OTHER, _OTHER_INDEX = range(4)
# What a predicate is made of: direction, lhs, rhs.
_Comparison = tuple[Comparison, int, int]


def with_extremes(computation: FlatComputation) -> FlatComputation:
    """``computation`` in which each reduce that finds an extreme has one operand, the array."""
    found = {i: _of_array(i) for i in computation.instructions if _finds_extreme(i)}
    if not found:
        return computation
    leaves = computation.leaves_of
    return replace(
        computation,
        instructions=tuple(found.get(i, i) for i in computation.instructions),
        leaves_of=leaves | {new: leaves[old] for old, new in found.items()},
    )


def extreme_numbers(reduce: Instruction) -> tuple[int, ...] | None:
    """The numbers of a native step for ``reduce``, if that is one that ``with_extremes`` made: types of elements and
    positions; how many rows there are, of how many elements, how far apart those are; whether the greatest counts."""
    if len(reduce.operands) != 1:
        return None
    (array,) = reduce.operands
    dims, (d,) = dims_of(array), reduce.attributes_as(DimensionsAttributes).dimensions
    source, index = element_type(array), element_type(reduce.called[0].parameters[_INDEX])
    if source is None or index is None:
        raise AssertionError(f"{reduce.name} was taken for an extreme of an array")
    largest = _direction(reduce.called[0]) is Comparison.GT
    return int(source), int(index), prod(dims[:d]), dims[d], prod(dims[d + 1 :]), int(largest)


def _of_array(reduce: Instruction) -> Instruction:
    return Instruction(
        reduce.opcode, reduce.shape, reduce.operands[:1], reduce.attributes, reduce.called, reduce.name, reduce.metadata
    )


def _finds_extreme(reduce: Instruction) -> bool:
    if reduce.opcode is not Opcode.REDUCE or len(reduce.operands) != 4:
        return False
    array, index, *initials = reduce.operands
    source, dimensions = element_type(array), reduce.attributes_as(DimensionsAttributes).dimensions
    if source is None or not is_arithmetic_type(source) or element_type(index) not in _INDICES or len(dimensions) != 1:
        return False
    if not 0 < dims_of(array)[dimensions[0]] <= _MAX_SIZE or not _counts(index, dimensions[0]):
        return False
    direction = _direction(reduce.called[0])
    combine = Opcode.MAXIMUM if direction is Comparison.GT else Opcode.MINIMUM
    begin, first = map(uniform_literal, initials)
    return (
        direction is not None
        and begin is not None
        and first is not None
        and number_of(begin) == identity_of(combine, source)
        and number_of(first) == 0
    )


def _counts(index: Instruction, dimension: int) -> bool:
    """Whether ``index`` is the position in ``dimension``."""
    while index.opcode in (Opcode.BROADCAST, Opcode.RESHAPE, Opcode.COPY):
        if index.opcode is Opcode.BROADCAST:
            places = index.attributes_as(DimensionsAttributes).dimensions
            if dimension not in places:
                return False
            dimension = places.index(dimension)
        elif index.opcode is Opcode.RESHAPE:
            dims, before = dims_of(index), dims_of(index.operands[0])
            if [d for d in dims if d != 1] != [d for d in before if d != 1] or dims[dimension] == 1:
                return False
            number = sum(size != 1 for size in dims[:dimension])
            dimension = [d for d, size in enumerate(before) if size != 1][number]
        (index,) = index.operands
    return index.opcode is Opcode.IOTA and index.attributes_as(DimensionAttributes).dimension == dimension


def _direction(computation: Computation) -> Comparison | None:
    """GT or LT for a computation that gives the greater or less of two elements, or a NaN, with its position; of equal
    ones the first position. None for any other.

    That is: P = value > other or value != value; the element is select(P, value, other), its position
    select(P or value == other and index < other index, index, other index). Integers may leave the NaN out.
    """
    root = computation.root
    if root.opcode is not Opcode.TUPLE or len(root.operands) != 2 or len(computation.parameters) != 4:
        return None
    value, index = root.operands
    if not _selects(value, _VALUE, _OTHER) or not _selects(index, _INDEX, _OTHER_INDEX):
        return None
    better = _alternatives(value.operands[0])
    first = frozenset({frozenset({(Comparison.EQ, _VALUE, _OTHER), (Comparison.LT, _INDEX, _OTHER_INDEX)})})
    is_float = element_type(computation.parameters[_VALUE])
    nan = frozenset({frozenset({(Comparison.NE, _VALUE, _VALUE)})})
    for direction in (Comparison.GT, Comparison.LT):
        beats = frozenset({frozenset({(direction, _VALUE, _OTHER)})})
        accepted = [beats | nan] if is_float is not None and is_float.is_float else [beats, beats | nan]
        if better in accepted and _alternatives(index.operands[0]) == better | first:
            return direction
    return None


def _selects(value: Instruction, if_true: int, if_false: int) -> bool:
    return value.opcode is Opcode.SELECT and tuple(map(_parameter, value.operands[1:])) == (if_true, if_false)


def _parameter(value: Instruction) -> int:
    return value.attributes_as(ParameterAttributes).number if value.opcode is Opcode.PARAMETER else -1


def _alternatives(predicate: Instruction) -> frozenset[frozenset[_Comparison]] | None:
    """A predicate as a disjunction of conjunctions of comparisons of parameters; None for one that is none."""
    if predicate.opcode is Opcode.OR:
        left, right = map(_alternatives, predicate.operands)
        return None if left is None or right is None else left | right
    if predicate.opcode is Opcode.AND:
        left, right = map(_alternatives, predicate.operands)
        return None if left is None or right is None else frozenset(a | b for a in left for b in right)
    if predicate.opcode is not Opcode.COMPARE:
        return None
    compare = predicate.attributes_as(CompareAttributes)
    lhs, rhs = map(_parameter, predicate.operands)
    if compare.order is not ComparisonOrder.PARTIAL or min(lhs, rhs) < 0:
        return None
    return frozenset({frozenset({(compare.direction, lhs, rhs)})})
