"""dot against stock XLA: every element type, batch and contracting dimensions, empty and degenerate shapes."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.types import ElementType
from support.against_xla import check, hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE, random_values

E = ElementType
TYPES = {
    E.F32: 1e-6,
    E.F64: 1e-14,
    E.F16: 2e-3,
    E.BF16: 1e-2,
    E.C64: 1e-6,
    E.C128: 1e-14,
    **dict.fromkeys((E.S8, E.U8, E.S16, E.U16, E.S32, E.U32, E.S64, E.U64), None),
}
# Left, right and result dimensions, then the attributes.
SHAPES = {
    "matrix_matrix": ("3,4", "4,5", "3,5", "lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
    "transposed": ("4,3", "5,4", "3,5", "lhs_contracting_dims={0}, rhs_contracting_dims={1}"),
    "matrix_vector": ("3,4", "4", "3", "lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
    "vector_vector": ("4", "4", "", "lhs_contracting_dims={0}, rhs_contracting_dims={0}"),
    "outer": ("3", "4", "3,4", "lhs_contracting_dims={}, rhs_contracting_dims={}"),
    "batch": (
        *("2,3,4", "2,4,5", "2,3,5"),
        "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}",
    ),
    "batch_elsewhere": (
        *("3,2,4", "5,4,2", "2,3,5"),
        "lhs_batch_dims={1}, rhs_batch_dims={2}, lhs_contracting_dims={2}, rhs_contracting_dims={1}",
    ),
    "two_batches_two_contracted": (
        *("2,3,4,5,6", "3,2,6,4,7", "3,2,5,7"),
        "lhs_batch_dims={1,0}, rhs_batch_dims={0,1}, lhs_contracting_dims={2,4}, rhs_contracting_dims={3,2}",
    ),
    "batch_only": (
        *("6", "6", "6"),
        "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={}, rhs_contracting_dims={}",
    ),
    "nothing_contracted": ("3,0", "0,5", "3,5", "lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
    "no_rows": ("0,4", "4,5", "0,5", "lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
    "two_rows_no_column": ("2,6,3", "6", "2,3", "lhs_contracting_dims={1}, rhs_contracting_dims={0}"),
    "two_columns_no_row": ("6", "2,6,3", "2,3", "lhs_contracting_dims={0}, rhs_contracting_dims={1}"),
    "batch_of_two_rows": (
        *("4,2,6,3", "4,6", "4,2,3"),
        "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}",
    ),
    "batch_of_two_columns": (
        *("4,6", "2,6,4,3", "4,2,3"),
        "lhs_batch_dims={0}, rhs_batch_dims={2}, lhs_contracting_dims={1}, rhs_contracting_dims={1}",
    ),
    "free_dimensions": ("2,3,4", "5,4,6", "2,3,5,6", "lhs_contracting_dims={2}, rhs_contracting_dims={1}"),
}


def operand(element_type: ElementType, dims: str, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(int(d) for d in dims.split(",") if d)
    if element_type.is_integer:
        return random_values(element_type, int(np.prod(shape)), rng).reshape(shape)
    values = rng.standard_normal(shape)
    if element_type.is_complex:
        values = values + 1j * rng.standard_normal(shape)
    return np.asarray(values).astype(NUMPY_DTYPE[element_type])


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("case", SHAPES)
def test_dot(element_type: ElementType, case: str, rng: np.random.Generator) -> None:
    lhs, rhs, result, attributes = SHAPES[case]
    name = element_type.name.lower()
    text = f"""ENTRY e {{
      a = {name}[{lhs}] parameter(0)
      b = {name}[{rhs}] parameter(1)
      ROOT r = {name}[{result}] dot(a, b), {attributes} }}"""
    check(text, operand(element_type, lhs, rng), operand(element_type, rhs, rng), tolerance=TYPES[element_type])


MIXED = [
    *(("bf16", "f32"), ("f16", "f32"), ("f32", "f64"), ("f8e4m3fn", "f32")),
    *(("s8", "s32"), ("u8", "s32"), ("s16", "s64")),
]


@pytest.mark.parametrize(("source", "result"), MIXED)
def test_wider_result(source: str, result: str, rng: np.random.Generator) -> None:
    text = f"""ENTRY e {{
      a = {source}[6,40] parameter(0)
      b = {source}[40,5] parameter(1)
      ROOT r = {result}[6,5] dot(a, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}} }}"""
    element_type = E[source.upper()]
    tolerance = None if element_type.is_integer else 1e-5
    check(text, operand(element_type, "6,40", rng), operand(element_type, "40,5", rng), tolerance=tolerance)


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_narrow_floats_accumulate_in_float32(name: str) -> None:
    text = f"""ENTRY e {{
      a = {name}[1,3000] parameter(0)
      b = {name}[3000,1] parameter(1)
      ROOT r = {name}[1,1] dot(a, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}} }}"""
    ones = np.ones((1, 3000), NUMPY_DTYPE[E[name.upper()]])
    (ours,) = run_on_backend(hlo_of_text(text), [ones, ones.T])
    assert float(ours[0, 0]) == float(np.float32(3000).astype(ones.dtype))


def test_pred_asks_whether_any_pair_holds(rng: np.random.Generator) -> None:
    text = """ENTRY e {
      a = pred[4,6] parameter(0)
      b = pred[6,5] parameter(1)
      ROOT r = pred[4,5] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0} }"""
    a, b = rng.integers(0, 4, (4, 6)) == 0, rng.integers(0, 4, (6, 5)) == 0
    check(text, a, b)


def test_operands_that_are_views(rng: np.random.Generator) -> None:
    text = """ENTRY e {
      a = f32[4,3] parameter(0)
      v = f32[4] parameter(1)
      t = f32[3,4] transpose(a), dimensions={1,0}
      m = f32[4,5] broadcast(v), dimensions={0}
      ROOT r = f32[3,5] dot(t, m), lhs_contracting_dims={1}, rhs_contracting_dims={0} }"""
    check(text, operand(E.F32, "4,3", rng), operand(E.F32, "4", rng), tolerance=1e-6)


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("contracted", [2, 9, 34, 80, 144, 258, 515])
@pytest.mark.parametrize("element_type", [E.BF16, E.F16, E.F32], ids=lambda t: t.name)
def test_a_row_that_is_not_finite_stays_alone(
    element_type: ElementType, contracted: int, batch: int, rng: np.random.Generator
) -> None:
    """Matrix units read on beyond the end of a row, where the next one begins."""
    lead = [batch] if batch else []
    dims = [*lead, 65, contracted], [*lead, contracted, 36], [*lead, 65, 36]
    lhs, rhs, result = (f"{element_type.name.lower()}[{','.join(map(str, d))}]" for d in dims)
    n = len(lead)
    batches = f"lhs_batch_dims={{{0 if n else ''}}}, rhs_batch_dims={{{0 if n else ''}}}, "
    text = f"""
ENTRY e {{
  a = {lhs} parameter(0)
  b = {rhs} parameter(1)
  ROOT r = {result} dot(a, b), {batches}lhs_contracting_dims={{{n + 1}}}, rhs_contracting_dims={{{n}}}
}}"""
    a, b = (rng.standard_normal(d).astype(NUMPY_DTYPE[element_type]) for d in dims[:2])
    a[..., 30, :], a[..., 41, 1] = np.nan, np.inf
    (found,) = run_on_backend(hlo_of_text(text), [a, b])
    rows = np.isfinite(found.astype(np.float64)).all(-1)
    assert not rows[..., [30, 41]].any()
    assert np.delete(rows, [30, 41], -1).all()
