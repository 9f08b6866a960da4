"""New tensors that are not the inner operator's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def zeros(size: Sequence[int], **options: Any) -> Tensor:
    """aten::_efficientzerotensor, with memory: one without cannot be shared with the inner device."""
    return torch.zeros(size, **{name: value for name, value in options.items() if value is not None})
