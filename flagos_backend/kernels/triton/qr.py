"""QR factorisations of small matrices, one launch for all of a batch (qr_kernels.py): libraries take one for
each step of each matrix."""

from __future__ import annotations

from math import prod
from typing import Any

from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.triton.launching import launch
from flagos_backend.process.torch_loading import Tensor, torch

FACTORS = ("Qr", "flagos.geqrf")
PRODUCTS = ("ProductOfElementaryHouseholderReflectors", "flagos.householder_product")
# What a program holds of a matrix in registers, and what a warp does.
_MAX_BYTES, _WARP_BYTES, _MAX_WARPS = 1 << 16, 1 << 12, 4


def _matrices(instruction: Instruction) -> ArrayShape:
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    return shape


def _block(shape: ArrayShape) -> tuple[int, int]:
    rows, columns = (1 << max(size - 1, 1).bit_length() for size in shape.dims[-2:])
    return rows, columns


def unsupported(instruction: Instruction, target: Target) -> str:
    """Why not, or "". Cheap: no device is asked."""
    shape = _matrices(instruction)
    if shape.element_type not in (ElementType.F32, ElementType.F64):
        return f"it factors no {shape.element_type.name.lower()}"
    if shape.num_elements == 0:
        return "there is nothing to factor"
    if prod(_block(shape)) * shape.element_type.bytes > _MAX_BYTES:
        return f"matrices, filled up to powers of two, are larger than {_MAX_BYTES} bytes"
    return ""


def _flags(shape: ArrayShape) -> dict[str, Any]:
    rows, columns = _block(shape)
    held = rows * columns * shape.element_type.bytes
    return {"M": rows, "N": columns, "num_warps": max(1, min(_MAX_WARPS, held // _WARP_BYTES))}


def factor_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    """[..., m, n] -> as LAPACK's geqrf has it: R and the reflectors [..., m, n], and their factors [..., min(m, n)]."""
    from flagos_backend.kernels.triton import qr_kernels as kernels

    shape = _matrices(instruction)
    *batch, rows, columns = shape.dims
    steps = min(rows, columns)

    def run(_: Run, a: Tensor) -> tuple[Tensor, Tensor]:
        matrices = a.contiguous()
        packed, taus = torch.empty_like(matrices), a.new_empty((*batch, steps))
        sizes = (rows, columns, steps)
        launch(kernels.factor, (prod(batch),), matrices, packed, taus, *sizes, **_flags(shape))
        return packed, taus

    return (Variant("", run),)


def product_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    """What ``factor_variants`` gives -> the columns [..., m, n] of Q."""
    from flagos_backend.kernels.triton import qr_kernels as kernels

    shape = _matrices(instruction)
    *batch, rows, columns = shape.dims

    def run(_: Run, a: Tensor, taus: Tensor) -> Tensor:
        packed, factors = a.contiguous(), taus.contiguous()
        product = torch.empty_like(packed)
        sizes = (rows, columns, factors.shape[-1])
        launch(kernels.multiply, (prod(batch),), packed, factors, product, *sizes, **_flags(shape))
        return product

    return (Variant("", run),)
