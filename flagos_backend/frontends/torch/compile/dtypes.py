"""PyTorch's dtypes and the IR's element types, both ways. Used by all of the lowering."""

from __future__ import annotations

import torch

from flagos_backend.ir.torch_dtypes import TORCH_DTYPE
from flagos_backend.ir.types import ElementType

ELEMENT_TYPE: dict[torch.dtype, ElementType] = {dtype: element for element, dtype in TORCH_DTYPE.items()}

#: What a program holds tensors as. complex32 has no element type: only its bits cross, and ATen computes with them.
STORED_TYPE: dict[torch.dtype, ElementType] = {**ELEMENT_TYPE, torch.complex32: ElementType.U32}

__all__ = ["ELEMENT_TYPE", "STORED_TYPE", "TORCH_DTYPE"]
