"""Factorisations and triangular solves in native code, judged by what defines them and by NumPy's float64."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_DTYPES = {"f32": np.float32, "f64": np.float64, "c64": np.complex64, "c128": np.complex128}
# One element, what is computed element by element, the first size beyond it, a block, several blocks.
_SIZES = [1, 2, 3, 16, 17, 128, 301]


def _random(element: str, rng: np.random.Generator, *shape: int) -> np.ndarray:
    values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if element.startswith("c") else 0)
    return np.asarray(values).astype(_DTYPES[element])


def _tolerance(element: str, n: int) -> float:
    return (1e-6 if element in ("f32", "c64") else 1e-14) * (30 + n)


def _close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))


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
    wide = _wide(factor)
    _close(wide @ _adjoint(wide) if lower else _adjoint(wide) @ wide, _wide(a), _tolerance(element, n))


@pytest.mark.parametrize("spoil", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("n", [4, 40, 200])
def test_cholesky_of_what_is_not_positive_definite_is_nan(
    n: int, spoil: float, context: Context, rng: np.random.Generator
) -> None:
    a = np.stack([np.eye(n) * s for s in rng.uniform(1, 2, 3)]).astype(np.float32)
    a[1, n - 1, n - 1] = spoil
    factor = _cholesky(context, "f32", a, True)
    assert np.isnan(factor[1]).all()
    _close(factor[::2] @ _adjoint(factor[::2]), a[::2], 1e-5)


@pytest.mark.parametrize("transpose", ["NO_TRANSPOSE", "TRANSPOSE", "ADJOINT"])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(("n", "count"), [(1, 1), (3, 5), (16, 2), (17, 1), (40, 600)])
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
    a, b = _random(element, rng, 2, n, n) / n, _random(element, rng, 2, *((n, count) if left else (count, n)))
    a = a.astype(b.dtype) + 2 * np.eye(n, dtype=b.dtype)
    text = f"""ENTRY main {{
  a = {_shape(element, *a.shape)} parameter(0)
  b = {_shape(element, *b.shape)} parameter(1)
  ROOT x = {_shape(element, *b.shape)} triangular-solve(a, b), left_side={str(left).lower()}, \
lower={str(lower).lower()}, unit_diagonal={str(unit).lower()}, transpose_a={transpose}
}}"""
    x = _wide(_run(context, text, a, b)[0])
    triangle = _wide(np.tril(a, -1) if lower else np.triu(a, 1))
    triangle += np.eye(n) if unit else np.eye(n) * _wide(a)
    op = {"TRANSPOSE": triangle.swapaxes(-1, -2), "ADJOINT": _adjoint(triangle)}.get(transpose, triangle)
    _close(op @ x if left else x @ op, _wide(b), _tolerance(element, n))


@pytest.mark.parametrize("n", [3, 40])
def test_a_zero_on_the_diagonal_gives_infinity(n: int, context: Context) -> None:
    a = np.eye(n, dtype=np.float32)
    a[0, 0] = 0
    text = f"""ENTRY main {{
  a = f32[{n},{n}] parameter(0)
  b = f32[{n},2] parameter(1)
  ROOT x = f32[{n},2] triangular-solve(a, b), left_side=true, lower=true, unit_diagonal=false, \
transpose_a=NO_TRANSPOSE
}}"""
    (x,) = _run(context, text, a, np.ones((n, 2), np.float32))
    assert np.isposinf(x[0]).all()


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
    _close(
        lower @ _wide(np.triu(lu[..., :k, :])),
        np.take_along_axis(_wide(a), permutation[..., None], -2),
        _tolerance(element, max(m, n)),
    )
    for swaps, order in zip(pivots.reshape(-1, k), permutation.reshape(-1, m), strict=True):
        expected = np.arange(m)
        for i, other in enumerate(swaps):
            expected[[i, other]] = expected[[other, i]]
        np.testing.assert_array_equal(order, expected)


@pytest.mark.parametrize(
    "shape", [*((2, n, n) for n in _SIZES), (3, 7), (7, 3), (2, 2, 150, 40), (300, 310), (310, 270)]
)
@pytest.mark.parametrize("element", _DTYPES)
def test_lu(element: str, shape: tuple[int, ...], context: Context, rng: np.random.Generator) -> None:
    a = _random(element, rng, *shape)
    _check_lu(element, a, *_lu(context, element, a))


def test_lu_of_many_matrices(context: Context, rng: np.random.Generator) -> None:
    a = _random("f32", rng, 3000, 5, 5)
    _check_lu("f32", a, *_lu(context, "f32", a))


@pytest.mark.parametrize("n", [4, 150])
def test_lu_of_a_singular_matrix(n: int, context: Context, rng: np.random.Generator) -> None:
    a = _random("f64", rng, n, n)
    a[:, 1] = 0
    lu, pivots, permutation = _lu(context, "f64", a)
    _check_lu("f64", a, lu, pivots, permutation)
    assert lu[1, 1] == 0


@pytest.mark.parametrize("n", [4, 150])
def test_a_matrix_with_nan_spoils_no_other(n: int, context: Context, rng: np.random.Generator) -> None:
    a = _random("f32", rng, 3, n, n)
    a[1, 0, 0] = np.nan
    lu, pivots, permutation = _lu(context, "f32", a)
    assert np.isnan(lu[1]).any()
    np.testing.assert_array_equal(np.sort(permutation[1]), np.arange(n))
    _check_lu("f32", a[::2], lu[::2], pivots[::2], permutation[::2])


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
