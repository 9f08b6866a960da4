"""Rules of the pass simplify for arithmetic and types: identities that hold for every input, NaN and -0 included."""

from __future__ import annotations

from collections.abc import Callable

from flagos_backend.ir.attributes import CompareAttributes, ConstantAttributes, DimensionsAttributes
from flagos_backend.ir.constants import is_splat_of, scalar_bytes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, Rule, array_shape
from flagos_backend.passes.simplify_indices import counted_dimension

_FLOATS = frozenset({ElementType.F16, ElementType.BF16, ElementType.F32, ElementType.F64})


def _represents(wide: ElementType, narrow: ElementType) -> bool:
    """Whether every value of ``narrow`` is one of ``wide``."""
    if narrow is wide:
        return True
    if narrow is ElementType.PRED:
        return wide in _FLOATS or wide.is_complex or (wide.is_integer and wide.bits >= 8)
    if narrow.is_integer and wide.is_integer:
        if narrow.is_unsigned:
            return wide.bits > narrow.bits or (wide.is_unsigned and wide.bits == narrow.bits)
        return wide.is_signed and wide.bits >= narrow.bits
    return wide in _WIDER_FLOATS.get(narrow, ())


_WIDER_FLOATS: dict[ElementType, tuple[ElementType, ...]] = {
    ElementType.F16: (ElementType.F32, ElementType.F64),
    ElementType.BF16: (ElementType.F32, ElementType.F64),
    ElementType.F32: (ElementType.F64,),
    ElementType.C64: (ElementType.C128,),
}


def _convert(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    source = instruction.operands[0]
    if source.shape == instruction.shape:
        return source
    if source.opcode is Opcode.CONVERT:
        original = source.operands[0]
        if _represents(array_shape(source).element_type, array_shape(original).element_type):
            return emitter.emit(Opcode.CONVERT, instruction.shape, (original,), like=instruction)
    return None


def _bitcast_convert(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    source = instruction.operands[0]
    if source.shape == instruction.shape:
        return source
    if source.opcode is Opcode.BITCAST_CONVERT and source.operands[0].shape == instruction.shape:
        return source.operands[0]
    return None


# An operand counts as a constant when it is one, or a broadcast of one.


def _splat_source(instruction: Instruction) -> Instruction:
    return instruction.operands[0] if instruction.opcode is Opcode.BROADCAST else instruction


def _is_number(instruction: Instruction, value: float) -> bool:
    """Whether every element is ``value``, with its sign of zero. Never so for complex and small types."""
    element_type = array_shape(instruction).element_type
    if not (element_type in _FLOATS or (element_type.is_integer and element_type.bits >= 8)):
        return False
    source = _splat_source(instruction)
    return source.opcode is Opcode.CONSTANT and is_splat_of(source, scalar_bytes(value, element_type))


def _add(instruction: Instruction, _: Emitter) -> Instruction | None:
    """x + -0 is x for every float; x + 0 is not, for x = -0."""
    zero = 0 if array_shape(instruction).element_type.is_integer else -0.0
    lhs, rhs = instruction.operands
    return lhs if _is_number(rhs, zero) else rhs if _is_number(lhs, zero) else None


def _subtract(instruction: Instruction, _: Emitter) -> Instruction | None:
    return instruction.operands[0] if _is_number(instruction.operands[1], 0) else None


def _multiply(instruction: Instruction, _: Emitter) -> Instruction | None:
    lhs, rhs = instruction.operands
    if array_shape(instruction).element_type.is_integer and (_is_number(lhs, 0) or _is_number(rhs, 0)):
        return lhs if _is_number(lhs, 0) else rhs
    return lhs if _is_number(rhs, 1) else rhs if _is_number(lhs, 1) else None


def _divide(instruction: Instruction, _: Emitter) -> Instruction | None:
    return instruction.operands[0] if _is_number(instruction.operands[1], 1) else None


def _all_bits(instruction: Instruction, *, ones: bool) -> bool:
    element_type = array_shape(instruction).element_type
    if element_type.bits < 8:
        return False
    pattern = b"\x01" if element_type is ElementType.PRED else b"\xff" * element_type.bytes
    return is_splat_of(_splat_source(instruction), pattern if ones else bytes(element_type.bytes))


def _bitwise(absorbing_ones: bool | None) -> Callable[[Instruction, Emitter], Instruction | None]:
    """and (False), or (True), xor (None): which of all-ones and all-zeros swallows the other operand."""

    def rule(instruction: Instruction, _: Emitter) -> Instruction | None:
        for this, other in (instruction.operands, instruction.operands[::-1]):
            if absorbing_ones is not None and _all_bits(this, ones=absorbing_ones):
                return this
            if _all_bits(this, ones=absorbing_ones is False):
                return other
        same = instruction.operands[0] is instruction.operands[1] and absorbing_ones is not None
        return instruction.operands[0] if same else None

    return rule


def _shift(instruction: Instruction, _: Emitter) -> Instruction | None:
    return instruction.operands[0] if _is_number(instruction.operands[1], 0) else None


def _involution(instruction: Instruction, _: Emitter) -> Instruction | None:
    """negate and not undo themselves."""
    inner = instruction.operands[0]
    return inner.operands[0] if inner.opcode is instruction.opcode else None


def _select(instruction: Instruction, _: Emitter) -> Instruction | None:
    predicate, on_true, on_false = instruction.operands
    if on_true is on_false or _all_bits(predicate, ones=True):
        return on_true
    return on_false if _all_bits(predicate, ones=False) else None


def _compare(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    """A position is not negative: what makes negative indices count from the end leaves it alone."""
    direction = instruction.attributes_as(CompareAttributes).direction
    position, other = instruction.operands
    if direction not in (Comparison.LT, Comparison.GE) or not _is_number(other, 0):
        return None
    if counted_dimension(position) is None:
        return None
    data = ConstantAttributes(bytes([direction is Comparison.GE]))
    answer = emitter.emit(Opcode.CONSTANT, ArrayShape(ElementType.PRED), (), data, like=instruction)
    return emitter.emit(Opcode.BROADCAST, instruction.shape, (answer,), DimensionsAttributes(()), like=instruction)


def _part_of_complex(index: int) -> Rule:
    def rule(instruction: Instruction, _: Emitter) -> Instruction | None:
        source = instruction.operands[0]
        return source.operands[index] if source.opcode is Opcode.COMPLEX else None

    return rule


# One element of these comes out the same alone or in an array; math functions may differ in a last bit.
_SCALAR_FIRST = (
    *(Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY, Opcode.AND, Opcode.OR, Opcode.XOR, Opcode.NOT, Opcode.NEGATE),
    *(Opcode.COMPARE, Opcode.CONVERT, Opcode.MAXIMUM, Opcode.MINIMUM),
)


def _scalar_first(identity: Rule | None) -> Rule:
    """The opcode's own identity, else: compute on scalars, then broadcast."""

    def rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
        found = None if identity is None else identity(instruction, emitter)
        if found is not None or not all(map(_is_scalar_broadcast, instruction.operands)):
            return found
        shape = array_shape(instruction)
        value = emitter.emit(
            instruction.opcode,
            ArrayShape(shape.element_type),
            [operand.operands[0] for operand in instruction.operands],
            instruction.attributes,
            like=instruction,
        )
        return emitter.emit(Opcode.BROADCAST, shape, (value,), DimensionsAttributes(()), like=instruction)

    return rule


def _is_scalar_broadcast(instruction: Instruction) -> bool:
    return instruction.opcode is Opcode.BROADCAST and not array_shape(instruction.operands[0]).dims


_IDENTITIES: dict[Opcode, Rule] = {
    Opcode.CONVERT: _convert,
    Opcode.BITCAST_CONVERT: _bitcast_convert,
    Opcode.ADD: _add,
    Opcode.SUBTRACT: _subtract,
    Opcode.MULTIPLY: _multiply,
    Opcode.DIVIDE: _divide,
    Opcode.AND: _bitwise(absorbing_ones=False),
    Opcode.OR: _bitwise(absorbing_ones=True),
    Opcode.XOR: _bitwise(absorbing_ones=None),
    Opcode.SHIFT_LEFT: _shift,
    Opcode.SHIFT_RIGHT_ARITHMETIC: _shift,
    Opcode.SHIFT_RIGHT_LOGICAL: _shift,
    Opcode.NEGATE: _involution,
    Opcode.NOT: _involution,
    Opcode.COMPARE: _compare,
    Opcode.SELECT: _select,
    Opcode.REAL: _part_of_complex(0),
    Opcode.IMAG: _part_of_complex(1),
}
RULES: dict[Opcode, Rule] = _IDENTITIES | {opcode: _scalar_first(_IDENTITIES.get(opcode)) for opcode in _SCALAR_FIRST}
