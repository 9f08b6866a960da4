"""Reads a sort's comparator as a list of keys, for kernels that order by keys."""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.ir.attributes import CompareAttributes, ConstantAttributes
from flagos_backend.ir.hlo import Computation, Instruction, parameter_number
from flagos_backend.ir.opcode import MIRRORED, Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

_ASCENDING = frozenset({Comparison.LT, Comparison.LE})
_ORDERED = frozenset({Comparison.LT, Comparison.LE, Comparison.GT, Comparison.GE})
# Bits of infinity: a NaN's, without the sign, are more.
INFINITY = {
    ElementType.F16: 0x7C00,
    ElementType.BF16: 0x7F80,
    ElementType.F32: 0x7F800000,
    ElementType.F64: 0x7FF0000000000000,
}


@dataclass(frozen=True, slots=True)
class SortKey:
    """Elements go by ``expression``, an instruction of the comparator that reads only left-hand (even) parameters."""

    expression: Instruction
    descending: bool
    total: bool

    @property
    def element_type(self) -> ElementType:
        shape = self.expression.shape
        assert isinstance(shape, ArrayShape)
        return shape.element_type


@dataclass(frozen=True, slots=True)
class OperandKey:
    """A key that is read, not computed: operand number ``operand``, in total order. ``merged``: but zeros of both signs
    are equal, and so are all NaNs, which are above infinity."""

    operand: int
    merged: bool


def operand_key(key: SortKey) -> OperandKey | None:
    """``key`` as an operand's own order, or as that order with JAX's selects around it; None where it is another
    function."""
    node, merges = key.expression, set()
    while node.opcode is Opcode.SELECT:
        merge = _merge(node)
        if merge is None:
            return None
        merges.add(merge)
        node = node.operands[2]
    number = parameter_number(node)
    if number is None or len(merges) == 1:
        return None
    # The partial order says nothing of NaN, and needs no selects for zeros.
    partial = not key.total and key.element_type.is_float
    return OperandKey(number // 2, bool(merges) or partial)


def _merge(select: Instruction) -> Comparison | None:
    """Which elements of a float ``select`` makes one constant: EQ where zeros become +0, NE where NaNs become +NaN."""
    condition, constant, rest = select.operands
    shape = constant.shape
    if condition.opcode is not Opcode.COMPARE or constant.opcode is not Opcode.CONSTANT:
        return None
    if not isinstance(shape, ArrayShape) or shape.element_type not in INFINITY:
        return None
    bits = int.from_bytes(constant.attributes_as(ConstantAttributes).data, "little")
    attributes = condition.attributes_as(CompareAttributes)
    left, right = condition.operands
    number = _leaf(rest)
    if attributes.order is not ComparisonOrder.PARTIAL or number is None or parameter_number(left) != number:
        return None
    if attributes.direction is Comparison.NE and right is left:
        return Comparison.NE if INFINITY[shape.element_type] < bits < 1 << (shape.element_type.bits - 1) else None
    return Comparison.EQ if attributes.direction is Comparison.EQ and right is constant and bits == 0 else None


def _leaf(node: Instruction) -> int | None:
    """The parameter that a chain of selects ends in."""
    while node.opcode is Opcode.SELECT:
        node = node.operands[2]
    return parameter_number(node)


def sort_keys(comparator: Computation) -> list[SortKey] | None:
    """The keys, most significant first, by which ``comparator`` orders; None when it is not such a comparator.

    Reads the lexicographic comparators that front ends emit: a comparison, or less | (equal & rest), or a select on
    equality. Each side of a comparison may be any function, the same on both sides.
    """
    return _parse(comparator.root)


def _parse(node: Instruction) -> list[SortKey] | None:
    comparison = _comparison(node)
    if comparison is not None:
        key, direction = comparison
        return [key] if direction in _ORDERED else None
    if node.opcode is Opcode.OR:
        for first, second in (node.operands, node.operands[::-1]):
            if second.opcode is Opcode.AND:
                for equal, rest in (second.operands, second.operands[::-1]):
                    keys = _lexicographic(first, equal, Comparison.EQ, rest)
                    if keys:
                        return keys
    if node.opcode is Opcode.SELECT:
        condition, on_true, on_false = node.operands
        return _lexicographic(on_false, condition, Comparison.EQ, on_true) or _lexicographic(
            on_true, condition, Comparison.NE, on_false
        )
    return None


def _lexicographic(
    less: Instruction, equal: Instruction, direction: Comparison, rest: Instruction
) -> list[SortKey] | None:
    """The keys of: go by ``less``; where ``equal`` tells that it cannot decide, go by ``rest``."""
    first, second = _comparison(less), _comparison(equal)
    if first is None or second is None or first[1] not in (Comparison.LT, Comparison.GT) or second[1] is not direction:
        return None
    if first[0].total is not second[0].total or not _same(first[0].expression, second[0].expression, mirrored=False):
        return None
    keys = _parse(rest)
    return keys and [first[0], *keys]


def _comparison(node: Instruction) -> tuple[SortKey, Comparison] | None:
    """``node`` as a comparison of one function of the left-hand elements with the same of the right-hand ones."""
    if node.opcode is not Opcode.COMPARE:
        return None
    attributes = node.attributes_as(CompareAttributes)
    left, right = node.operands
    direction = attributes.direction
    if _sides(left) == {1} and _sides(right) == {0}:
        left, right = right, left
        direction = MIRRORED[direction]
    shape = left.shape
    if _sides(left) != {0} or not _same(left, right, mirrored=True) or not isinstance(shape, ArrayShape):
        return None
    if shape.element_type.is_complex:
        return None
    total = attributes.order is ComparisonOrder.TOTAL
    return SortKey(left, direction not in _ASCENDING, total), direction


def _sides(node: Instruction) -> set[int]:
    """0 when ``node`` reads left-hand parameters, 1 when right-hand ones."""
    number = parameter_number(node)
    if number is not None:
        return {number % 2}
    return set().union(*(_sides(operand) for operand in node.operands))


def _same(a: Instruction, b: Instruction, mirrored: bool) -> bool:
    """Whether both compute the same function; ``mirrored``: b of right-hand parameters where a has left-hand ones."""
    if a is b:
        return not mirrored or not _sides(a)
    number = parameter_number(a)
    if number is not None:
        return parameter_number(b) == number + mirrored
    return (
        a.opcode is b.opcode
        and a.shape == b.shape
        and a.attributes == b.attributes
        and a.called == b.called
        and len(a.operands) == len(b.operands)
        and all(_same(x, y, mirrored) for x, y in zip(a.operands, b.operands, strict=True))
    )
