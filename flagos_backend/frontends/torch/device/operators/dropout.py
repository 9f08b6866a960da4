"""Dropout: PyTorch's operator takes no generator, so it is spelled out here with the device's."""

from __future__ import annotations

import torch
from torch import Tensor


def native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """aten::native_dropout: the values that stay, scaled by 1 / (1 - p), and which they are."""
    if not input.numel():
        return input, torch.empty_like(input)
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p)
    return input.mul(mask).mul_(0.0 if p == 1 else 1.0 / (1.0 - p)), mask
