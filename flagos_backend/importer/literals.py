"""LiteralProto to a constant's bytes and back. Whole arrays at a time; no loop over elements.

IR bytes are row major, little endian; sub-byte types take a byte each, signed ones sign-extended.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flagos_backend.errors import MalformedProgram, UnsupportedAttribute
from flagos_backend.importer.shapes import moves_data, read_layout, write_shape
from flagos_backend.ir.types import ArrayShape, ElementType

# Elements that the wire holds as varints, hence as Python sequences. All others are bytes, two a complex number.
_VARINTS: dict[ElementType, np.dtype[Any]] = {
    ElementType.S32: np.dtype("<i4"),
    ElementType.S64: np.dtype("<i8"),
    ElementType.U32: np.dtype("<u4"),
    ElementType.U64: np.dtype("<u8"),
}
_FIELDS = {t: f"{t.name.lower()}s" for t in ElementType if t is not ElementType.TOKEN}


def read_literal(proto: Any, shape: ArrayShape, place: object) -> bytes:
    """The bytes of an array literal of ``shape``. Raises MalformedProgram when its size is another."""
    element_type = shape.element_type
    if element_type is ElementType.TOKEN:
        return b""
    if proto.sparse_indices:
        raise UnsupportedAttribute(attribute="literal.sparse_indices", value=len(proto.sparse_indices), place=place)
    values = getattr(proto, _FIELDS[element_type])
    data: bytes
    if element_type in _VARINTS:
        data = np.array(values, dtype=_VARINTS[element_type]).tobytes()
    elif element_type.bits < 8:
        data = _unpack_sub_byte(values, shape)
    else:
        data = values
    if len(data) != shape.num_bytes:
        raise MalformedProgram(fact=f"a literal of {shape} has {len(data)} bytes, not {shape.num_bytes}", place=place)
    if element_type is ElementType.PRED and data.strip(b"\x00\x01"):
        data = (np.frombuffer(data, np.uint8) != 0).tobytes()
    order = read_layout(proto.shape, place)
    return _to_row_major(data, shape, order) if moves_data(order, shape.dims) else data


def _to_row_major(data: bytes, shape: ArrayShape, minor_to_major: tuple[int, ...]) -> bytes:
    major_to_minor = minor_to_major[::-1]
    physical = np.frombuffer(data, np.dtype((np.void, shape.element_type.bytes)))
    physical = physical.reshape([shape.dims[dimension] for dimension in major_to_minor])
    return physical.transpose(np.argsort(major_to_minor)).tobytes()


def _unpack_sub_byte(values: bytes, shape: ArrayShape) -> bytes:
    bits, count = shape.element_type.bits, shape.num_elements
    array = np.frombuffer(values, np.uint8)
    if len(values) == -(-count * bits // 8) != count:
        array = (array[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)).reshape(-1)[:count]
    if shape.element_type.is_signed:
        return ((array << (8 - bits)).view(np.int8) >> (8 - bits)).tobytes()
    return (array & ((1 << bits) - 1)).tobytes()


def write_literal(data: bytes, shape: ArrayShape, proto: Any) -> None:
    """Fills ``proto``, a LiteralProto, from a constant's bytes."""
    write_shape(shape, proto.shape)
    element_type = shape.element_type
    if element_type is ElementType.TOKEN:
        return
    field = _FIELDS[element_type]
    if element_type in _VARINTS:
        getattr(proto, field).extend(np.frombuffer(data, _VARINTS[element_type]).tolist())
    elif element_type.bits < 8:
        setattr(proto, field, (np.frombuffer(data, np.uint8) & ((1 << element_type.bits) - 1)).tobytes())
    else:
        setattr(proto, field, data)
