"""Recognises a dot that is a (batched) matrix product on strided operands, as every BLAS takes it.

Floats are BLAS's, integers of at most 32 bits those of native/cpu/integer_product.cc. A few vectors times a matrix, of
16-bit floats too, are those of skinny_product.cc beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.indexing import View, dims_of

E = ElementType
_MAX_SIZE = 2**31 - 1  # BLAS takes sizes and leading dimensions as 32-bit integers
_Side = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
INTEGERS = frozenset({E.S8, E.U8, E.S16, E.U16, E.S32, E.U32})
HALF_FLOATS = frozenset({E.F16, E.BF16})
# kMaxVectors of native/cpu/skinny_kernels.h; shorter sums, of products of a row and of rows, are faster of converted
# operands.
MAX_VECTORS, _MIN_DOTS, _MIN_ROWS = 4, 32, 4


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
    """result[b..., m, n] = sum over k of lhs[b..., m, k] * rhs[b..., k, n]; ``batch``: the sizes of b...

    ``element_type``: of the result, S32 (modulo 2^32) of integers; ``operand_types``: the same, of integers any two, or
    two 16-bit floats, of which F32 is computed.
    """

    element_type: ElementType
    operand_types: tuple[ElementType, ElementType]
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    lhs: Operand
    rhs: Operand
    result: Operand

    @property
    def is_of_half_floats(self) -> bool:
        return self.operand_types[0] in HALF_FLOATS


def as_matrix_product(dot: Instruction, lhs_view: View, rhs_view: View) -> MatrixProduct | None:
    """``dot`` of operands that stand where the views say as one product, or None: another element type, an empty or
    too large dimension, or dimensions that do not group."""
    attributes = dot.attributes_as(DotAttributes)
    result, *operands = (
        s.element_type for s in (dot.shape, *(o.shape for o in dot.operands)) if isinstance(s, ArrayShape)
    )
    of_integers = INTEGERS.issuperset(operands) and result in (E.S32, E.U32)
    of_half_floats = operands[0] is operands[1] and operands[0] in HALF_FLOATS and result is E.F32
    if (
        not of_integers
        and not of_half_floats
        and (result not in (E.F32, E.F64) or {result}.symmetric_difference(operands))
    ):
        return None
    lhs_dims, rhs_dims = map(dims_of, dot.operands)
    if 0 in lhs_dims or 0 in rhs_dims:
        return None
    lhs_free = _rest(lhs_dims, attributes.lhs_batch, attributes.lhs_contracting)
    rhs_free = _rest(rhs_dims, attributes.rhs_batch, attributes.rhs_contracting)
    m, n = (prod(d[i] for i in free) for d, free in ((lhs_dims, lhs_free), (rhs_dims, rhs_free)))
    k = prod(lhs_dims[i] for i in attributes.lhs_contracting)
    lhs = matrix_operand(lhs_view, lhs_dims, attributes.lhs_batch, lhs_free, attributes.lhs_contracting)
    rhs = matrix_operand(rhs_view, rhs_dims, attributes.rhs_batch, attributes.rhs_contracting, rhs_free)
    if lhs is None or rhs is None:
        return None
    if max(m, n, k, lhs.leading, rhs.leading) > _MAX_SIZE:
        return None
    if of_half_floats and not _is_skinny(m, n, k, lhs, rhs):
        return None
    batch = tuple(lhs_dims[i] for i in attributes.lhs_batch)
    strides = tuple(prod(batch[d + 1 :]) * m * n for d in range(len(batch)))
    types = (operands[0], operands[1])
    return MatrixProduct(E.S32 if of_integers else result, types, batch, m, n, k, lhs, rhs, Operand(dot, strides, n))


def _is_skinny(m: int, n: int, k: int, lhs: Operand, rhs: Operand) -> bool:
    """Whether a product of 16-bit floats takes as long as reading its matrix."""
    has_rows_of_depth = not lhs.transposed if n < m else rhs.transposed
    return min(m, n) <= MAX_VECTORS and k >= (_MIN_DOTS if has_rows_of_depth else _MIN_ROWS)


def _rest(dims: Sequence[int], batch: Sequence[int], contracting: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(len(dims)) if d not in batch and d not in contracting)


def sides_of(dot: Instruction) -> tuple[_Side, _Side]:
    """The dimensions of each operand: of the batch, those that are reduced, the others."""
    attributes = dot.attributes_as(DotAttributes)
    sides = ((attributes.lhs_batch, attributes.lhs_contracting), (attributes.rhs_batch, attributes.rhs_contracting))
    lhs, rhs = (
        (tuple(batch), tuple(contracting), _rest(dims_of(operand), batch, contracting))
        for operand, (batch, contracting) in zip(dot.operands, sides, strict=True)
    )
    return lhs, rhs


def is_product_operand(dot: Instruction, number: int, view: View) -> bool:
    """Whether BLAS takes operand ``number`` where the view says that it stands."""
    dims = dims_of(dot.operands[number])
    batch, contracting, free = sides_of(dot)[number]
    rows, columns = (free, contracting) if number == 0 else (contracting, free)
    return 0 not in dims and matrix_operand(view, dims, batch, rows, columns) is not None


def matrix_operand(
    view: View, dims: Sequence[int], batch: Sequence[int], rows: Sequence[int], columns: Sequence[int]
) -> Operand | None:
    """The array as matrices of ``rows`` and ``columns`` as BLAS takes them; None where it takes no such strides."""
    batch_strides = tuple(view.strides[d] for d in batch)
    row_step, column_step = _step(dims, view.strides, rows), _step(dims, view.strides, columns)
    if row_step is None or column_step is None:
        return None
    num_rows, num_columns = prod(dims[d] for d in rows), prod(dims[d] for d in columns)
    for transposed, (count, step), (length, inner) in (
        (False, (num_rows, row_step), (num_columns, column_step)),
        (True, (num_columns, column_step), (num_rows, row_step)),
    ):
        # Rows that overlap, as expanded ones do, are none of BLAS.
        if (inner == 1 or length == 1) and (step >= length or count == 1):
            leading = step if count > 1 else max(step, length)
            return Operand(view.buffer, batch_strides, leading, transposed, view.offset)
    return None


def _step(dims: Sequence[int], strides: Sequence[int], group: Sequence[int]) -> int | None:
    """The stride of the group's dimensions as one dimension; None when they do not merge."""
    real = [d for d in group if dims[d] != 1]
    for outer, inner in pairwise(real):
        if strides[outer] != strides[inner] * dims[inner]:
            return None
    return strides[real[-1]] if real else 1
