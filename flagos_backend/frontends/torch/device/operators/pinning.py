"""Pinned memory of the host, for an inner device that copies faster from it; for host memory, a copy that is marked."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE
from flagos_backend.frontends.torch.device.runtime import runtime

aten = torch.ops.aten
_COMPOSED: Final = torch._C.DispatchKey.CompositeExplicitAutograd
#: The storages that pin_memory made where there is nothing to pin.
_pinned: Final = WeakIdKeyDictionary()


def is_marked(tensor: Tensor) -> bool:
    """Whether a tensor's memory was pinned where there is nothing to pin."""
    return tensor.untyped_storage() in _pinned


def is_pinned(self: Tensor, device: torch.device | None = None) -> bool:
    """aten::is_pinned of a tensor of the host."""
    if _is_ours(device) and runtime().inner.type == "cpu":
        return is_marked(self)
    return bool(_host_pinning(aten.is_pinned.default, self, device))


def pin_memory(self: Tensor, device: torch.device | None = None) -> Tensor:
    """aten::_pin_memory of a tensor of the host. Host memory is the device's as it is: a copy, as PyTorch makes one."""
    if not (_is_ours(device) and runtime().inner.type == "cpu"):
        pinned: Tensor = _host_pinning(aten._pin_memory.default, self, device)
        return pinned
    copied = self.clone()
    _pinned[copied.untyped_storage()] = True
    return copied


def _is_ours(device: torch.device | None) -> bool:
    return device is None or device.type == DEVICE_TYPE


def _host_pinning(op: Any, tensor: Tensor, device: torch.device | None) -> Any:
    return op._op_dk(_COMPOSED, tensor, runtime().inner if _is_ours(device) else device)
