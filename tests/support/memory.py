"""Arrays that lie in memory as those do that no test has room for."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


def far_apart(array: Tensor, axis: int) -> Tensor:
    """A copy whose first and last element along ``axis`` lie more than 2**31 elements apart. Memory is allocated for
    everything between them, but nothing of it is touched."""
    others = array.movedim(axis, 0)[0]
    step = max(others.numel(), (1 << 31) // (array.shape[axis] - 1) + 1)
    strides = [prod(others.shape[d + 1 :]) for d in range(others.dim())]
    strides.insert(axis % array.dim(), step)
    memory = torch.empty(step * (array.shape[axis] - 1) + others.numel(), dtype=array.dtype)
    return memory.as_strided(array.shape, strides).copy_(array)


__all__ = ["far_apart"]
