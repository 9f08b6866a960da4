"""What tiles compute: the numbers that native/cpu/kernels.h gives operations, reductions and element types.

Shared by the writers of loops, emit_map_loop.py and emit_row_loop.py.
"""

from __future__ import annotations

from flagos_backend.codegen.cpu.transforms.fuse_op_pairs import pair_number
from flagos_backend.ir.elementwise import FUNCTIONS
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.region import Apply, Expression, Reduce

_APPLY, _CONVERT, _BITCAST, _PAIR, _PART = range(5)

# The order of FLAGOS_CPU_OPS in native/cpu/kernels.h.
_OPERATIONS: dict[Opcode, int] = {
    opcode: number
    for number, opcode in enumerate(
        (
            Opcode.ABS,
            Opcode.NEGATE,
            Opcode.NOT,
            Opcode.SIGN,
            *FUNCTIONS,
            Opcode.IS_FINITE,
            Opcode.POPCNT,
            Opcode.CLZ,
            Opcode.ADD,
            Opcode.SUBTRACT,
            Opcode.MULTIPLY,
            Opcode.DIVIDE,
            Opcode.REMAINDER,
            Opcode.MAXIMUM,
            Opcode.MINIMUM,
            Opcode.POWER,
            Opcode.ATAN2,
            Opcode.AND,
            Opcode.OR,
            Opcode.XOR,
            Opcode.SHIFT_LEFT,
            Opcode.SHIFT_RIGHT_ARITHMETIC,
            Opcode.SHIFT_RIGHT_LOGICAL,
        )
    )
}
_FIRST_COMPARISON = len(_OPERATIONS)
_COMPARISONS = (Comparison.EQ, Comparison.NE, Comparison.GE, Comparison.GT, Comparison.LE, Comparison.LT)
_OPERATIONS[Opcode.SELECT] = _FIRST_COMPARISON + 2 * len(_COMPARISONS)
_OPERATIONS[Opcode.CLAMP] = _OPERATIONS[Opcode.SELECT] + 1
_LOG2 = _OPERATIONS[Opcode.CLAMP] + 1
_ROTATE_LEFT = _LOG2 + 1
_FLOORS = {Opcode.DIVIDE: _ROTATE_LEFT + 1, Opcode.REMAINDER: _ROTATE_LEFT + 2}

# The order of PartOp there: between complex numbers and real ones.
_PARTS = {opcode: n for n, opcode in enumerate((Opcode.REAL, Opcode.IMAG, Opcode.ABS, Opcode.COMPLEX))}

COMBINES = (Opcode.ADD, Opcode.MULTIPLY, Opcode.MAXIMUM, Opcode.MINIMUM, Opcode.AND, Opcode.OR, Opcode.XOR)

# Types that tiles only move are moved as unsigned integers of their width.
_ARITHMETIC = frozenset(
    t
    for t in ElementType
    if t.name in ("PRED", "S8", "S16", "S32", "S64", "U8", "U16", "U32", "U64", "F16", "BF16", "F32", "F64")
)
_BY_WIDTH = {1: ElementType.U8, 2: ElementType.U16, 4: ElementType.U32, 8: ElementType.U64}


def is_movable(element_type: ElementType) -> bool:
    """Whether tiles can move elements of the type."""
    return element_type.bytes in _BY_WIDTH


def is_arithmetic_type(element_type: ElementType) -> bool:
    """Whether native code computes in the type and orders its numbers, not only moves them."""
    return element_type in _ARITHMETIC


def tile_type(element_type: ElementType) -> ElementType:
    """As what tiles hold elements of the type."""
    own = element_type in _ARITHMETIC or element_type is ElementType.C64
    return element_type if own else _BY_WIDTH[element_type.bytes]


def index_type(element_type: ElementType) -> ElementType:
    """As what native code reads an integer: one of fewer than 8 bits stands in a byte, which holds its number."""
    if element_type.bits >= 8:
        return element_type
    return ElementType.S8 if element_type.is_signed else ElementType.U8


def combine_number(reduction: Reduce) -> int:
    """How a reduction combines."""
    return COMBINES.index(reduction.combine)


def literal_bits(data: bytes) -> int:
    """The bytes of an element as a word."""
    return int.from_bytes(data.ljust(8, b"\0"), "little", signed=True)


def step(expression: Apply, registers: dict[Expression, int]) -> list[int]:
    """The bytecode of one operation: what it is, the register of its result, those of its operands."""
    operands = [registers[o] for o in expression.operands]
    return [*_operation(expression), registers[expression], *operands, *[operands[-1]] * (3 - len(operands))]


def _operation(expression: Apply) -> tuple[int, int, int]:
    """Kind, number and element type of a step."""
    operand_type = tile_type(expression.operands[-1].element_type)
    if expression.opcode in _PARTS and ElementType.C64 in (operand_type, expression.element_type):
        return _PART, _PARTS[expression.opcode], int(ElementType.C64)
    if expression.opcode is Opcode.CONVERT:
        return _CONVERT, int(operand_type), int(expression.element_type)
    if expression.opcode is Opcode.BITCAST_CONVERT:
        return _BITCAST, int(operand_type), int(expression.element_type)
    if expression.opcode is Opcode.COMPARE:
        number = _FIRST_COMPARISON + _COMPARISONS.index(Comparison(expression.detail))
        if expression.order is ComparisonOrder.TOTAL:
            number += len(_COMPARISONS)
        return _APPLY, number, int(operand_type)
    if expression.opcode is Opcode.LOG and expression.detail == Intrinsic.BASE_TWO:
        return _APPLY, _LOG2, int(operand_type)
    pair = pair_number(expression)
    if pair is not None:
        return _PAIR, pair, int(expression.element_type)
    if expression.detail == Intrinsic.ROTATE:
        return _APPLY, _ROTATE_LEFT, int(expression.element_type)
    if expression.detail == Intrinsic.FLOOR:
        return _APPLY, _FLOORS[expression.opcode], int(expression.element_type)
    if expression.opcode is Opcode.IS_FINITE:
        return _APPLY, _OPERATIONS[expression.opcode], int(operand_type)
    return _APPLY, _OPERATIONS[expression.opcode], int(tile_type(expression.element_type))
