"""Copies between the device, its inner device and others; numbers out of tensors."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from flagos_backend.torch.device.memory import DEVICE_TYPE, unwrap
from flagos_backend.torch.device.runtime import runtime

aten = torch.ops.aten
_COMPOSED: Final = torch._C.DispatchKey.CompositeExplicitAutograd


def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """aten::copy_, where one of the two is on the device. Sees lazily conjugated tensors as such."""
    unwrap(self).copy_(unwrap(src), non_blocking)
    return self


def copy_from(self: Tensor, dst: Tensor, non_blocking: bool = False) -> Tensor:
    """aten::_copy_from: what PyTorch's own copies between devices come to."""
    unwrap(dst).copy_(unwrap(self), non_blocking)
    return dst


def foreach_copy_(self: list[Tensor], src: list[Tensor], non_blocking: bool = False) -> None:
    """aten::_foreach_copy_, between any devices."""
    aten._foreach_copy_.default([unwrap(t) for t in self], [unwrap(t) for t in src], non_blocking)


def is_pinned(self: Tensor, device: torch.device | None = None) -> bool:
    """aten::is_pinned of a tensor of the host: memory that the device works in needs no pinning."""
    inner = runtime().inner
    if inner.type == "cpu" and (device is None or device.type == DEVICE_TYPE):
        return True
    return bool(_host_pinning(aten.is_pinned.default, self, device))


def pin_memory(self: Tensor, device: torch.device | None = None) -> Tensor:
    """aten::_pin_memory of a tensor of the host, for the inner device."""
    pinned: Tensor = _host_pinning(aten._pin_memory.default, self, device)
    return pinned


def _host_pinning(op: Any, tensor: Tensor, device: torch.device | None) -> Any:
    here = device is None or device.type == DEVICE_TYPE
    return op._op_dk(_COMPOSED, tensor, runtime().inner if here else device)


def record_stream(self: Tensor, s: torch.Stream) -> None:
    """aten::record_stream. Memory of the host is free when nobody holds it; it waits for no stream."""
    inner = unwrap(self)
    if inner.device.type != "cpu":
        inner.record_stream(s)
