"""Tensors on the device and the tensors that compute for them, over the same memory: wrap and unwrap."""

from __future__ import annotations

from typing import Any

import torch

from flagos_backend.frontends.torch.device import _native
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE, open_device


def wrap(inner: torch.Tensor, *, counted: bool = True) -> torch.Tensor:
    """A tensor on the device over the memory of a strided tensor on the inner device; neither copies nor moves.

    ``counted``: whether the memory counts as allocated on the device.
    """
    if not _native.is_open():
        open_device()
    return _native.wrap(inner.resolve_conj().resolve_neg(), counted)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The inner tensor of a tensor on the device, over the same memory; any other tensor is returned as it is.

    Sizes, strides, dtype, and lazy conjugation and negation are those of ``tensor``; autograd is not carried over.
    """
    if tensor.device.type != DEVICE_TYPE:
        return tensor
    inner = _native.unwrap(tensor)
    if tensor.is_conj():
        inner = torch.ops.aten._conj.default(inner)
    if tensor.is_neg():
        inner = torch.ops.aten._neg_view.default(inner)
    return inner


def from_dlpack(external: Any) -> torch.Tensor:
    """A tensor on the device over memory of the inner device that another library exports by DLPack; copies nothing."""
    return wrap(torch.utils.dlpack.from_dlpack(external), counted=False)


def can_exchange_storages() -> bool:
    """Whether this PyTorch lets two storages exchange their memory: 2.13 and later do, 2.11 does not."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")
