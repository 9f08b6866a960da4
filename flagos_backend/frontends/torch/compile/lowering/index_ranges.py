"""Between which numbers the elements of an array of integers lie, as far as what made them says: indices that cannot
lie outside need no check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Final

from flagos_backend.ir.attributes import DimensionAttributes
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

Range = tuple[int, int]  # the least and the greatest that an element may be
# They move elements of their first operand.
_MOVED: Final = frozenset(
    {
        *(Opcode.BROADCAST, Opcode.RESHAPE, Opcode.TRANSPOSE, Opcode.SLICE, Opcode.REVERSE, Opcode.COPY),
        *(Opcode.DYNAMIC_SLICE, Opcode.GATHER),
    }
)
_SOME_OF: Final = frozenset({Opcode.CONCATENATE, Opcode.PAD})
_MAX_DEPTH = 24
_MAX_CONSTANT = 1 << 16


def range_of(value: Instruction, known: Mapping[Instruction, Range], depth: int = 0) -> Range | None:
    """The range of ``value``, of which ``known`` has some ranges; None where only the data say."""
    if value in known:
        return known[value]
    shape = value.shape
    if not isinstance(shape, ArrayShape) or depth > _MAX_DEPTH:
        return None
    kind = shape.element_type
    if kind is ElementType.PRED:
        return 0, 1
    if not kind.is_integer:
        return None
    found = _found(value, shape, lambda operand: range_of(operand, known, depth + 1))
    # What leaves the type comes in again at its other end.
    return found if found is not None and _least(kind) <= found[0] and found[1] <= _greatest(kind) else None


def _least(kind: ElementType) -> int:
    return -(1 << (kind.bits - 1)) if kind.is_signed else 0


def _greatest(kind: ElementType) -> int:
    return _least(kind) + (1 << kind.bits) - 1


def _found(value: Instruction, shape: ArrayShape, of: Callable[[Instruction], Range | None]) -> Range | None:
    opcode = value.opcode
    if opcode is Opcode.IOTA:
        return 0, max(0, shape.dims[value.attributes_as(DimensionAttributes).dimension] - 1)
    if opcode is Opcode.CONSTANT:
        data = constant_array(value)
        small = data is not None and 0 < data.size <= _MAX_CONSTANT
        return (int(data.min()), int(data.max())) if data is not None and small else None
    if opcode in _MOVED:
        return of(value.operands[0])
    if opcode is Opcode.CONVERT:
        source = value.operands[0].shape
        whole = isinstance(source, ArrayShape) and (
            source.element_type.is_integer or source.element_type is ElementType.PRED
        )
        return of(value.operands[0]) if whole else None
    if opcode in _SOME_OF:
        return _union([of(operand) for operand in value.operands])
    if opcode is Opcode.SELECT:
        return _union([of(operand) for operand in value.operands[1:]])
    if opcode is Opcode.CLAMP:
        return _clamped(*map(of, value.operands))
    if opcode in (Opcode.MAXIMUM, Opcode.MINIMUM):
        return _bounded(opcode, *map(of, value.operands), kind=shape.element_type)
    if opcode in _ARITHMETIC:
        a, b = map(of, value.operands)
        return None if a is None or b is None else _ARITHMETIC[opcode](a, b)
    if opcode is Opcode.AND:
        # Of a number without a sign no bit is added.
        limits = [found[1] for found in map(of, value.operands) if found is not None and found[0] >= 0]
        return (0, min(limits)) if limits else None
    if opcode is Opcode.REMAINDER:
        a, b = map(of, value.operands)
        if b is None or b[0] <= 0:
            return None
        return (0 if a is not None and a[0] >= 0 else 1 - b[1], b[1] - 1)
    return None


def _union(ranges: list[Range | None]) -> Range | None:
    found = [r for r in ranges if r is not None]
    if not found or len(found) < len(ranges):
        return None
    return min(low for low, _ in found), max(high for _, high in found)


def _clamped(low: Range | None, value: Range | None, high: Range | None) -> Range | None:
    if low is None or high is None or low[1] > high[0]:
        return None
    if value is None:
        return low[0], high[1]
    return max(low[0], min(value[0], high[1])), min(high[1], max(value[1], low[0]))


def _bounded(opcode: Opcode, a: Range | None, b: Range | None, *, kind: ElementType) -> Range | None:
    if a is None and b is None:
        return None
    whole = (_least(kind), _greatest(kind))
    (low, high), (other_low, other_high) = a or whole, b or whole
    choose = max if opcode is Opcode.MAXIMUM else min
    return choose(low, other_low), choose(high, other_high)


def _sum(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def _difference(a: Range, b: Range) -> Range:
    return a[0] - b[1], a[1] - b[0]


def _product(a: Range, b: Range) -> Range:
    ends = [x * y for x, y in product(a, b)]
    return min(ends), max(ends)


_ARITHMETIC: Final[Mapping[Opcode, Callable[[Range, Range], Range]]] = {
    Opcode.ADD: _sum,
    Opcode.SUBTRACT: _difference,
    Opcode.MULTIPLY: _product,
}
