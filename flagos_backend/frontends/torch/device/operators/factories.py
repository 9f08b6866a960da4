"""New tensors that are not the inner operator's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def zeros(size: Sequence[int], **options: Any) -> Tensor:
    """aten::_efficientzerotensor, with memory: one without cannot be shared with the inner device."""
    return torch.zeros(size, **{name: value for name, value in options.items() if value is not None})


def zeros_like(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """aten::zeros_like by its native ``kernel``, and of tensors without data, which have no memory to share: so PyTorch
    makes the operands of an operator that it has no rule for tensors without data for, and runs it."""

    @functools.wraps(kernel)
    def call(self: Tensor, **options: Any) -> Tensor:
        if not isinstance(self, FakeTensor):
            return kernel(self, **options)
        shape = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        device = options.pop("device", None) or self.fake_device
        like = torch.empty_like(shape, **options)
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).zero_()

    return call
