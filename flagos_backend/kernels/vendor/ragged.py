"""ragged-dot by ATen's grouped product, which multiplies each group's elements with its own matrix only: the reference
kernel makes a whole product for each group, and keeps what is the group's. Of BF16, and chips for which ATen has it.

Used by table.py.
"""

from __future__ import annotations

from collections.abc import Callable

from flagos_backend.devices.target import Target
from flagos_backend.ir.attributes import RaggedDotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.ragged_dots import why_not_grouped
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.ragged import boundaries
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.process.torch_loading import Tensor, torch

# Rows and the arrays themselves begin at multiples of as many bytes.
_ALIGNMENT = 16


def unsupported(instruction: Instruction, target: Target) -> str:
    """Why ATen's grouped product does not compute it, or ""."""
    return why_not_grouped(instruction) if target.has_grouped_products else "ATen has no grouped product for this chip"


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    attributes = instruction.attributes_as(RaggedDotAttributes)
    of_lhs = instruction.operands[0].shape
    assert isinstance(of_lhs, ArrayShape)
    length = of_lhs.dims[attributes.lhs_ragged[0]]
    if attributes.lhs_ragged == attributes.dot.lhs_contracting:
        return (Variant("", _of_columns(length)),)
    return (Variant("", _of_rows(attributes, length)),)


def _of_rows(attributes: RaggedDotAttributes, length: int) -> Callable[[Run, Tensor, Tensor, Tensor], Tensor]:
    """[m, k] times [g, k, n], of each group's rows: [m, n]. Rows behind the last group are zeros."""
    (contracting,), (other,) = attributes.dot.lhs_contracting, attributes.dot.rhs_contracting
    (group,) = attributes.rhs_group
    free = 3 - other - group

    def kernel(run: Run, lhs: Tensor, rhs: Tensor, sizes: Tensor) -> Tensor:
        rows = lhs if contracting == 1 else lhs.T
        ends = boundaries(sizes, length)[1:]
        product = torch._grouped_mm(_aligned(rows), _aligned(rhs.permute(group, other, free)), offs=ends.int())
        behind = torch.arange(length, device=sizes.device) >= ends[-1]
        return product.masked_fill_(behind[:, None], 0)

    return kernel


def _of_columns(length: int) -> Callable[[Run, Tensor, Tensor, Tensor], Tensor]:
    """The transpose of [m, k] times [m, n], of each group's rows: [g, k, n]. That of a group without rows is zeros."""

    def kernel(run: Run, lhs: Tensor, rhs: Tensor, sizes: Tensor) -> Tensor:
        bounds = boundaries(sizes, length)
        product = torch._grouped_mm(_aligned(lhs).T, _aligned(rhs), offs=bounds[1:].int())
        return product.masked_fill_((bounds[1:] == bounds[:-1])[:, None, None], 0)

    return kernel


def _aligned(matrix: Tensor) -> Tensor:
    """Itself, or a copy where it does not begin at a multiple of 16 bytes, as an argument of a user's may not."""
    return matrix if matrix.data_ptr() % _ALIGNMENT == 0 else matrix.clone(memory_format=torch.preserve_format)
