"""What tiles compute, as bytecode: operations, reductions and element types by their numbers in bytecode.py.

Shared by the writers of loops, emit_map_loop.py and emit_row_loop.py.
"""

from __future__ import annotations

from flagos_backend.codegen.cpu.bytecode import ARITHMETIC, COMBINES, PARTS, StepKind, cpp_name, operation_number
from flagos_backend.codegen.cpu.transforms.fuse_op_pairs import pair_number
from flagos_backend.ir.opcode import ComparisonOrder, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.region import Apply, Expression, Reduce

# Types that tiles only move are moved as unsigned integers of their width.
_BY_WIDTH = {1: ElementType.U8, 2: ElementType.U16, 4: ElementType.U32, 8: ElementType.U64}


def is_movable(element_type: ElementType) -> bool:
    """Whether tiles can move elements of the type."""
    return element_type.bytes in _BY_WIDTH


def is_arithmetic_type(element_type: ElementType) -> bool:
    """Whether native code computes in the type and orders its numbers, not only moves them."""
    return element_type in ARITHMETIC


def tile_type(element_type: ElementType) -> ElementType:
    """As what tiles hold elements of the type."""
    own = element_type in ARITHMETIC or element_type is ElementType.C64
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
    opcode, element_type = expression.opcode, expression.element_type
    operand_type = tile_type(expression.operands[-1].element_type)
    if opcode in PARTS and ElementType.C64 in (operand_type, element_type):
        return StepKind.PART, PARTS.index(opcode), int(ElementType.C64)
    if opcode is Opcode.CONVERT:
        return StepKind.CONVERT, int(operand_type), int(element_type)
    if opcode is Opcode.BITCAST_CONVERT:
        return StepKind.BITCAST, int(operand_type), int(element_type)
    pair = pair_number(expression)
    if pair is not None:
        return StepKind.PAIR, pair, int(element_type)
    of_operands = opcode in (Opcode.COMPARE, Opcode.IS_FINITE)
    return (
        StepKind.APPLY,
        operation_number(_name(expression)),
        int(operand_type if of_operands else tile_type(element_type)),
    )


def _name(expression: Apply) -> str:
    """Which of bytecode.OPERATIONS it is."""
    opcode, detail = expression.opcode, expression.detail
    if opcode is Opcode.COMPARE:
        return cpp_name(detail) + ("Total" if expression.order is ComparisonOrder.TOTAL else "")
    if opcode is Opcode.LOG and detail == Intrinsic.BASE_TWO:
        return "Log2"
    if detail == Intrinsic.ROTATE:
        return "RotateLeft"
    name = cpp_name(opcode.name)
    return f"Floor{name}" if detail == Intrinsic.FLOOR else name
