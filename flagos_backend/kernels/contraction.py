"""dot as one matrix product: how its operands are arranged before, and its result after. For every provider of dot."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.process.torch_loading import Tensor


@dataclass(frozen=True, slots=True)
class Contraction:
    """``arrange`` gives [rows, contracted] and [contracted, columns], with a leading batch dimension where the dot has
    batch dimensions; views where strides allow. ``finish`` splits the product's dimensions again."""

    lhs_order: tuple[int, ...]
    rhs_order: tuple[int, ...]
    batch: int | None
    rows: int
    contracted: int
    columns: int
    result: tuple[int, ...]

    def arrange(self, lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
        lead = () if self.batch is None else (self.batch,)
        return (
            lhs.permute(self.lhs_order).reshape(*lead, self.rows, self.contracted),
            rhs.permute(self.rhs_order).reshape(*lead, self.contracted, self.columns),
        )

    def finish(self, product: Tensor) -> Tensor:
        return product.reshape(self.result)

    def unfinished(self, result: Tensor) -> Tensor:
        """A row-major result as the product that it is finished from."""
        lead = () if self.batch is None else (self.batch,)
        return result.view(*lead, self.rows, self.columns)


def element_types(dot: Instruction) -> tuple[ElementType, ElementType, ElementType]:
    """Those of its operands, and of its result."""
    shapes = (*(operand.shape for operand in dot.operands), dot.shape)
    lhs, rhs, result = (shape.element_type for shape in shapes if isinstance(shape, ArrayShape))
    return lhs, rhs, result


def contraction_of(instruction: Instruction) -> Contraction:
    a = instruction.attributes_as(DotAttributes)
    lhs, rhs = (operand.shape.dims for operand in instruction.operands if isinstance(operand.shape, ArrayShape))
    lhs_free = [d for d in range(len(lhs)) if d not in a.lhs_batch and d not in a.lhs_contracting]
    rhs_free = [d for d in range(len(rhs)) if d not in a.rhs_batch and d not in a.rhs_contracting]
    batch = tuple(lhs[d] for d in a.lhs_batch)
    rows, columns = tuple(lhs[d] for d in lhs_free), tuple(rhs[d] for d in rhs_free)
    return Contraction(
        (*a.lhs_batch, *lhs_free, *a.lhs_contracting),
        (*a.rhs_batch, *a.rhs_contracting, *rhs_free),
        prod(batch) if batch else None,
        prod(rows),
        prod(lhs[d] for d in a.lhs_contracting),
        prod(columns),
        (*batch, *rows, *columns),
    )
