"""Scalar constants of the loop-nest IR: as Python numbers, and those that change nothing in a reduction."""

from __future__ import annotations

import math
import struct

from flagos_backend.ir.attributes import ConstantAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.region import Literal, Reduce

_STRUCT = {ElementType.F16: "<e", ElementType.F32: "<f", ElementType.F64: "<d"}


def number_of(literal: Literal) -> int | float | bool:
    """The number that a literal of an arithmetic type is."""
    element_type, data = literal.element_type, literal.data
    if element_type is ElementType.PRED:
        return bool(data[0])
    if element_type is ElementType.BF16:
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    if element_type.is_float:
        return float(struct.unpack(_STRUCT[element_type], data)[0])
    return int.from_bytes(data, "little", signed=element_type.is_signed)


def literal_of(number: int | float, element_type: ElementType) -> Literal:
    """The inverse of number_of; BF16 must hold ``number`` exactly."""
    if element_type is ElementType.BF16:
        return Literal(element_type, struct.pack("<f", number)[2:])
    if element_type.is_float:
        return Literal(element_type, struct.pack(_STRUCT[element_type], number))
    return Literal(element_type, int(number).to_bytes(element_type.bytes, "little", signed=element_type.is_signed))


def identity_of(combine: Opcode, element_type: ElementType) -> int | float:
    """What changes nothing. Of a sum it is +0, though -0 alone keeps a sum of -0 what it is."""
    if element_type is ElementType.PRED:
        return int(combine in (Opcode.AND, Opcode.MULTIPLY, Opcode.MINIMUM))
    if element_type.is_float:
        return {Opcode.ADD: 0.0, Opcode.MULTIPLY: 1.0, Opcode.MAXIMUM: -math.inf, Opcode.MINIMUM: math.inf}[combine]
    least = -(1 << (element_type.bits - 1)) if element_type.is_signed else 0
    greatest = least + (1 << element_type.bits) - 1
    ones = -1 if element_type.is_signed else greatest
    return {Opcode.MULTIPLY: 1, Opcode.MAXIMUM: least, Opcode.MINIMUM: greatest, Opcode.AND: ones}.get(combine, 0)


def starts_neutral(reduction: Reduce) -> bool:
    """Whether the reduction's initial value changes nothing."""
    initial = reduction.initial
    return isinstance(initial, Literal) and number_of(initial) == identity_of(reduction.combine, reduction.element_type)


def uniform_literal(instruction: Instruction) -> Literal | None:
    """A constant whose elements are all the same, as one scalar."""
    if instruction.opcode is not Opcode.CONSTANT or not isinstance(instruction.shape, ArrayShape):
        return None
    data = instruction.attributes_as(ConstantAttributes).data
    size = instruction.shape.element_type.bytes
    first = data[:size]
    if size == 0 or size > 8 or not data or (len(data) > size and first * (len(data) // size) != data):
        return None
    return Literal(instruction.shape.element_type, first)
