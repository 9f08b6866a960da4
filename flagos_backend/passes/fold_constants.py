"""Computes small constant expressions at compile time, where numpy gives XLA's result bit for bit; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flagos_backend.ir.attributes import (
    CompareAttributes,
    ConstantAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    SliceAttributes,
)
from flagos_backend.ir.constants import NUMPY_TYPES, constant_array
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule

MAX_ELEMENTS = 1024

Array = np.ndarray[Any, Any]
# The folded value, or None where it cannot be had exactly.
Folder = Callable[[Instruction, list[Array]], Array | None]


def fold_constants(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    shape = instruction.shape
    if not isinstance(shape, ArrayShape) or shape.num_elements > MAX_ELEMENTS:
        return _splat(instruction, emitter) if instruction.opcode is Opcode.CONSTANT else None
    if instruction.opcode is Opcode.CONSTANT:
        return _splat(instruction, emitter)
    folder = _FOLDERS.get(instruction.opcode)
    if folder is None or not all(operand.opcode is Opcode.CONSTANT for operand in instruction.operands):
        return None
    values = [constant_array(operand) for operand in instruction.operands]
    known = [value for value in values if value is not None]
    if len(known) != len(values) or any(value.size > MAX_ELEMENTS for value in known):
        return None
    with np.errstate(all="ignore"):
        result = folder(instruction, known)
    if result is None or not _is_reproducible(result):
        return None
    data = ConstantAttributes(np.ascontiguousarray(result, NUMPY_TYPES[shape.element_type]).tobytes())
    return emitter.emit(Opcode.CONSTANT, shape, (), data, like=instruction)


def _is_reproducible(result: Array) -> bool:
    """A computed NaN's sign differs between processors; a denormal is flushed on some devices."""
    if result.dtype.kind not in "fc":
        return True
    parts = np.stack([result.real, result.imag]) if result.dtype.kind == "c" else result
    tiny = np.finfo(parts.dtype).tiny
    return not bool(np.any(np.isnan(parts) | ((parts != 0) & (np.abs(parts) < tiny))))


def _splat(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    """A constant that repeats one element becomes a broadcast of a scalar."""
    shape = instruction.shape
    if not isinstance(shape, ArrayShape) or shape.num_elements < 2:
        return None
    data = instruction.attributes_as(ConstantAttributes).data
    size = shape.element_type.bytes
    if data[:size] != data[-size:] or data != data[:size] * shape.num_elements:
        return None
    scalar = ArrayShape(shape.element_type)
    value = emitter.emit(Opcode.CONSTANT, scalar, (), ConstantAttributes(data[:size]), like=instruction)
    return emitter.emit(Opcode.BROADCAST, shape, (value,), DimensionsAttributes(()), like=instruction)


def _ufunc(function: np.ufunc, kinds: str) -> Folder:
    """numpy's own operation on f32, f64 and whole-byte integers, as ``kinds`` allows (numpy's kind letters)."""

    def fold(instruction: Instruction, values: list[Array]) -> Array | None:
        shape = instruction.operands[0].shape
        exact = isinstance(shape, ArrayShape) and shape.element_type.bits >= 8 and shape.element_type is not _F16
        return function(*values) if exact and values[0].dtype.kind in kinds else None

    return fold


_F16 = ElementType.F16
_COMPARISONS: dict[Comparison, Callable[[Array, Array], Array]] = {
    Comparison.EQ: np.equal,
    Comparison.NE: np.not_equal,
    Comparison.LT: np.less,
    Comparison.LE: np.less_equal,
    Comparison.GT: np.greater,
    Comparison.GE: np.greater_equal,
}


def _compare(instruction: Instruction, values: list[Array]) -> Array | None:
    a = instruction.attributes_as(CompareAttributes)
    if a.order is ComparisonOrder.TOTAL and values[0].dtype.kind == "f":
        return None
    return _COMPARISONS[a.direction](*values) if values[0].dtype.kind in "biuf" else None


def _convert(instruction: Instruction, values: list[Array]) -> Array | None:
    """Integers wrap; to pred is a test against zero. From floats only to wider ones: XLA saturates, numpy does not."""
    shape, value = instruction.shape, values[0]
    if not isinstance(shape, ArrayShape) or shape.element_type.bits < 8 or shape.element_type not in NUMPY_TYPES:
        return None
    target = NUMPY_TYPES[shape.element_type]
    source = instruction.operands[0].shape
    if not isinstance(source, ArrayShape) or source.element_type.bits < 8:
        return None
    if target.kind == "b":
        return np.not_equal(value, 0)
    if value.dtype.kind in "biu" and (target.kind in "iu" or target.itemsize >= 4) and target.kind != "c":
        return value.astype(target)
    widens = value.dtype.kind == "f" and target.kind == "f" and target.itemsize >= value.dtype.itemsize
    return value.astype(target) if widens else None


def _transpose(instruction: Instruction, values: list[Array]) -> Array:
    return values[0].transpose(instruction.attributes_as(DimensionsAttributes).dimensions)


def _slice(instruction: Instruction, values: list[Array]) -> Array:
    a = instruction.attributes_as(SliceAttributes)
    return values[0][tuple(map(slice, a.starts, a.limits, a.strides))]


def _concatenate(instruction: Instruction, values: list[Array]) -> Array:
    return np.concatenate(values, instruction.attributes_as(DimensionAttributes).dimension)


def _reverse(instruction: Instruction, values: list[Array]) -> Array:
    return np.flip(values[0], instruction.attributes_as(DimensionsAttributes).dimensions)


def _reshape(instruction: Instruction, values: list[Array]) -> Array | None:
    return values[0].reshape(instruction.shape.dims) if isinstance(instruction.shape, ArrayShape) else None


def _select(_: Instruction, values: list[Array]) -> Array:
    return np.where(*values)


_FOLDERS: dict[Opcode, Folder] = {
    Opcode.ADD: _ufunc(np.add, "iuf"),
    Opcode.SUBTRACT: _ufunc(np.subtract, "iuf"),
    Opcode.MULTIPLY: _ufunc(np.multiply, "iuf"),
    Opcode.DIVIDE: _ufunc(np.true_divide, "f"),
    Opcode.SQRT: _ufunc(np.sqrt, "f"),
    Opcode.NEGATE: _ufunc(np.negative, "iuf"),
    Opcode.ABS: _ufunc(np.absolute, "iuf"),
    Opcode.SIGN: _ufunc(np.sign, "iu"),
    Opcode.FLOOR: _ufunc(np.floor, "f"),
    Opcode.CEIL: _ufunc(np.ceil, "f"),
    Opcode.MAXIMUM: _ufunc(np.maximum, "iu"),
    Opcode.MINIMUM: _ufunc(np.minimum, "iu"),
    Opcode.AND: _ufunc(np.bitwise_and, "biu"),
    Opcode.OR: _ufunc(np.bitwise_or, "biu"),
    Opcode.XOR: _ufunc(np.bitwise_xor, "biu"),
    Opcode.NOT: _ufunc(np.invert, "biu"),
    Opcode.COMPARE: _compare,
    Opcode.CONVERT: _convert,
    Opcode.SELECT: _select,
    Opcode.RESHAPE: _reshape,
    Opcode.TRANSPOSE: _transpose,
    Opcode.SLICE: _slice,
    Opcode.CONCATENATE: _concatenate,
    Opcode.REVERSE: _reverse,
}
