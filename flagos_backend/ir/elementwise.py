"""Which instructions a region may hold, by opcode and element type."""

from __future__ import annotations

from flagos_backend.ir.attributes import DimensionsAttributes
from flagos_backend.ir.functions import FUNCTIONS, TABLE_OF_TWO
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

_FLOATS = frozenset({ElementType.F16, ElementType.BF16, ElementType.F32, ElementType.F64})
_INTEGERS = frozenset(
    {
        ElementType.S8,
        ElementType.S16,
        ElementType.S32,
        ElementType.S64,
        ElementType.U8,
        ElementType.U16,
        ElementType.U32,
        ElementType.U64,
    }
)
_PRED = frozenset({ElementType.PRED})
_NUMBERS = _FLOATS | _INTEGERS
_ALL = _NUMBERS | _PRED

# Element type of the first operand (the second for select) -> allowed.
ELEMENTWISE: dict[Opcode, frozenset[ElementType]] = {
    Opcode.ABS: _NUMBERS,
    Opcode.NEGATE: _NUMBERS,
    Opcode.SIGN: _NUMBERS,
    Opcode.NOT: _INTEGERS | _PRED,
    Opcode.POPCNT: _INTEGERS,
    Opcode.CLZ: _INTEGERS,
    Opcode.ADD: _ALL,
    Opcode.SUBTRACT: _NUMBERS,
    Opcode.MULTIPLY: _ALL,
    Opcode.DIVIDE: _NUMBERS,
    Opcode.MAXIMUM: _ALL,
    Opcode.MINIMUM: _ALL,
    Opcode.AND: _INTEGERS | _PRED,
    Opcode.OR: _INTEGERS | _PRED,
    Opcode.XOR: _INTEGERS | _PRED,
    Opcode.SHIFT_LEFT: _INTEGERS,
    Opcode.SHIFT_RIGHT_ARITHMETIC: _INTEGERS,
    Opcode.SHIFT_RIGHT_LOGICAL: _INTEGERS,
    Opcode.COMPARE: _ALL,
    Opcode.SELECT: _ALL,
    Opcode.CLAMP: _NUMBERS,
    Opcode.CONVERT: _ALL,
    Opcode.BITCAST_CONVERT: _ALL,
    Opcode.IS_FINITE: _FLOATS,
    **dict.fromkeys(FUNCTIONS, _FLOATS),
    **{function.opcode: _NUMBERS if function.of_integers else _FLOATS for function in TABLE_OF_TWO},
}

# The same for complex numbers of two floats, where a device's tiles hold them.
_C64 = frozenset({ElementType.C64})
_COMPLEX: dict[Opcode, frozenset[ElementType]] = {
    **dict.fromkeys((Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY, Opcode.DIVIDE, Opcode.NEGATE), _C64),
    **dict.fromkeys((Opcode.COMPARE, Opcode.SELECT, Opcode.ABS, Opcode.REAL, Opcode.IMAG), _C64),
    **dict.fromkeys((Opcode.COMPLEX, Opcode.CONVERT), frozenset({ElementType.F32})),
}

COMBINES = frozenset({Opcode.ADD, Opcode.MULTIPLY, Opcode.MAXIMUM, Opcode.MINIMUM, Opcode.AND, Opcode.OR, Opcode.XOR})


def element_type(instruction: Instruction) -> ElementType | None:
    """None for a tuple."""
    return instruction.shape.element_type if isinstance(instruction.shape, ArrayShape) else None


def is_arithmetic(instruction: Instruction) -> bool:
    """Whether tiles can compute with its elements, rather than only move them."""
    return element_type(instruction) in _ALL


def is_elementwise(instruction: Instruction) -> bool:
    """Whether a region can compute ``instruction`` point by point."""
    allowed = ELEMENTWISE.get(instruction.opcode)
    if allowed is None or element_type(instruction) not in _ALL:
        return False
    typed = instruction.operands[1 if instruction.opcode is Opcode.SELECT else 0]
    source, result = element_type(typed), element_type(instruction)
    if source not in allowed or result is None:
        return False
    if instruction.opcode is Opcode.CONVERT:
        return _converts(source, result)
    if instruction.opcode is Opcode.BITCAST_CONVERT:
        return source.bytes == result.bytes and ElementType.PRED not in (source, result)
    return True


def is_complex_elementwise(instruction: Instruction) -> bool:
    """Whether a region can compute ``instruction``, which takes or makes complex numbers, point by point."""
    if not instruction.operands:
        return False
    typed = instruction.operands[1 if instruction.opcode is Opcode.SELECT else 0]
    source, result = element_type(typed), element_type(instruction)
    return source in _COMPLEX.get(instruction.opcode, ()) and ElementType.C64 in (source, result)


def _converts(source: ElementType, result: ElementType) -> bool:
    """Conversions to 16-bit floats go through float: only from types that a float holds exactly."""
    if result not in (ElementType.F16, ElementType.BF16) or source is result:
        return True
    return source in (ElementType.F32, ElementType.F16, ElementType.BF16, ElementType.PRED) or source.bytes <= 2


def reduction_opcode(instruction: Instruction, half_sums: bool = False) -> Opcode | None:
    """The binary operation that a one-operand reduce combines with, if a region can do it; else None.

    ``half_sums``: whether a reduction of 16-bit floats accumulates wider than its element type.
    """
    if instruction.opcode is not Opcode.REDUCE or len(instruction.operands) != 2:
        return None
    if not instruction.attributes_as(DimensionsAttributes).dimensions:
        return None
    root = instruction.called[0].root
    source = element_type(instruction.operands[0])
    if root.opcode not in COMBINES or element_type(root) is not source or source not in _ALL:
        return None
    if {id(operand) for operand in root.operands} != {id(p) for p in instruction.called[0].parameters}:
        return None
    if root.opcode in (Opcode.AND, Opcode.OR, Opcode.XOR) and source in _FLOATS:
        return None
    half = root.opcode in (Opcode.ADD, Opcode.MULTIPLY) and source in (ElementType.F16, ElementType.BF16)
    if half and not half_sums:
        return None
    return root.opcode


def is_computed(instruction: Instruction) -> bool:
    """Whether regions compute with elements of its type."""
    return element_type(instruction) in _ALL


def is_regular(instruction: Instruction) -> bool:
    """Whether tiles can hold its elements: up to 8 bytes, no sub-byte or 8-bit float arithmetic involved in moving."""
    found = element_type(instruction)
    return found is not None and found.bytes in (1, 2, 4, 8) and found is not ElementType.TOKEN


def widens(instruction: Instruction) -> bool:
    """Whether it converts to a type of more bytes."""
    if instruction.opcode is not Opcode.CONVERT:
        return False
    narrow, wide = element_type(instruction.operands[0]), element_type(instruction)
    return narrow is not None and wide is not None and narrow.bytes < wide.bytes
