"""LU by ATen's factorisation, with the order of its rows from our Triton kernel: no library tells it."""

from __future__ import annotations

from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.factorizations import prepare_lu
from flagos_backend.kernels.triton import launching, swaps
from flagos_backend.kernels.vendor.library import reference_variants
from flagos_backend.process.torch_loading import torch


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    if launching.unavailable(target) or shape.num_elements == 0:
        return reference_variants(instruction, target)
    *batch, rows, columns = shape.dims

    def warm_up() -> None:
        swaps.row_order(torch.empty((*batch, min(rows, columns)), dtype=torch.int32, device="meta"), rows)

    return (Variant("", prepare_lu(instruction, swaps.row_order), warm_up=warm_up),)
