"""Recognises a dot that is a (batched) matrix product on strided operands, as every BLAS takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from flagos_backend.fusion.indexing import dims_of
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType

_MAX_SIZE = 2**31 - 1  # BLAS takes sizes and leading dimensions as 32-bit integers


@dataclass(frozen=True, slots=True)
class Operand:
    """Matrices in a buffer: ``leading`` elements from row to row; ``transposed``: rows are columns."""

    buffer: Instruction
    batch_strides: tuple[int, ...]
    leading: int
    transposed: bool = False
    offset: int = 0


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """result[b..., m, n] = sum over k of lhs[b..., m, k] * rhs[b..., k, n]; ``batch``: the sizes of b..."""

    element_type: ElementType
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    lhs: Operand
    rhs: Operand
    result: Operand


def as_matrix_product(dot: Instruction, lhs_buffer: Instruction, rhs_buffer: Instruction) -> MatrixProduct | None:
    """``dot`` as one product, or None: another element type, an empty or too large dimension, or dimensions that
    do not group."""
    attributes = dot.attributes_as(DotAttributes)
    shapes = [dot.shape, *(o.shape for o in dot.operands)]
    types = {s.element_type for s in shapes if isinstance(s, ArrayShape)}
    if len(types) != 1 or not types <= {ElementType.F32, ElementType.F64}:
        return None
    lhs_dims, rhs_dims = map(dims_of, dot.operands)
    if 0 in lhs_dims or 0 in rhs_dims:
        return None
    lhs_free = _rest(lhs_dims, attributes.lhs_batch, attributes.lhs_contracting)
    rhs_free = _rest(rhs_dims, attributes.rhs_batch, attributes.rhs_contracting)
    m, n = (prod(d[i] for i in free) for d, free in ((lhs_dims, lhs_free), (rhs_dims, rhs_free)))
    k = prod(lhs_dims[i] for i in attributes.lhs_contracting)
    lhs = matrix_operand(lhs_buffer, lhs_dims, attributes.lhs_batch, lhs_free, attributes.lhs_contracting)
    rhs = matrix_operand(rhs_buffer, rhs_dims, attributes.rhs_batch, attributes.rhs_contracting, rhs_free)
    if lhs is None or rhs is None:
        return None
    if max(m, n, k, lhs.leading, rhs.leading) > _MAX_SIZE:
        return None
    batch = tuple(lhs_dims[i] for i in attributes.lhs_batch)
    strides = tuple(prod(batch[d + 1 :]) * m * n for d in range(len(batch)))
    return MatrixProduct(types.pop(), batch, m, n, k, lhs, rhs, Operand(dot, strides, n))


def _rest(dims: Sequence[int], batch: Sequence[int], contracting: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(len(dims)) if d not in batch and d not in contracting)


def matrix_operand(
    buffer: Instruction, dims: Sequence[int], batch: Sequence[int], rows: Sequence[int], columns: Sequence[int]
) -> Operand | None:
    strides = [prod(dims[d + 1 :]) for d in range(len(dims))]
    batch_strides = tuple(strides[d] for d in batch)
    row_step, column_step = _step(dims, strides, rows), _step(dims, strides, columns)
    if row_step is None or column_step is None:
        return None
    num_rows, num_columns = prod(dims[d] for d in rows), prod(dims[d] for d in columns)
    if column_step == 1 or num_columns == 1:
        return Operand(buffer, batch_strides, row_step if num_rows > 1 else max(row_step, num_columns))
    if row_step == 1 or num_rows == 1:
        return Operand(buffer, batch_strides, column_step if num_columns > 1 else max(column_step, num_rows), True)
    return None


def _step(dims: Sequence[int], strides: Sequence[int], group: Sequence[int]) -> int | None:
    """The stride of the group's dimensions as one dimension; None when they do not merge."""
    real = [d for d in group if dims[d] != 1]
    for outer, inner in pairwise(real):
        if strides[outer] != strides[inner] * dims[inner]:
            return None
    return strides[real[-1]] if real else 1
