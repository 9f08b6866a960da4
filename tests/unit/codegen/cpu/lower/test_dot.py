"""Which dots are matrix products. What it computes is tested end to end in tests/cpu/native/test_products.py."""

from __future__ import annotations

import pytest

from flagos_backend.codegen.cpu.lower.dot import MatrixProduct, as_matrix_product, is_product_operand
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.indexing import View, row_major

E = ElementType
ROWS_BY_COLUMNS = DotAttributes(lhs_contracting=(1,), rhs_contracting=(0,))


def product(
    lhs: tuple[int, ...], rhs: tuple[int, ...], attributes: DotAttributes = ROWS_BY_COLUMNS, element_type: E = E.F32
) -> MatrixProduct | None:
    builder = Builder("dot")
    a, b = (builder.parameter(ArrayShape(element_type, dims)) for dims in (lhs, rhs))
    dot = builder.add(Opcode.DOT, (a, b), attributes)
    return as_matrix_product(dot, row_major(a, lhs), row_major(b, rhs))


def test_strides_of_a_batch_between_the_matrix_dimensions() -> None:
    found = product((3, 2, 4), (2, 4, 5), DotAttributes((2,), (1,), (1,), (0,)))
    assert found is not None
    assert (found.batch, found.m, found.n, found.k) == ((2,), 3, 5, 4)
    assert (found.lhs.batch_strides, found.lhs.leading, found.lhs.transposed) == ((4,), 8, False)
    assert (found.rhs.batch_strides, found.rhs.leading, found.rhs.transposed) == ((20,), 5, False)


@pytest.mark.parametrize("element_type", [E.F16, E.BF16, E.S64, E.C64])
def test_other_element_types_are_no_products(element_type: E) -> None:
    assert product((3, 4), (4, 5), element_type=element_type) is None


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [((2**31, 1), (1, 1)), ((1, 2**31), (2**31, 1)), ((1, 1), (1, 2**31)), ((2**16, 2**15, 1), (1, 1))],
)
def test_sizes_beyond_32_bits_are_not_for_blas(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> None:
    attributes = DotAttributes((len(lhs) - 1,), (0,))
    halves = (tuple(d // 2 if d > 1 else 1 for d in dims) for dims in (lhs, rhs))
    assert product(lhs, rhs, attributes) is None
    assert product(*halves, attributes) is not None


@pytest.mark.parametrize(
    ("strides", "taken"),
    [
        ((9, 1), True),
        ((1, 9), True),
        ((9, 2), False),  # no dimension is contiguous
        ((0, 1), False),  # one row, repeated
        ((3, 1), False),  # rows overlap
        ((1, 0), False),
    ],
)
def test_views_that_blas_takes(strides: tuple[int, int], taken: bool) -> None:
    builder = Builder("dot")
    a, b = (builder.parameter(ArrayShape(E.F32, dims)) for dims in ((4, 6), (6, 5)))
    dot = builder.add(Opcode.DOT, (a, b), ROWS_BY_COLUMNS)
    view = View(a, strides, 7)
    assert is_product_operand(dot, 0, view) is taken
    found = as_matrix_product(dot, view, row_major(b, (6, 5)))
    assert (found is not None) is taken
    if found is not None:
        assert (found.lhs.offset, found.lhs.leading, found.lhs.transposed) == (7, 9, strides == (1, 9))
