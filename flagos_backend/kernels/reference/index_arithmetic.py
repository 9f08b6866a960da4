"""Index arithmetic that gather, scatter and the dynamic slices share: values of index arrays and linear offsets."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from flagos_backend.ir.types import ElementType

_MAX_INT64 = (1 << 63) - 1


def index_values(indices: Tensor, element_type: ElementType) -> Tensor:
    """The indices as int64. A U64 beyond int64 becomes the greatest int64: out of any bounds all the same."""
    values = indices.to(torch.int64)
    if not element_type.is_unsigned or element_type.bits <= 8:
        return values
    if element_type is ElementType.U64:
        return torch.where(values < 0, _MAX_INT64, values)
    return values & ((1 << element_type.bits) - 1)


def scalar_index(index: Tensor, element_type: ElementType) -> int:
    """The value of a scalar index."""
    value = int(index)
    return value & ((1 << element_type.bits) - 1) if element_type.is_unsigned else value


def row_major_strides(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(dims[d + 1 :]) for d in range(len(dims)))


def window_offsets(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Linear offsets of a window's elements from its first one, int64 in the shape ``sizes``."""
    offsets = torch.zeros(sizes, dtype=torch.int64)
    for d, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        offsets += (torch.arange(size) * stride).reshape((-1,) + (1,) * (len(sizes) - d - 1))
    return offsets
