"""Index arithmetic that gather, scatter and the dynamic slices share: values of index arrays and linear offsets."""

from __future__ import annotations

from math import prod

from flagos_backend.ir.types import ElementType
from flagos_backend.process.torch_loading import Tensor, torch

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


def scalar_index_on_device(index: Tensor, element_type: ElementType, limit: int) -> Tensor:
    """The value of a scalar index clamped to 0 ... limit, int64, without waiting for it."""
    return index_values(index, element_type).clamp(0, limit)


def row_major_strides(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(dims[d + 1 :]) for d in range(len(dims)))


class Kept:
    """A tensor of the host's, kept on the devices that asked for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._kept = {tensor.device: tensor}
        self._tensor = tensor

    def on(self, device: torch.device) -> Tensor:
        found = self._kept.get(device)
        if found is None:
            self._kept[device] = found = self._tensor.to(device)
        return found


class WindowOffsets:
    """Linear offsets of a window's elements from its first one, row major, int64; kept on the devices that asked."""

    def __init__(self, sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._sizes, self._strides = sizes, strides
        self._kept: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        offsets = self._kept.get(device)
        if offsets is None:
            offsets = torch.zeros(self._sizes, dtype=torch.int64, device=device)
            for d, (size, stride) in enumerate(zip(self._sizes, self._strides, strict=True)):
                steps = torch.arange(size, device=device) * stride
                offsets += steps.reshape((-1,) + (1,) * (len(self._sizes) - d - 1))
            self._kept[device] = offsets = offsets.reshape(-1)
        return offsets
