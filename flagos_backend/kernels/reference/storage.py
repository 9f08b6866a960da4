"""How an element type lies in a torch tensor. Every kernel and the plan's constants and buffers go by this table."""

from __future__ import annotations

import functools

from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.process.torch_loading import torch

E = ElementType


@functools.cache
def storage_dtypes() -> dict[ElementType, torch.dtype]:
    """By element type. Unsigned integers wider than a byte lie as the signed type of the same bits, because torch
    computes on few unsigned types; floats of a byte or less lie as their bits. The element type says what they mean."""
    return {
        E.PRED: torch.bool,
        E.S1: torch.int8,
        E.S2: torch.int8,
        E.S4: torch.int8,
        E.S8: torch.int8,
        E.S16: torch.int16,
        E.S32: torch.int32,
        E.S64: torch.int64,
        E.U1: torch.uint8,
        E.U2: torch.uint8,
        E.U4: torch.uint8,
        E.U8: torch.uint8,
        E.U16: torch.int16,
        E.U32: torch.int32,
        E.U64: torch.int64,
        E.F16: torch.float16,
        E.BF16: torch.bfloat16,
        E.F32: torch.float32,
        E.F64: torch.float64,
        E.C64: torch.complex64,
        E.C128: torch.complex128,
        **{e: torch.uint8 for e in E if e.is_float and e.bits <= 8},
    }


def dtype_of(element_type: ElementType) -> torch.dtype:
    """The storage dtype; KeyError for TOKEN, which has no storage."""
    return storage_dtypes()[element_type]


def from_bytes(data: bytes, shape: ArrayShape) -> torch.Tensor:
    """A tensor of ``shape`` over row-major little-endian ``data``, sub-byte types one byte each (copied; 4-bit and
    smaller signed integers are sign extended)."""
    dtype = dtype_of(shape.element_type)
    if len(data) != shape.num_bytes:
        raise ValueError(f"{shape} takes {shape.num_bytes} bytes, got {len(data)}")
    if not data:
        return torch.empty(shape.dims, dtype=dtype)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if shape.element_type is E.PRED:
        flat = flat != 0
    return wrap(flat.view(dtype), shape.element_type).reshape(shape.dims)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The elements, row major, as from_bytes takes them."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def wrap(tensor: torch.Tensor, element_type: ElementType) -> torch.Tensor:
    """Brings the bytes of a number narrower than 8 bits back into its range, by dropping their high bits; other types
    as they are."""
    bits = element_type.bits
    if bits >= 8 or element_type is ElementType.PRED:
        return tensor
    if element_type.is_unsigned or element_type.is_float:
        return tensor & ((1 << bits) - 1)
    return (tensor << (8 - bits)) >> (8 - bits)
