"""Between which numbers the integers of a nest lie, as far as the operations around literals tell. Used by fusion,
which then leaves out what keeps an index inside of an array."""

from __future__ import annotations

from itertools import product

from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.literals import number_of
from flagos_backend.loop_ir.region import Apply, Expression, Literal

Bounds = tuple[int, int]
# Operations that are looked through on the way to a literal.
_DEPTH = 6


def bounds_of(value: Expression, depth: int = _DEPTH) -> Bounds:
    """The least and the greatest number that ``value``, of an integer type or PRED, may be."""
    widest = bounds_of_type(value.element_type)
    if isinstance(value, Literal):
        number = int(number_of(value))
        return number, number
    if not isinstance(value, Apply) or value.detail or depth == 0:
        return widest
    if any(not operand.element_type.is_integer for operand in value.operands[value.opcode is Opcode.SELECT :]):
        is_pred = value.opcode is Opcode.CONVERT and value.operands[0].element_type is ElementType.PRED
        return (0, 1) if is_pred else widest
    found = _bounds_of_operation(value, [bounds_of(operand, depth - 1) for operand in value.operands])
    return found if found is not None and widest[0] <= found[0] and found[1] <= widest[1] else widest


def bounds_of_type(element_type: ElementType) -> Bounds:
    """The least and the greatest number of an integer type, or of PRED."""
    if element_type is ElementType.PRED:
        return 0, 1
    bits = element_type.bits
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if element_type.is_signed else (0, (1 << bits) - 1)


def _bounds_of_operation(operation: Apply, operands: list[Bounds]) -> Bounds | None:
    """Without regard to what the type holds: beyond it numbers wrap. None for an operation that tells nothing."""
    (low, high), *others = operands
    match operation.opcode:
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
