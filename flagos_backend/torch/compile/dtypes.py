"""PyTorch's dtypes and the IR's element types, both ways. Used by all of the lowering."""

from __future__ import annotations

import torch

from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.aten import TORCH_DTYPE

ELEMENT_TYPE: dict[torch.dtype, ElementType] = {dtype: element for element, dtype in TORCH_DTYPE.items()}

__all__ = ["ELEMENT_TYPE", "TORCH_DTYPE"]
