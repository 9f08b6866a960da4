"""Cholesky, triangular solves, Fourier transforms and batch normalisation against stock XLA."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.types import ElementType
from support.against_xla import check, hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE

E = ElementType
TYPES = (E.F32, E.F64, E.C64, E.C128)
TOLERANCE = {E.F32: 2e-4, E.C64: 2e-4, E.F64: 1e-10, E.C128: 1e-10}


def matrices(element_type: ElementType, dims: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(dims)
    if element_type.is_complex:
        values = values + 1j * rng.standard_normal(dims)
    return values.astype(NUMPY_DTYPE[element_type])


def shape(element_type: ElementType, dims: tuple[int, ...]) -> str:
    return f"{element_type.name.lower()}[{','.join(map(str, dims))}]"


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("dims", [(1, 1), (5, 5), (2, 3, 4, 4), (0, 0), (0, 3, 3)])
def test_cholesky(element_type: ElementType, lower: bool, dims: tuple[int, ...], rng: np.random.Generator) -> None:
    root = matrices(element_type, dims, rng)
    a = (root @ root.conj().swapaxes(-1, -2) + np.eye(dims[-1])).astype(root.dtype)
    # The other triangle is not read.
    a = np.where(np.tri(dims[-1], dtype=bool) if lower else np.tri(dims[-1], dtype=bool).T, a, np.nan).astype(a.dtype)
    text = f"""
ENTRY e {{
  a = {shape(element_type, dims)} parameter(0)
  ROOT r = {shape(element_type, dims)} cholesky(a), lower={str(lower).lower()}
}}"""
    (ours,) = run_on_backend(hlo_of_text(text), [a])
    triangle = np.tril(ours) if lower else np.triu(ours)
    np.testing.assert_array_equal(ours, triangle)
    product = triangle @ triangle.conj().swapaxes(-1, -2) if lower else triangle.conj().swapaxes(-1, -2) @ triangle
    known = ~np.isnan(a)
    np.testing.assert_allclose(
        product[known], a[known], rtol=TOLERANCE[element_type], atol=TOLERANCE[element_type] * 10
    )


@pytest.mark.parametrize("bad", [-1.0, 0.0, np.nan])
def test_cholesky_of_no_positive_definite_matrix_is_nan_and_spares_its_batch(bad: float) -> None:
    a = np.stack([np.eye(3), np.diag([1, bad, 1]), 4 * np.eye(3)]).astype(np.float32)
    text = "\nENTRY e {\n  a = f32[3,3,3] parameter(0)\n  ROOT r = f32[3,3,3] cholesky(a), lower=true\n}"
    (ours,) = run_on_backend(hlo_of_text(text), [a])
    assert np.isnan(ours[1]).all()
    np.testing.assert_array_equal(ours[[0, 2]], np.stack([np.eye(3), 2 * np.eye(3)]))


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("transpose", ["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("unit", [True, False])
def test_triangular_solve(
    element_type: ElementType, transpose: str, left: bool, lower: bool, unit: bool, rng: np.random.Generator
) -> None:
    a = matrices(element_type, (2, 4, 4), rng)
    a = (a + 3 * np.eye(4)).astype(a.dtype)
    b_dims = (2, 4, 3) if left else (2, 3, 4)
    text = f"""
ENTRY e {{
  a = {shape(element_type, a.shape)} parameter(0)
  b = {shape(element_type, b_dims)} parameter(1)
  ROOT r = {shape(element_type, b_dims)} triangular-solve(a, b), left_side={str(left).lower()},
    lower={str(lower).lower()}, unit_diagonal={str(unit).lower()}, transpose_a={transpose}
}}"""
    check(text, a, matrices(element_type, b_dims, rng), tolerance=TOLERANCE[element_type])


def test_triangular_solve_by_a_singular_matrix_is_not_finite() -> None:
    text = """
ENTRY e {
  a = f32[2,2] parameter(0)
  b = f32[2,1] parameter(1)
  ROOT r = f32[2,1] triangular-solve(a, b), left_side=true, lower=true, unit_diagonal=false, transpose_a=NO_TRANSPOSE
}"""
    a = np.array([[1, 0], [1, 0]], np.float32)
    (ours,) = run_on_backend(hlo_of_text(text), [a, np.array([[1], [2]], np.float32)])
    assert ours[0] == 1
    assert not np.isfinite(ours[1])


FOURIER = {"FFT": ("c", "c"), "IFFT": ("c", "c"), "RFFT": ("r", "c"), "IRFFT": ("c", "r")}


@pytest.mark.parametrize("kind", FOURIER)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (8,), (15,), (4, 7), (3, 4, 5), (6, 1)])
def test_fourier(kind: str, double: bool, lengths: tuple[int, ...], rng: np.random.Generator) -> None:
    real, cpx = (E.F64, E.C128) if double else (E.F32, E.C64)
    half = (*lengths[:-1], lengths[-1] // 2 + 1)
    source, target = (cpx if side == "c" else real for side in FOURIER[kind])
    dims = (2, *(half if kind == "IRFFT" else lengths))
    result = (2, *(half if kind == "RFFT" else lengths))
    text = f"""
ENTRY e {{
  x = {shape(source, dims)} parameter(0)
  ROOT r = {shape(target, result)} fft(x), fft_type={kind}, fft_length={{{",".join(map(str, lengths))}}}
}}"""
    check(text, matrices(source, dims, rng), tolerance=1e-12 if double else 1e-5)


def test_fourier_of_nothing() -> None:
    check(
        "\nENTRY e {\n  x = c64[0,4] parameter(0)\n  ROOT r = c64[0,4] fft(x), fft_type=FFT, fft_length={4}\n}",
        np.zeros((0, 4), np.complex64),
    )


@pytest.mark.parametrize("element_type", [E.F32, E.F64, E.BF16], ids=lambda t: t.name)
@pytest.mark.parametrize("feature", [0, 1, 3])
def test_batch_norm(element_type: ElementType, feature: int, rng: np.random.Generator) -> None:
    dims = (4, 3, 5, 2)
    t, n = element_type.name.lower(), dims[feature]
    text = f"""
ENTRY e {{
  x = {shape(element_type, dims)} parameter(0)
  g = {shape(element_type, dims)} parameter(1)
  scale = {t}[{n}] parameter(2)
  offset = {t}[{n}] parameter(3)
  variance = {t}[{n}] parameter(4)
  train = ({shape(element_type, dims)}, {t}[{n}], {t}[{n}]) batch-norm-training(x, scale, offset),
    epsilon=0.001, feature_index={feature}
  infer = {shape(element_type, dims)} batch-norm-inference(x, scale, offset, offset, variance),
    epsilon=0.001, feature_index={feature}
  grad = ({shape(element_type, dims)}, {t}[{n}], {t}[{n}]) batch-norm-grad(x, scale, offset, variance, g),
    epsilon=0.001, feature_index={feature}
  ROOT r = (({shape(element_type, dims)}, {t}[{n}], {t}[{n}]), {shape(element_type, dims)},
    ({shape(element_type, dims)}, {t}[{n}], {t}[{n}])) tuple(train, infer, grad)
}}"""
    dtype = NUMPY_DTYPE[element_type]
    x, g = (rng.standard_normal(dims).astype(dtype) for _ in range(2))
    scale, offset = (rng.standard_normal(n).astype(dtype) for _ in range(2))
    variance = rng.uniform(0.5, 2, n).astype(dtype)
    ours = run_on_backend(hlo_of_text(text), [x, g, scale, offset, variance])
    for result, expected in zip(ours, batch_norms(x, g, scale, offset, variance, feature), strict=True):
        tolerance = {E.F32: 1e-4, E.F64: 1e-10, E.BF16: 5e-2}[element_type] * max(1, np.abs(expected).max())
        np.testing.assert_allclose(result.astype(np.float64), expected, atol=tolerance)


def batch_norms(
    x: np.ndarray, g: np.ndarray, scale: np.ndarray, offset: np.ndarray, variance: np.ndarray, feature: int
) -> list[np.ndarray]:
    """The three instructions by their definitions in f64; the gradient's statistics are ``offset`` and ``variance``."""
    x, g, scale, offset, variance = (a.astype(np.float64) for a in (x, g, scale, offset, variance))
    axes = tuple(d for d in range(x.ndim) if d != feature)
    wide = [1] * x.ndim
    wide[feature] = -1
    s, o, v = (a.reshape(wide) for a in (scale, offset, variance))
    mean, spread = x.mean(axes), x.var(axes)
    trained = (x - mean.reshape(wide)) / np.sqrt(spread.reshape(wide) + 0.001) * s + o
    inferred = (x - o) / np.sqrt(v + 0.001) * s + o
    deviation = 1 / np.sqrt(v + 0.001)
    normalised = (x - o) * deviation
    by_scale, by_offset = (g * normalised).sum(axes), g.sum(axes)
    count = x.size // x.shape[feature]
    by_x = s * deviation * (g - by_offset.reshape(wide) / count - normalised * by_scale.reshape(wide) / count)
    return [trained, mean, spread, inferred, by_x, by_scale, by_offset]


RAGGED = {
    "rows": (
        (10, 4),
        (3, 4, 5),
        (10, 5),
        "lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        "{0}, rhs_group_dims={0}",
    ),
    "contracting": ((4, 10), (10, 5), (3, 4, 5), "lhs_contracting_dims={1}, rhs_contracting_dims={0}", "{1}"),
    "batch": (
        (10, 4, 2),
        (10, 2, 5),
        (10, 4, 5),
        "lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}",
        "{0}",
    ),
}


@pytest.mark.parametrize("role", RAGGED)
@pytest.mark.parametrize("sizes", [(3, 0, 7), (2, 3, 1), (10, 0, 0), (0, 0, 0)])
def test_ragged_dot(role: str, sizes: tuple[int, ...], rng: np.random.Generator) -> None:
    lhs, rhs, result, dimensions, ragged = RAGGED[role]
    text = f"""
ENTRY e {{
  a = {shape(E.F32, lhs)} parameter(0)
  b = {shape(E.F32, rhs)} parameter(1)
  n = s32[3] parameter(2)
  ROOT r = {shape(E.F32, result)} ragged-dot(a, b, n), {dimensions}, lhs_ragged_dims={ragged}
}}"""
    a, b = (rng.standard_normal(dims).astype(np.float32) for dims in (lhs, rhs))
    ends = np.minimum(np.cumsum(sizes), 10)
    groups = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if role == "rows":
        expected = np.zeros((10, 5), np.float32)
        for group, matrix in zip(groups, b, strict=True):
            expected[group] = a[group] @ matrix
    elif role == "contracting":
        expected = np.stack([a[:, group] @ b[group] for group in groups])
    else:
        expected = np.where(np.arange(10)[:, None, None] < ends[-1], a @ b, 0)
    (ours,) = run_on_backend(hlo_of_text(text), [a, b, np.array(sizes, np.int32)])
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
