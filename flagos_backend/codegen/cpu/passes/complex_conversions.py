"""A conversion of real numbers to complex ones of two floats becomes one to floats, beside zeros, as spectra are
multiplied with masks and real weights: loop nests have both, and the conversion itself would be a library call.

A pass of what emitter.py emits.
"""

from __future__ import annotations

from flagos_backend.ir.attributes import ConstantAttributes, DimensionsAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape


def without_complex_conversions(module: Module) -> Module:
    """``module`` without conversions of real numbers to C64."""
    return apply_rule(module, _rule)


def _rule(convert: Instruction, emitter: Emitter) -> Instruction | None:
    if convert.opcode is not Opcode.CONVERT or array_shape(convert).element_type is not ElementType.C64:
        return None
    (operand,) = convert.operands
    if array_shape(operand).element_type.is_complex:
        return None
    floats = ArrayShape(ElementType.F32, array_shape(convert).dims)
    real = emitter.emit(Opcode.CONVERT, floats, (operand,), like=convert)
    number = ArrayShape(ElementType.F32, ())
    zeros = emitter.emit(Opcode.CONSTANT, number, (), ConstantAttributes(bytes(4)), like=convert)
    if floats.dims:
        zeros = emitter.emit(Opcode.BROADCAST, floats, (zeros,), DimensionsAttributes(()), like=convert)
    return emitter.emit(Opcode.COMPLEX, convert.shape, (real, zeros), like=convert)
