"""Copies between the device, its inner device and others; numbers out of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from flagos_backend.frontends.torch.device.memory import unwrap
from flagos_backend.frontends.torch.device.operators import overlaps

aten = torch.ops.aten


def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """aten::copy_, where one of the two is on the device. Sees lazily conjugated tensors as such."""
    inner, source = unwrap(self), unwrap(src)
    if self.device == src.device and self.untyped_storage().data_ptr() == src.untyped_storage().data_ptr():
        (inner, source), _ = overlaps.share((self, src), None, (inner, source), None)
    inner.copy_(source, non_blocking)
    return self


def copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    """aten::_copy_from: what PyTorch's own copies between devices come to."""
    unwrap(dst).copy_(unwrap(self), non_blocking)
    return dst


def foreach_copy_(self: list[Tensor], src: list[Tensor], non_blocking: bool = False) -> None:
    """aten::_foreach_copy_, between any devices."""
    aten._foreach_copy_.default([unwrap(t) for t in self], [unwrap(t) for t in src], non_blocking)


def record_stream(self: Tensor, s: torch.Stream) -> None:
    """aten::record_stream. Memory of the host is free when nobody holds it; it waits for no stream."""
    inner = unwrap(self)
    if inner.device.type != "cpu":
        inner.record_stream(s)
