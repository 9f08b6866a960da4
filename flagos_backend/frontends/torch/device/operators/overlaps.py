"""Operands that share memory with what is written: PyTorch knows them by their storage, and refuses most.

Every unwrapped tensor has a storage of its own; here those that are of one storage on the device become so again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flagos_backend.frontends.torch.device.memory import unwrap
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE

aten = torch.ops.aten


def share(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    inner_args: Sequence[Any],
    inner_kwargs: Mapping[str, Any] | None,
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """``inner_args`` and ``inner_kwargs``, the unwrapped ``args`` and ``kwargs``, each storage of theirs once."""
    storages: dict[int, torch.UntypedStorage] = {}
    shared = tuple(_shared(outer, inner, storages) for outer, inner in zip(args, inner_args, strict=False))
    rest = tuple(inner_args[len(shared) :])  # the generator that was added
    if inner_kwargs is None:
        return (*shared, *rest), None
    given = kwargs or {}
    return (*shared, *rest), {name: _shared(given.get(name), inner, storages) for name, inner in inner_kwargs.items()}


def _shared(outer: Any, inner: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(outer, list | tuple) and isinstance(inner, list):
        return [_shared(one, other, storages) for one, other in zip(outer, inner, strict=True)]
    if not isinstance(outer, Tensor) or outer.device.type != DEVICE_TYPE:
        return inner
    storage = outer.untyped_storage()
    if storage.data_ptr() not in storages:
        whole = torch.empty(0, dtype=torch.uint8, device=outer.device).set_(storage)
        storages[storage.data_ptr()] = unwrap(whole).untyped_storage()
    seen = torch.empty(0, dtype=outer.dtype, device=inner.device)
    seen.set_(storages[storage.data_ptr()], outer.storage_offset(), outer.shape, outer.stride())
    if inner.is_conj():
        seen = aten._conj.default(seen)
    return aten._neg_view.default(seen) if inner.is_neg() else seen
