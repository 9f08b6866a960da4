"""Constants as numpy arrays and back. Used by builder, printer and passes; needs no type that numpy itself lacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from flagos_backend.ir.attributes import ConstantAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

Array = np.ndarray[Any, Any]

# Types whose bytes are a numpy type's; types below 8 bits sit one to a byte, so int8 and uint8 hold their values.
NUMPY_TYPES: dict[ElementType, np.dtype[Any]] = {
    ElementType.PRED: np.dtype("?"),
    **{t: np.dtype(f"<i{t.bytes}") for t in ElementType if t.is_signed},
    **{t: np.dtype(f"<u{t.bytes}") for t in ElementType if t.is_unsigned},
    **{t: np.dtype(f"<f{t.bytes}") for t in (ElementType.F16, ElementType.F32, ElementType.F64)},
    **{t: np.dtype(f"<c{t.bytes}") for t in (ElementType.C64, ElementType.C128)},
}
_ELEMENT_TYPES = {dtype: t for t, dtype in NUMPY_TYPES.items() if t.bits >= 8}


def element_type_of(dtype: np.dtype[Any]) -> ElementType:
    """The element type of a native numpy type. Raises KeyError for any other."""
    return _ELEMENT_TYPES[dtype.newbyteorder("<")]


def constant_array(instruction: Instruction) -> Array | None:
    """The value of a constant, read-only; None for another instruction or a type that numpy lacks."""
    shape = instruction.shape
    if instruction.opcode is not Opcode.CONSTANT or not isinstance(shape, ArrayShape):
        return None
    dtype = NUMPY_TYPES.get(shape.element_type)
    if dtype is None:
        return None
    return np.frombuffer(instruction.attributes_as(ConstantAttributes).data, dtype).reshape(shape.dims)


def is_splat_of(instruction: Instruction, value: bytes) -> bool:
    """Whether a constant holds nothing but the element with these bytes; bit for bit, so -0 is not 0."""
    if instruction.opcode is not Opcode.CONSTANT:
        return False
    data = instruction.attributes_as(ConstantAttributes).data
    return data == value if len(data) == len(value) else bool(data) and data == value * (len(data) // len(value))


def scalar_bytes(value: complex, element_type: ElementType) -> bytes:
    """One element, rounded to nearest even. Raises ValueError for a type without native numbers, or out of range."""
    if element_type is ElementType.BF16:
        bits = int(np.float32(value.real).view(np.uint32))
        rounded = bits if np.isnan(value.real) else bits + 0x7FFF + (bits >> 16 & 1)
        return (rounded >> 16 & 0xFFFF).to_bytes(2, "little")
    dtype = NUMPY_TYPES.get(element_type)
    if dtype is None:
        raise ValueError(f"{element_type.name.lower()} has no literals here")
    if dtype.kind == "c":
        return np.array(value, dtype).tobytes()
    if isinstance(value, complex):
        raise ValueError(f"{value} is not a {element_type.name.lower()}")
    if element_type.is_integer:
        low = -(1 << (element_type.bits - 1)) if element_type.is_signed else 0
        high = (1 << (element_type.bits - element_type.is_signed)) - 1
        if not low <= value <= high:
            raise ValueError(f"{value} is not a {element_type.name.lower()}")
    with np.errstate(over="ignore"):
        return np.array(value, dtype).tobytes()
