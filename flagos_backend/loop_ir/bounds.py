"""Between which numbers the integers of a nest lie, as far as the operations around numbers tell. Used by fusion, which
then leaves out what keeps an index inside of an array."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from flagos_backend.ir.attributes import DimensionAttributes
from flagos_backend.ir.elementwise import element_type
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.indexing import dims_of
from flagos_backend.loop_ir.literals import number_of, uniform_literal
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Load

Bounds = tuple[int, int]
# By what they are of and how many operations more are looked through: each is found once.
_Known = dict[tuple[Expression | Instruction, int], Bounds]
# Operations that are looked through on the way to a number.
_DEPTH = 8
# Each of their elements is one of the first operand. No copy: those that transforms make stand for other values.
_MOVES = frozenset(
    {
        *(Opcode.BROADCAST, Opcode.RESHAPE, Opcode.TRANSPOSE, Opcode.SLICE, Opcode.REVERSE),
        *(Opcode.DYNAMIC_SLICE, Opcode.GATHER),
    }
)


def bounds_of(value: Expression) -> Bounds:
    """The least and the greatest number that ``value``, of an integer type or PRED, may be."""
    return _of(value, _DEPTH, {})


def _of(value: Expression, depth: int, known: _Known) -> Bounds:
    found = known.get((value, depth))
    if found is None:
        found = known[value, depth] = _of_expression(value, depth, known)
    return found


def _of_expression(value: Expression, depth: int, known: _Known) -> Bounds:
    if isinstance(value, Literal):
        number = int(number_of(value))
        return number, number
    if isinstance(value, Load):
        return _of_array(value.source, depth, known)
    widest = bounds_of_type(value.element_type)
    if not isinstance(value, Apply) or value.detail or depth == 0:
        return widest
    operands = [_of(o, depth - 1, known) if _is_counted(o.element_type) else None for o in value.operands]
    return _within(widest, _bounds_of_operation(value.opcode, operands))


def bounds_of_type(element_type: ElementType) -> Bounds:
    """The least and the greatest number of an integer type, or of PRED."""
    if element_type is ElementType.PRED:
        return 0, 1
    bits = element_type.bits
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if element_type.is_signed else (0, (1 << bits) - 1)


def _of_array(array: Instruction, depth: int, known: _Known) -> Bounds:
    """Of the elements of one of an integer type, or of PRED."""
    found = known.get((array, depth))
    if found is None:
        found = known[array, depth] = _of_elements(array, depth, known)
    return found


def _of_elements(array: Instruction, depth: int, known: _Known) -> Bounds:
    literal, kind = uniform_literal(array), element_type(array)
    assert kind is not None
    widest = bounds_of_type(kind)
    if literal is not None:
        return _of(literal, depth, known)
    if depth == 0:
        return widest
    if array.opcode is Opcode.IOTA:
        return _within(widest, (0, dims_of(array)[array.attributes_as(DimensionAttributes).dimension] - 1))
    operands = array.operands[:1] if array.opcode in _MOVES else array.operands
    kinds = [element_type(operand) for operand in operands]
    found = [
        _of_array(operand, depth - 1, known) if kind is not None and _is_counted(kind) else None
        for operand, kind in zip(operands, kinds, strict=True)
    ]
    if array.opcode in _MOVES:
        return _within(widest, found[0])
    return _within(widest, _bounds_of_operation(array.opcode, found))


def _is_counted(element_type: ElementType) -> bool:
    return element_type.is_integer or element_type is ElementType.PRED


def _within(widest: Bounds, found: Bounds | None) -> Bounds:
    """What is beyond the type wraps, and may then be any number."""
    return found if found is not None and widest[0] <= found[0] and found[1] <= widest[1] else widest


def _bounds_of_operation(opcode: Opcode, known: Sequence[Bounds | None]) -> Bounds | None:
    """Without regard to what the type holds. None for an operation that tells nothing, as on floats."""
    operands = [bounds for bounds in known if bounds is not None]
    if not operands or len(operands) != len(known):
        return None
    (low, high), *others = operands
    match opcode:
        case Opcode.CONVERT:
            return low, high
        case Opcode.MAXIMUM:
            return max(low, others[0][0]), max(high, others[0][1])
        case Opcode.MINIMUM:
            return min(low, others[0][0]), min(high, others[0][1])
        case Opcode.CLAMP:
            value, most = others
            return min(max(low, value[0]), most[0]), min(max(high, value[1]), most[1])
        case Opcode.ADD:
            return low + others[0][0], high + others[0][1]
        case Opcode.SUBTRACT:
            return low - others[0][1], high - others[0][0]
        case Opcode.MULTIPLY:
            ends = [a * b for a, b in product((low, high), others[0])]
            return min(ends), max(ends)
        case Opcode.SELECT:
            return min(other[0] for other in others), max(other[1] for other in others)
        case Opcode.AND if max(low, others[0][0]) >= 0:
            return 0, min(end for start, end in operands if start >= 0)
    return None
