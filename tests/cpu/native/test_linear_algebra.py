"""Factorisations and triangular solves in native code, judged by what defines them, computed by NumPy in float64.

Of triangular solves, Cholesky and LU each element is judged by the bound that is proven for every order of summation:
the residual of n products is at most about n times the rounding of the sum of their absolute values.
"""

from __future__ import annotations

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_DTYPES = {"f32": np.float32, "f64": np.float64, "c64": np.complex64, "c128": np.complex128}
# About small blocks, of 16, about those that are factorised at once, of 128, and several of these.
_SIZES = [1, 8, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 130, 200, 257, 300]
_TRANSPOSES = ["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"]


def _random(element: str, rng: np.random.Generator, *shape: int) -> np.ndarray:
    values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if element.startswith("c") else 0)
    return np.asarray(values).astype(_DTYPES[element])


def _tolerance(element: str, n: int) -> float:
    return (1e-6 if element in ("f32", "c64") else 1e-14) * (30 + n)


def _close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))


def _check_product(element: str, a: np.ndarray, b: np.ndarray, expected: np.ndarray) -> None:
    """a @ b is what was given, but for the errors of an algorithm whose factors or unknowns it has."""
    n = a.shape[-1]
    rounding = (2.0**-23 if element in ("f32", "c64") else 2.0**-52) * (4 if element.startswith("c") else 1)
    bound = rounding * (n + 8) * (np.abs(a) @ np.abs(b) + np.abs(expected))
    residual = np.abs(a @ b - expected)
    assert (residual <= bound).all(), f"{np.max(residual / np.where(bound == 0, 1, bound))} times the bound"


def _adjoint(a: np.ndarray) -> np.ndarray:
    return a.conj().swapaxes(-1, -2)


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _shape(element: str, *dims: int) -> str:
    return f"{element}[{','.join(map(str, dims))}]"


def _run(context: Context, text: str, *args: np.ndarray) -> list[np.ndarray]:
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        explanation = executable.artifact(Artifact.EXPLANATION).decode()
        assert not any(f"\ncall {kind}" in explanation for kind in ("cholesky", "triangular", "custom"))
        assert "runs as native tiles" in explanation
        return [get(result) for result in run(executable, *(put(memory, a) for a in args))]


def _cholesky(context: Context, element: str, a: np.ndarray, lower: bool) -> np.ndarray:
    shape = _shape(element, *a.shape)
    text = f"""ENTRY main {{
  a = {shape} parameter(0)
  ROOT l = {shape} cholesky(a), lower={str(lower).lower()}
}}"""
    return _run(context, text, a)[0]


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("n", _SIZES)
@pytest.mark.parametrize("element", _DTYPES)
def test_cholesky(element: str, n: int, lower: bool, context: Context, rng: np.random.Generator) -> None:
    a = _random(element, rng, 2, n, n)
    a = (a @ _adjoint(a) / n + np.eye(n)).astype(a.dtype)
    # The other triangle is not read.
    given = a + (np.triu if lower else np.tril)(np.full((n, n), np.nan), 1 if lower else -1).astype(a.dtype)
    factor = _cholesky(context, element, given, lower)
    np.testing.assert_array_equal(factor, np.tril(factor) if lower else np.triu(factor))
    wide = _wide(factor) if lower else _adjoint(_wide(factor))
    _check_product(element, wide, _adjoint(wide), _wide(a))


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("spoil", [-1.0, 0.0, np.nan, np.inf])
@pytest.mark.parametrize("n", [4, 16, 17, 40, 200])
@pytest.mark.parametrize("element", ["f32", "c128"])
def test_cholesky_of_what_is_not_positive_definite_is_nan(
    element: str, n: int, spoil: float, lower: bool, context: Context, rng: np.random.Generator
) -> None:
    a = np.stack([np.eye(n) * s for s in rng.uniform(1, 2, 3)]).astype(_DTYPES[element])
    at = int(rng.integers(n))
    a[1, at, at] = spoil
    factor = _cholesky(context, element, a, lower)
    assert np.isnan(factor[1]).all()
    _check_product(element, _wide(factor[::2]), _adjoint(_wide(factor[::2])), _wide(a[::2]))


@pytest.mark.parametrize("n", [16, 40, 200])
def test_cholesky_of_an_indefinite_matrix_is_nan(n: int, context: Context, rng: np.random.Generator) -> None:
    a = _random("f64", rng, 2, n, n)
    a = a + _adjoint(a)
    assert np.isnan(_cholesky(context, "f64", a, True)).all()


def _solve(
    context: Context, element: str, a: np.ndarray, b: np.ndarray, left: bool, lower: bool, unit: bool, transpose: str
) -> np.ndarray:
    text = f"""ENTRY main {{
  a = {_shape(element, *a.shape)} parameter(0)
  b = {_shape(element, *b.shape)} parameter(1)
  ROOT x = {_shape(element, *b.shape)} triangular-solve(a, b), left_side={str(left).lower()}, \
lower={str(lower).lower()}, unit_diagonal={str(unit).lower()}, transpose_a={transpose}
}}"""
    return _run(context, text, a, b)[0]


def _check_solve(
    context: Context,
    element: str,
    rng: np.random.Generator,
    n: int,
    count: int,
    left: bool,
    lower: bool,
    unit: bool,
    transpose: str,
    scale: float = 1.0,
) -> None:
    a, b = _random(element, rng, 2, n, n) / n, _random(element, rng, 2, *((n, count) if left else (count, n)))
    a = ((a + 2 * np.eye(n)) * scale).astype(b.dtype)
    b = (b * scale).astype(b.dtype)
    triangle = _wide(np.tril(a, -1) if lower else np.triu(a, 1))
    triangle += np.eye(n) if unit else np.eye(n) * _wide(a)
    op = {"TRANSPOSE": triangle.swapaxes(-1, -2), "ADJOINT": _adjoint(triangle)}.get(transpose, triangle)
    # What is not of the triangle is not read.
    given = a + (np.triu if lower else np.tril)(np.full((n, n), np.nan), 1 if lower else -1).astype(a.dtype)
    if unit:
        given[:, range(n), range(n)] = np.nan
    x = _wide(_solve(context, element, given, b, left, lower, unit, transpose))
    _check_product(element, op if left else x, x if left else op, _wide(b))


@pytest.mark.parametrize("transpose", _TRANSPOSES)
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(("n", "count"), [(3, 5), (16, 40), (17, 1), (40, 600)])
@pytest.mark.parametrize("element", ["f32", "c128"])
def test_triangular_solve(
    element: str,
    n: int,
    count: int,
    left: bool,
    lower: bool,
    unit: bool,
    transpose: str,
    context: Context,
    rng: np.random.Generator,
) -> None:
    _check_solve(context, element, rng, n, count, left, lower, unit, transpose)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("n", _SIZES)
@pytest.mark.parametrize("element", _DTYPES)
def test_triangular_solve_of_any_size(
    element: str, n: int, left: bool, context: Context, rng: np.random.Generator
) -> None:
    lower, unit = (bool(flag) for flag in rng.integers(2, size=2))
    count, transpose = int(rng.choice([1, 2, 4, 15, 33, 130, 300])), str(rng.choice(_TRANSPOSES))
    _check_solve(context, element, rng, n, count, left, lower, unit, transpose)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("n", [5, 40])
def test_quotients_of_complex_numbers_whose_squares_are_beyond_their_range(
    n: int, scale: float, context: Context, rng: np.random.Generator
) -> None:
    _check_solve(context, "c64", rng, n, 20, True, True, False, "NO_TRANSPOSE", scale)
    a = (_random("c64", rng, 2, n, n) * scale).astype(np.complex64)
    _check_lu("c64", a, *_lu(context, "c64", a))


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize(("n", "zero"), [(3, 0), (16, 7), (40, 0), (40, 21)])
@pytest.mark.parametrize("element", _DTYPES)
def test_a_zero_on_the_diagonal_gives_no_finite_number(
    element: str, n: int, zero: int, count: int, context: Context
) -> None:
    a = np.eye(n, dtype=_DTYPES[element])
    a[zero, zero] = 0
    x = _solve(context, element, a, np.ones((n, count), a.dtype), True, True, False, "NO_TRANSPOSE")
    np.testing.assert_array_equal(x[:zero], 1)
    assert not np.isfinite(x[zero]).any()
    if element.startswith("f"):
        assert np.isposinf(x[zero]).all()


def _lu(context: Context, element: str, a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    *batch, m, n = a.shape
    pivots, order = _shape("s32", *batch, min(m, n)), _shape("s32", *batch, m)
    shape = _shape(element, *a.shape)
    text = f"""ENTRY main {{
  a = {shape} parameter(0)
  ROOT lu = ({shape}, {pivots}, {order}) custom-call(a), custom_call_target="flagos.lu"
}}"""
    lu, pivot, permutation = _run(context, text, a)
    return lu, pivot, permutation


def _check_lu(element: str, a: np.ndarray, lu: np.ndarray, pivots: np.ndarray, permutation: np.ndarray) -> None:
    m, n = a.shape[-2:]
    k = min(m, n)
    lower = _wide(np.tril(lu[..., :k], -1)) + np.eye(m, k)
    assert (np.abs(lower) <= (1.0 if element.startswith("f") else 1.5)).all()  # of complex numbers |re| + |im| counts
    permuted = np.take_along_axis(_wide(a), permutation[..., None], -2)
    _check_product(element, lower, _wide(np.triu(lu[..., :k, :])), permuted)
    for swaps, order in zip(pivots.reshape(-1, k), permutation.reshape(-1, m), strict=True):
        expected = np.arange(m)
        for i, other in enumerate(swaps):
            expected[[i, other]] = expected[[other, i]]
        np.testing.assert_array_equal(order, expected)


@pytest.mark.parametrize(
    "shape",
    [*((2, n, n) for n in _SIZES), (3, 7), (7, 3), (12, 90), (700, 16), (2, 2, 150, 40), (300, 310), (310, 270)],
)
@pytest.mark.parametrize("element", _DTYPES)
def test_lu(element: str, shape: tuple[int, ...], context: Context, rng: np.random.Generator) -> None:
    a = _random(element, rng, *shape)
    _check_lu(element, a, *_lu(context, element, a))


def test_lu_of_many_matrices(context: Context, rng: np.random.Generator) -> None:
    a = _random("f32", rng, 3000, 5, 5)
    _check_lu("f32", a, *_lu(context, "f32", a))


@pytest.mark.parametrize("n", [4, 17, 150])
@pytest.mark.parametrize("element", _DTYPES)
def test_lu_of_a_singular_matrix(element: str, n: int, context: Context, rng: np.random.Generator) -> None:
    a = _random(element, rng, n, n)
    zero = int(rng.integers(n))
    a[:, zero] = 0
    lu, pivots, permutation = _lu(context, element, a)
    _check_lu(element, a, lu, pivots, permutation)
    assert lu[zero, zero] == 0


@pytest.mark.parametrize("first", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("n", [4, 40])
@pytest.mark.parametrize("element", _DTYPES)
def test_lu_takes_the_first_of_equal_pivots(element: str, n: int, first: float, context: Context) -> None:
    a = np.full((n, n), 1, _DTYPES[element])
    a[0] = first
    lu, pivots, _ = _lu(context, element, a)
    np.testing.assert_array_equal(pivots, [int(first < 1), *range(1, n)])
    np.testing.assert_array_equal(lu[1:, 1:], 0)


@pytest.mark.parametrize("spoil", [np.nan, np.inf])
@pytest.mark.parametrize("n", [4, 17, 150])
@pytest.mark.parametrize("element", _DTYPES)
def test_a_matrix_that_is_not_finite_spoils_no_other(
    element: str, n: int, spoil: float, context: Context, rng: np.random.Generator
) -> None:
    a = _random(element, rng, 3, n, n)
    a[1, *rng.integers(n, size=2)] = spoil
    lu, pivots, permutation = _lu(context, element, a)
    assert not np.isfinite(lu[1]).all()
    np.testing.assert_array_equal(np.sort(permutation[1]), np.arange(n))
    _check_lu(element, a[::2], lu[::2], pivots[::2], permutation[::2])


@pytest.mark.parametrize("shape", [(1, 1), (2, 5, 3), (2, 3, 5), (150, 90), (90, 150)])
@pytest.mark.parametrize("element", _DTYPES)
def test_qr(element: str, shape: tuple[int, ...], context: Context, rng: np.random.Generator) -> None:
    *batch, m, n = shape
    k = min(m, n)
    a, taus = _shape(element, *shape), _shape(element, *batch, k)
    thin = _shape(element, *batch, m, k)
    cut = "".join(f"[0:{size}], " for size in (*batch, m)) + f"[0:{k}]"
    text = f"""ENTRY main {{
  a = {a} parameter(0)
  f = ({a}, {taus}) custom-call(a), custom_call_target="flagos.geqrf"
  r = {a} get-tuple-element(f), index=0
  t = {taus} get-tuple-element(f), index=1
  h = {thin} slice(r), slice={{{cut}}}
  q = {thin} custom-call(h, t), custom_call_target="flagos.householder_product"
  ROOT both = ({thin}, {a}) tuple(q, r)
}}"""
    x = _random(element, rng, *shape)
    q, r = map(_wide, _run(context, text, x))
    _close(q @ np.triu(r[..., :k, :]), _wide(x), _tolerance(element, m))
    _close(_adjoint(q) @ q, np.broadcast_to(np.eye(k), (*batch, k, k)), _tolerance(element, m))


def test_qr_of_a_matrix_that_is_not_finite_is_nan(context: Context, rng: np.random.Generator) -> None:
    x = _random("f32", rng, 3, 4, 4)
    x[1, 2, 2] = np.inf
    text = """ENTRY main {
  a = f32[3,4,4] parameter(0)
  ROOT f = (f32[3,4,4], f32[3,4]) custom-call(a), custom_call_target="flagos.geqrf"
}"""
    factors, taus = _run(context, text, x)
    assert np.isnan(factors[1]).all()
    assert np.isnan(taus[1]).all()
    assert np.isfinite(factors[::2]).all()
