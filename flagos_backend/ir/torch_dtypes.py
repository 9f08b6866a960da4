"""PyTorch's dtype of each element type that it has. What kernels store is another table: kernels/reference/storage.py.

The only module of this folder that needs torch."""

from __future__ import annotations

import torch

from flagos_backend.ir.types import ElementType

E = ElementType

TORCH_DTYPE: dict[ElementType, torch.dtype] = {
    E.PRED: torch.bool,
    E.S8: torch.int8,
    E.S16: torch.int16,
    E.S32: torch.int32,
    E.S64: torch.int64,
    E.U8: torch.uint8,
    E.U16: torch.uint16,
    E.U32: torch.uint32,
    E.U64: torch.uint64,
    E.F8E4M3FN: torch.float8_e4m3fn,
    E.F8E5M2: torch.float8_e5m2,
    E.F8E4M3FNUZ: torch.float8_e4m3fnuz,
    E.F8E5M2FNUZ: torch.float8_e5m2fnuz,
    E.F8E8M0FNU: torch.float8_e8m0fnu,
    E.F16: torch.float16,
    E.BF16: torch.bfloat16,
    E.F32: torch.float32,
    E.F64: torch.float64,
    E.C64: torch.complex64,
    E.C128: torch.complex128,
}
