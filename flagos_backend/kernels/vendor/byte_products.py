"""Products of signed bytes through ATen's, which matrix units compute: operands are laid out and filled up as those
want them. Used by dot.py and table.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, leaves
from flagos_backend.kernels.contraction import Contraction
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.conversion import converter

E = ElementType
# CUDA's product wants more than 16 rows, and multiples of eight of the other sizes; sixteen are what is loaded at once.
_FEWEST_ROWS, _FILLED_ROWS, _MULTIPLE, _FILLED_MULTIPLE = 17, 32, 8, 16
# Each matrix of a batch is a product of its own.
_MAX_BATCH = 4
# Sums of more products may not fit 32 bits.
_MAX_CONTRACTED = 1 << 16
Product = Callable[[Tensor, Tensor], Tensor]


def unsupported(instruction: Instruction, contraction: Contraction, target: Target) -> str:
    """Why a dot cannot be computed so, or ""."""
    operands = [operand.shape for operand in instruction.operands]
    if any(not isinstance(shape, ArrayShape) or shape.element_type is not E.S8 for shape in operands):
        return "its operands are not both s8"
    if contraction.batch is not None and contraction.batch > _MAX_BATCH:
        return f"it is more than {_MAX_BATCH} products"
    if contraction.contracted > _MAX_CONTRACTED:
        return "its sums may not fit 32 bits"
    return _unsupported(operands, target)


def call_unsupported(instruction: Instruction, target: Target) -> str:
    """Why ``aten::_int_mm`` is left to ATen, or ""."""
    return "the host has no vendor" if target.is_host else _unsupported([o.shape for o in instruction.operands], target)


def _unsupported(operands: Sequence[Shape], target: Target) -> str:
    if any(shape.num_elements == 0 for operand in operands for shape in leaves(operand)):
        return "there is nothing to compute"
    return "" if _has_product(target.device_type) else f"ATen has no product of bytes for {target.device_type}"


def _has_product(device_type: str) -> bool:
    try:
        key = torch._C._dispatch_key_for_device(device_type)
    except RuntimeError:  # a device that torch does not know, or not by this name
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_int_mm", key))


def call_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    def variant(name: str, product: Product) -> Variant:
        return Variant(name, lambda run, a, b: product(a, b))

    return tuple(variant(name, product) for name, product in products(None, E.S32).items())


def products(batch: int | None, result: ElementType) -> Mapping[str, Product]:
    """By name, the best guess first. Matrix units of some devices read bytes only with the contracted dimension last:
    then laying out the second operand so is less than what its product takes as it lies, unless there are few rows."""
    give = converter(E.S32, result) or (lambda x: x)

    def of_matrices(a: Tensor, b: Tensor, lay_out: Callable[[Tensor], Tensor]) -> Tensor:
        rows, columns = a.shape[0], b.shape[1]
        a, b = _filled(a, b)
        return torch._int_mm(a.contiguous(), lay_out(b))[:rows, :columns].contiguous()

    def product(lay_out: Callable[[Tensor], Tensor]) -> Product:
        if batch is None:
            return lambda a, b: give(of_matrices(a, b, lay_out))
        return lambda a, b: give(torch.stack([of_matrices(x, y, lay_out) for x, y in zip(a, b, strict=True)]))

    return {"bytes, contracted last": product(_contracted_last), "bytes": product(lambda b: b)}


def _contracted_last(b: Tensor) -> Tensor:
    return b.mT.contiguous().mT


def _filled(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros around matrices of sizes that the product does not take; they add nothing to what is kept of it."""
    rows, contracted, columns = a.shape[0], a.shape[1], b.shape[1]
    more_rows = _FILLED_ROWS - rows if rows < _FEWEST_ROWS else 0
    more = -contracted % _FILLED_MULTIPLE if contracted % _MULTIPLE else 0
    more_columns = -columns % _FILLED_MULTIPLE if columns % _MULTIPLE else 0
    if more_rows or more:
        a = torch.constant_pad_nd(a, (0, more, 0, more_rows))
    if more_columns or more:
        b = torch.constant_pad_nd(b, (0, more_columns, 0, more))
    return a, b
