"""Decompositions by LAPACK in native code, judged by what defines them and by NumPy's in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_DTYPES = {"f32": np.float32, "f64": np.float64, "c64": np.complex64, "c128": np.complex128}
_REAL = {"f32": "f32", "f64": "f64", "c64": "f32", "c128": "f64"}
_COMPLEX = {"f32": "c64", "f64": "c128", "c64": "c64", "c128": "c128"}
# Without vectors, one of a batch, enough of them for threads, and about LAPACK's blocks.
_BATCHES = [((), 1), ((3,), 2), ((2, 3), 5), ((64,), 16), ((), 70)]


def _random(element: str, rng: np.random.Generator, *shape: int) -> np.ndarray:
    values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if element.startswith("c") else 0)
    return np.asarray(values).astype(_DTYPES[element])


def _shape(element: str, *dims: int) -> str:
    return f"{element}[{','.join(map(str, dims))}]"


def _adjoint(a: np.ndarray) -> np.ndarray:
    return a.conj().swapaxes(-1, -2)


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _close(element: str, actual: np.ndarray, expected: np.ndarray, terms: int = 1) -> None:
    epsilon = 2.0**-23 if element in ("f32", "c64") else 2.0**-52
    bound = 8 * epsilon * (4 + max((terms, *actual.shape[-2:]))) * max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(_wide(actual), _wide(expected), rtol=0, atol=bound)


def _call(
    context: Context, target: str, results: list[str], config: dict[str, bool], *args: tuple[str, np.ndarray]
) -> list[np.ndarray]:
    parameters = "\n".join(f"  p{n} = {shape} parameter({n})" for n, (shape, _) in enumerate(args))
    operands = ", ".join(f"p{n}" for n in range(len(args)))
    call = f'custom-call({operands}), custom_call_target="{target}", backend_config={json.dumps(json.dumps(config))}'
    text = f"ENTRY main {{\n{parameters}\n  ROOT r = ({', '.join(results)}) {call}\n}}"
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        assert "native custom-call" in executable.artifact(Artifact.EXPLANATION).decode()
        buffers = [put(memory, a) for _, a in args]
        found = [get(result) for result in run(executable, *buffers)]
        for buffer, (_, a) in zip(buffers, args, strict=True):
            np.testing.assert_array_equal(get(buffer), a)
        return found


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize(("batch", "n"), _BATCHES)
@pytest.mark.parametrize("element", _DTYPES)
def test_eigh(
    element: str, batch: tuple[int, ...], n: int, lower: bool, context: Context, rng: np.random.Generator
) -> None:
    a = _random(element, rng, *batch, n, n)
    a = a + _adjoint(a)
    # The other triangle is not read.
    given = a + (np.triu if lower else np.tril)(np.full((n, n), np.nan), 1 if lower else -1).astype(a.dtype)
    shapes = [_shape(element, *batch, n, n), _shape(_REAL[element], *batch, n)]
    v, w = _call(context, "flagos.eigh", shapes, {"lower": lower}, (shapes[0], given))
    assert (np.diff(w) >= 0).all()
    _close(element, w, np.linalg.eigvalsh(_wide(a)))
    _close(element, _wide(v) * w[..., None, :] @ _adjoint(_wide(v)), a)
    _close(element, _adjoint(_wide(v)) @ v, np.broadcast_to(np.eye(n), a.shape))


@pytest.mark.parametrize("vectors", ["none", "thin", "full"])
@pytest.mark.parametrize(("batch", "m", "n"), [((), 1, 1), ((2,), 4, 3), ((40,), 3, 4), ((2, 3), 7, 7), ((), 70, 9)])
@pytest.mark.parametrize("element", _DTYPES)
def test_svd(
    element: str,
    batch: tuple[int, ...],
    m: int,
    n: int,
    vectors: str,
    context: Context,
    rng: np.random.Generator,
) -> None:
    a, k = _random(element, rng, *batch, m, n), min(m, n)
    left, right = (m, n) if vectors == "full" else (k, k)
    values = _shape(_REAL[element], *batch, k)
    shapes = [_shape(element, *batch, m, left), _shape(element, *batch, right, n)]
    config = {"full_matrices": vectors == "full", "compute_uv": vectors != "none"}
    results = [values, *(shapes if vectors != "none" else [])]
    s, *rest = _call(context, "flagos.svd", results, config, (_shape(element, *a.shape), a))
    _close(element, s, np.linalg.svd(_wide(a), compute_uv=False))
    if vectors == "none":
        return
    u, vh = map(_wide, rest)
    _close(element, u[..., :k] * s[..., None, :] @ vh[..., :k, :], a)
    for unitary in (u, _adjoint(vh)):
        size = unitary.shape[-1]
        _close(element, _adjoint(unitary) @ unitary, np.broadcast_to(np.eye(size), (*batch, size, size)))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize(("batch", "n"), _BATCHES)
@pytest.mark.parametrize("element", _DTYPES)
def test_eig(
    element: str,
    batch: tuple[int, ...],
    n: int,
    left: bool,
    right: bool,
    context: Context,
    rng: np.random.Generator,
) -> None:
    a = _random(element, rng, *batch, n, n)
    if n == 5:
        a = np.triu(a)  # real eigenvalues
    vectors = _shape(_COMPLEX[element], *batch, n, n)
    results = [_shape(_COMPLEX[element], *batch, n), *[vectors] * (left + right)]
    config = {"left": left, "right": right}
    w, *found = _call(context, "flagos.eig", results, config, (_shape(element, *a.shape), a))
    w, found = _wide(w), [_wide(v) for v in found]
    _close(element, w.sum(-1), np.trace(_wide(a), axis1=-2, axis2=-1), n * n)
    for v in found:
        np.testing.assert_allclose(np.linalg.norm(v, axis=-2), 1, rtol=1e-5)
    if left:
        _close(element, _adjoint(found[0]) @ a, w[..., :, None] * _adjoint(found[0]))
    if right:
        _close(element, a @ found[-1], found[-1] * w[..., None, :])


@pytest.mark.parametrize("vectors", [True, False])
@pytest.mark.parametrize(("batch", "n"), _BATCHES)
@pytest.mark.parametrize("element", _DTYPES)
def test_schur(
    element: str, batch: tuple[int, ...], n: int, vectors: bool, context: Context, rng: np.random.Generator
) -> None:
    a = _random(element, rng, *batch, n, n)
    shape = _shape(element, *a.shape)
    t, *z = _call(context, "flagos.schur", [shape] * (1 + vectors), {"vectors": vectors}, (shape, a))
    blocks = -1 if element.startswith("c") else -2
    np.testing.assert_array_equal(np.tril(t, blocks), np.zeros_like(t))
    _close(element, np.trace(t, axis1=-2, axis2=-1), np.trace(_wide(a), axis1=-2, axis2=-1), n * n)
    for unitary in map(_wide, z):
        _close(element, unitary @ t @ _adjoint(unitary), a)
        _close(element, _adjoint(unitary) @ unitary, np.broadcast_to(np.eye(n), a.shape))


def _reflected(packed: np.ndarray, taus: np.ndarray, first: int) -> np.ndarray:
    """The product of the reflectors that stand below diagonal number ``first`` of one matrix."""
    m = len(packed)
    q = np.eye(m, dtype=packed.dtype)
    for j, tau in enumerate(taus):
        v = np.zeros(m, packed.dtype)
        v[j + first], v[j + first + 1 :] = 1, packed[j + first + 1 :, j]
        q = q @ (np.eye(m) - tau * np.outer(v, v.conj()))
    return q


@pytest.mark.parametrize("n", [2, 5, 40])
@pytest.mark.parametrize("element", _DTYPES)
def test_hessenberg(element: str, n: int, context: Context, rng: np.random.Generator) -> None:
    a = _random(element, rng, 3, n, n)
    shape = _shape(element, 3, n, n)
    packed, taus = _call(context, "flagos.hessenberg", [shape, _shape(element, 3, n - 1)], {}, (shape, a))
    for given, h, tau in zip(a, _wide(packed), _wide(taus), strict=True):
        q = _reflected(h, tau, 1)
        _close(element, q @ np.triu(h, -1) @ _adjoint(q), given)


@pytest.mark.parametrize("n", [2, 5, 40])
@pytest.mark.parametrize("element", _DTYPES)
def test_tridiagonal(element: str, n: int, context: Context, rng: np.random.Generator) -> None:
    a = _random(element, rng, 3, n, n)
    a = a + _adjoint(a)
    shape = _shape(element, 3, n, n)
    real = _REAL[element]
    results = [shape, _shape(real, 3, n), _shape(real, 3, n - 1), _shape(element, 3, n - 1)]
    packed, diagonal, other, taus = _call(context, "flagos.tridiagonal", results, {"lower": True}, (shape, a))
    for given, h, d, e, tau in zip(a, _wide(packed), diagonal, other, _wide(taus), strict=True):
        q = _reflected(h, tau, 1)
        _close(element, q @ (np.diag(d) + np.diag(e, 1) + np.diag(e, -1)) @ _adjoint(q), given)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (6, 4), (4, 6), (50, 40)])
@pytest.mark.parametrize("element", _DTYPES)
def test_pivoted_qr(element: str, m: int, n: int, context: Context, rng: np.random.Generator) -> None:
    a, k = _random(element, rng, 2, m, n), min(m, n)
    order = np.zeros((2, n), np.int32)
    order[:, -1] = 1  # is to be the first
    results = [_shape(element, 2, m, n), _shape("s32", 2, n), _shape(element, 2, k)]
    packed, found, taus = _call(context, "flagos.geqp3", results, {}, (results[0], a), (results[1], order))
    assert (found[:, 0] == n).all()
    for given, r, columns, tau in zip(_wide(a), _wide(packed), found - 1, _wide(taus), strict=True):
        _close(element, _reflected(r, tau, 0) @ np.triu(r), given[:, columns])
        magnitudes = np.abs(np.diagonal(r))[1:]
        assert (magnitudes[1:] <= magnitudes[:-1] * (1 + 1e-5)).all()


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("element", _DTYPES)
def test_reflectors_applied(
    element: str, left: bool, transpose: bool, context: Context, rng: np.random.Generator
) -> None:
    order, k, other = 7, 5, 4
    a = _random(element, rng, 2, order, k)
    shape, short = _shape(element, 2, order, k), _shape(element, 2, k)
    packed, taus = (np.stack(x) for x in zip(*(_geqrf(matrix) for matrix in a), strict=True))
    c = _random(element, rng, 2, *((order, other) if left else (other, order)))
    whole = _shape(element, *c.shape)
    config = {"left": left, "transpose": transpose}
    (actual,) = _call(context, "flagos.ormqr", [whole], config, (shape, packed), (short, taus), (whole, c))
    for r, tau, given, product in zip(_wide(packed), _wide(taus), c, actual, strict=True):
        q = _reflected(r, tau, 0)
        q = _adjoint(q) if transpose else q
        _close(element, product, q @ given if left else given @ q)


def _geqrf(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    h, tau = np.linalg.qr(a, mode="raw")
    return np.ascontiguousarray(h.T), tau


@pytest.mark.parametrize("target", ["eigh", "svd", "eig", "schur"])
@pytest.mark.parametrize("element", _DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_gives_nan_to_its_own_matrix(
    target: str, element: str, bad: float, context: Context, rng: np.random.Generator
) -> None:
    a = _random(element, rng, 3, 4, 4)
    matrix, real = _shape(element, *a.shape), _shape(_REAL[element], 3, 4)
    results = {
        "eigh": [matrix, real],
        "svd": [real, matrix, matrix],
        "eig": [_shape(_COMPLEX[element], 3, 4)],
        "schur": [matrix, matrix],
    }[target]
    clean = _call(context, f"flagos.{target}", results, {}, (matrix, a))
    a[1, 2, 1] = bad
    for before, after in zip(clean, _call(context, f"flagos.{target}", results, {}, (matrix, a)), strict=True):
        np.testing.assert_array_equal(after[::2], before[::2])
        assert np.isnan(after[1]).all()
