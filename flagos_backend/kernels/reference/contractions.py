"""dot: contractions of every element type. Floats narrower than float32 accumulate in float32 and round once; integers
wrap around at their own width."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference.conversion import converter
from flagos_backend.kernels.reference.integers import Binary, Unary
from flagos_backend.kernels.reference.movement import array_shape
from flagos_backend.kernels.reference.registry import Kernel, Storage, kernel
from flagos_backend.process.torch_loading import torch

E = ElementType
# How many bfloat16 a host's matrix units multiply at once.
_HOST_BLOCK = 32


@kernel(Opcode.DOT, storage=Storage.FRESH)
def _prepare_dot(instruction: Instruction) -> Kernel:
    attributes = instruction.attributes_as(DotAttributes)
    lhs, rhs = (array_shape(operand) for operand in instruction.operands)
    computed = compute_type(lhs.element_type, rhs.element_type, array_shape(instruction).element_type)
    contract = _contraction(attributes, lhs, rhs, in_blocks=computed is E.BF16)
    return in_type(contract, lhs.element_type, rhs.element_type, array_shape(instruction).element_type, computed)


def compute_type(lhs: ElementType, rhs: ElementType, result: ElementType) -> ElementType:
    """The type to multiply and add in: it holds the operands exactly and gives the result after one rounding."""
    types = (lhs, rhs, result)
    if any(t.is_complex for t in types):
        return E.C128 if E.C128 in types or E.F64 in types else E.C64
    if types == (E.BF16, E.BF16, E.BF16):
        return E.BF16  # torch's own product accumulates in float32 and rounds once
    if any(t.is_float for t in types):
        return E.F64 if E.F64 in types else E.F32
    # Sums and products modulo 2^n are the same in any wider type. PRED counts, and is true when it counted any.
    return E.S64 if result.bits > 32 else E.S32


def in_type(function: Binary, lhs: ElementType, rhs: ElementType, result: ElementType, computed: ElementType) -> Kernel:
    """``function`` of operands brought into ``computed``, its outcome brought into ``result``."""
    take_lhs, take_rhs = converter(lhs, computed), converter(rhs, computed)
    give = converter(computed, result)
    if take_lhs is None and take_rhs is None and give is None:
        return lambda run, a, b: function(a, b)
    before_lhs, before_rhs, after = (step or _same for step in (take_lhs, take_rhs, give))
    return lambda run, a, b: after(function(before_lhs(a), before_rhs(b)))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _contraction(attributes: DotAttributes, lhs: ArrayShape, rhs: ArrayShape, *, in_blocks: bool) -> Binary:
    """Brings the operands to [batch, rows, contracted] and [batch, contracted, columns], multiplies, and splits the
    dimensions of the product again: batch, left free, right free. ``in_blocks``: of bfloat16."""
    batch = [lhs.dims[d] for d in attributes.lhs_batch]
    contracted = prod(lhs.dims[d] for d in attributes.lhs_contracting)
    lhs_free = _free(lhs, attributes.lhs_batch, attributes.lhs_contracting)
    rhs_free = _free(rhs, attributes.rhs_batch, attributes.rhs_contracting)
    rows = [lhs.dims[d] for d in lhs_free]
    columns = [rhs.dims[d] for d in rhs_free]
    arrange_lhs = _arrange(
        lhs.dims, [*attributes.lhs_batch, *lhs_free, *attributes.lhs_contracting], [prod(batch), prod(rows), contracted]
    )
    arrange_rhs = _arrange(
        rhs.dims,
        [*attributes.rhs_batch, *attributes.rhs_contracting, *rhs_free],
        [prod(batch), contracted, prod(columns)],
    )
    result = (*batch, *rows, *columns)
    if contracted == 0 or 0 in result:
        return lambda a, b: a.new_zeros(result)
    multiply: Binary = torch.mm
    if batch:
        multiply = torch.bmm
    else:
        arrange_lhs = _arrange(lhs.dims, [*lhs_free, *attributes.lhs_contracting], [prod(rows), contracted])
        arrange_rhs = _arrange(rhs.dims, [*attributes.rhs_contracting, *rhs_free], [contracted, prod(columns)])
    if in_blocks and contracted > 1:
        multiply = in_whole_blocks(multiply)
    if len(rows) == len(columns) == 1 and len(batch) < 2:
        return lambda a, b: multiply(arrange_lhs(a), arrange_rhs(b))
    return lambda a, b: multiply(arrange_lhs(a), arrange_rhs(b)).view(result)


def in_whole_blocks(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``multiply`` of bfloat16 matrices. On the host oneDNN takes what fills no block at the end of a row together with
    what follows the row in memory, times zero: NaN where that is not finite. One row alone it does not."""

    def product(a: torch.Tensor, b: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        missing = -a.shape[-1] % _HOST_BLOCK
        if missing and a.shape[-2] > 1 and a.device.type == "cpu":
            a, b = torch.constant_pad_nd(a, (0, missing)), torch.constant_pad_nd(b, (0, 0, 0, missing))
        return multiply(a, b, **given)

    return product


def _free(shape: ArrayShape, batch: tuple[int, ...], contracting: tuple[int, ...]) -> list[int]:
    return [d for d in range(shape.rank) if d not in batch and d not in contracting]


def _arrange(dims: tuple[int, ...], order: list[int], sizes: list[int]) -> Unary:
    """Permutes and merges dimensions; as few torch calls as that takes."""
    permutes = order != list(range(len(dims)))
    merges = [dims[d] for d in order] != sizes
    if permutes and merges:
        return lambda x: x.permute(order).reshape(sizes)
    if permutes:
        return lambda x: x.permute(order)
    return (lambda x: x.reshape(sizes)) if merges else _same
