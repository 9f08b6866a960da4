"""Which dots BLAS can run. What it computes is tested end to end in tests/cpu/native/test_products.py."""

from __future__ import annotations

import pytest

from flagos_backend.codegen.products import MatrixProduct, as_matrix_product
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

E = ElementType
ROWS_BY_COLUMNS = DotAttributes(lhs_contracting=(1,), rhs_contracting=(0,))


def product(
    lhs: tuple[int, ...], rhs: tuple[int, ...], attributes: DotAttributes = ROWS_BY_COLUMNS, element_type: E = E.F32
) -> MatrixProduct | None:
    builder = Builder("dot")
    a, b = (builder.parameter(ArrayShape(element_type, dims)) for dims in (lhs, rhs))
    return as_matrix_product(builder.add(Opcode.DOT, (a, b), attributes), a, b)


def test_strides_of_a_batch_between_the_matrix_dimensions() -> None:
    found = product((3, 2, 4), (2, 4, 5), DotAttributes((2,), (1,), (1,), (0,)))
    assert found is not None
    assert (found.batch, found.m, found.n, found.k) == ((2,), 3, 5, 4)
    assert (found.lhs.batch_strides, found.lhs.leading, found.lhs.transposed) == ((4,), 8, False)
    assert (found.rhs.batch_strides, found.rhs.leading, found.rhs.transposed) == ((20,), 5, False)


@pytest.mark.parametrize("element_type", [E.F16, E.BF16, E.S32, E.C64])
def test_other_element_types_are_not_for_blas(element_type: E) -> None:
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
