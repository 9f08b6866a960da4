"""Histograms of integers, which accelerators count and the host's operator refuses."""

from __future__ import annotations

import torch
from torch import Tensor

from flagos_backend.frontends.torch.device.memory import unwrap, wrap

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """aten::histc. Of integers as on CUDA: the limits are integers, and counts have the dtype of what is counted."""
    inner = unwrap(self)
    if inner.dtype not in _INTEGERS:
        return wrap(torch.histc(inner, bins, min, max))
    if bins <= 0:
        raise RuntimeError("bins must be > 0")
    if min > max:
        raise RuntimeError("max must be larger than min")
    return wrap(_counts(inner.flatten().long(), bins, int(min), int(max)).to(inner.dtype))


def _counts(values: Tensor, bins: int, low: int, high: int) -> Tensor:
    """How many of the values fall into each of the bins from ``low`` to ``high``, both inclusive."""
    if low == high and values.numel():
        low, high = int(values.min()), int(values.max())
    if low == high:
        low, high = low - 1, high + 1
    inside = values[(values >= low) & (values <= high)]
    places = ((inside - low) * bins // (high - low)).clamp_(max=bins - 1)
    return torch.bincount(places, minlength=bins)
