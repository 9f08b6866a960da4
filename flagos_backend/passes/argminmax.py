"""Recognises reduces that find a greatest or least element and its position, as argmax is written.

Shared by the host, which has a native step for them (codegen/cpu/lower/argminmax.py), and
accelerators (passes/accelerator/pack_argminmax.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.ir.attributes import (
    CompareAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    ParameterAttributes,
)
from flagos_backend.ir.elementwise import element_type, is_arithmetic
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.indexing import dims_of
from flagos_backend.loop_ir.literals import identity_of, number_of, uniform_literal

_INDICES = (ElementType.S32, ElementType.S64, ElementType.U32, ElementType.U64)
_MAX_SIZE = (1 << 31) - 1
# Parameters of the computation: an element and its position, and another.
_VALUE, _INDEX, _OTHER, _OTHER_INDEX = range(4)
# What a predicate is made of: direction, lhs, rhs.
_Comparison = tuple[Comparison, int, int]


@dataclass(frozen=True, slots=True)
class ArgMinMax:
    """Of rows of ``size`` elements along ``dimension``: the greatest or least one of each, and its position, an
    ``index``. A NaN is taken first, and the first of equal ones."""

    source: ElementType
    index: ElementType
    dimension: int
    size: int
    greatest: bool


def argminmax_of(reduce: Instruction) -> ArgMinMax | None:
    """What ``reduce`` finds; None if it is anything else."""
    if reduce.opcode is not Opcode.REDUCE or len(reduce.operands) != 4:
        return None
    array, index, *initials = reduce.operands
    source, kind = element_type(array), element_type(index)
    dimensions = reduce.attributes_as(DimensionsAttributes).dimensions
    if source is None or kind not in _INDICES or not is_arithmetic(array) or len(dimensions) != 1:
        return None
    size = dims_of(array)[dimensions[0]]
    if not 0 < size <= _MAX_SIZE or not _counts(index, dimensions[0]):
        return None
    direction = direction_of(reduce.called[0])
    begin, first = map(uniform_literal, initials)
    if direction is None or begin is None or first is None or number_of(first) != 0:
        return None
    combine = Opcode.MAXIMUM if direction is Comparison.GT else Opcode.MINIMUM
    if number_of(begin) != identity_of(combine, source):
        return None
    return ArgMinMax(source, kind, dimensions[0], size, combine is Opcode.MAXIMUM)


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


def direction_of(computation: Computation) -> Comparison | None:
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
