"""The types that basic operations compute in."""

from __future__ import annotations

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """The same values in at least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def compute_dtype(x: torch.Tensor, otherwise: torch.dtype) -> torch.dtype:
    """Autocast's type where it is on for the tensor's device."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return otherwise


def sum_leading(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Sum over all dimensions but the last `rank`."""
    leading = x.dim() - rank
    return x.sum(tuple(range(leading))) if leading else x
