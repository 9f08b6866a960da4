"""Views: PyTorch's own functions for the host look at sizes only, and so make views of memory of any device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from flagos_backend.frontends.torch.device.memory import unwrap, wrap

aten = torch.ops.aten

#: Those that PyTorch has for each device anew.
VIEWS: Final[tuple[OpOverload, ...]] = (
    aten.as_strided.default,
    aten._reshape_alias.default,
    aten.unfold.default,
    aten.view.default,
    aten.view_as_complex.default,
    aten.view_as_real.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
)
_HOST: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def view_kernel(op: OpOverload) -> Callable[..., Any]:
    """The host's function of a view, for tensors on the device."""
    return functools.partial(op._handle.redispatch_boxed, _HOST)


def set_to_nothing(self: Tensor) -> Tensor:
    """aten::set_: an empty tensor."""
    return adopt(self, torch.empty(0, dtype=self.dtype, device=unwrap(self).device))


def adopt(tensor: Tensor, inner: Tensor) -> Tensor:
    """Gives a tensor on the device the sizes of an inner tensor, and its memory where that is another."""
    if inner.data_ptr() == tensor.data_ptr() and inner.numel() <= tensor.numel():
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    else:
        storage, offset = wrap(inner).untyped_storage(), 0
    set_ = aten.set_.source_Storage_storage_offset._handle.redispatch_boxed
    set_(_HOST, tensor, storage, offset, inner.shape, inner.stride())
    return tensor
