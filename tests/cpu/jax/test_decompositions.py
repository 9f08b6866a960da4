"""Dense decompositions and sparse products on flagos, judged by what defines them and by NumPy and SciPy's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax.experimental import sparse
from jax.experimental.sparse import linalg as sparse_linalg

DTYPES = ["float32", "float64", "complex64", "complex128"]
SHAPES = [(3, 3), (2, 5, 5), (1, 1), (0, 4, 4)]


@pytest.fixture(params=DTYPES)
def matrices(request: pytest.FixtureRequest, rng: np.random.Generator) -> Callable[..., np.ndarray]:
    """Random matrices of one element type, with x64 on."""
    dtype = np.dtype(request.param)

    def make(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.kind == "c" else 0)
        return np.asarray(values).astype(dtype)

    return make


def close(a: Any, b: Any) -> None:
    a, b = np.asarray(a), np.asarray(b)
    tolerance = 3e-4 if np.float32 in (a.real.dtype, b.real.dtype) else 1e-10
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, np.abs(b).max(initial=0.0)))


def adjoint(a: Any) -> Any:
    return np.asarray(a).conj().swapaxes(-1, -2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lower", [True, False])
def test_eigh(matrices: Callable[..., np.ndarray], shape: tuple[int, ...], lower: bool) -> None:
    a = matrices(*shape)
    hermitian = a + adjoint(a)
    triangle = np.tril(hermitian) if lower else np.triu(hermitian)
    with jax.enable_x64(True):
        v, w = jax.jit(lambda a: jax.lax.linalg.eigh(a, lower=lower, symmetrize_input=False))(triangle)
        close(np.asarray(w), np.linalg.eigvalsh(hermitian))
        close(np.asarray(v) * np.asarray(w)[..., None, :] @ adjoint(v), hermitian)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eig(matrices: Callable[..., np.ndarray], shape: tuple[int, ...]) -> None:
    a = matrices(*shape)
    with jax.enable_x64(True):
        w, vl, vr = jax.jit(lambda a: jax.lax.linalg.eig(a))(a)
        w, vl, vr = (np.asarray(x) for x in (w, vl, vr))
    close(a @ vr, vr * w[..., None, :])
    close(adjoint(vl) @ a, w[..., :, None] * adjoint(vl))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_schur(matrices: Callable[..., np.ndarray], shape: tuple[int, ...]) -> None:
    a = matrices(*shape)
    with jax.enable_x64(True):
        t, z = map(np.asarray, jax.jit(jax.lax.linalg.schur)(a))
    close(z @ t @ adjoint(z), a)
    close(z @ adjoint(z), np.broadcast_to(np.eye(shape[-1]), a.shape))
    close(np.tril(t, -2), np.zeros_like(t))


@pytest.mark.parametrize("shape", [(3, 3), (2, 5, 3), (2, 3, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("mode", ["reduced", "complete"])
def test_qr(matrices: Callable[..., np.ndarray], shape: tuple[int, ...], mode: str) -> None:
    a = matrices(*shape)
    with jax.enable_x64(True):
        q, r = map(np.asarray, jax.jit(lambda a: jnp.linalg.qr(a, mode=mode))(a))
    close(q @ r, a)
    close(adjoint(q) @ q, np.broadcast_to(np.eye(q.shape[-1]), (*shape[:-2], q.shape[-1], q.shape[-1])))
    close(np.tril(r, -1), np.zeros_like(r))


def test_pivoted_qr(matrices: Callable[..., np.ndarray]) -> None:
    a = matrices(5, 4)
    with jax.enable_x64(True):
        q, r, p = map(np.asarray, jax.jit(lambda a: jsl.qr(a, pivoting=True, mode="economic"))(a))
    close(q @ r, a[:, p])
    magnitudes = np.abs(np.diagonal(r))
    assert np.all(magnitudes[:-1] >= magnitudes[1:] * (1 - 1e-5))


@pytest.mark.parametrize("left", [True, False])
def test_qr_multiply(matrices: Callable[..., np.ndarray], left: bool) -> None:
    a, c = matrices(4, 4), matrices(4, 4)
    with jax.enable_x64(True):
        (product, r), q = (
            jax.jit(lambda a, c: jsl.qr_multiply(a, c, mode="left" if left else "right"))(a, c),
            np.asarray(jax.jit(jnp.linalg.qr)(a)[0]),
        )
    close(product, q @ c if left else c @ q)
    close(np.tril(np.asarray(r), -1), np.zeros((4, 4)))


@pytest.mark.parametrize("shape", [(3, 3), (2, 5, 3), (2, 3, 5), (0, 3, 3)], ids=str)
def test_lu(matrices: Callable[..., np.ndarray], shape: tuple[int, ...]) -> None:
    a = matrices(*shape)
    with jax.enable_x64(True):
        lu, pivots, permutation = map(np.asarray, jax.jit(jax.lax.linalg.lu)(a))
        swapped = np.asarray(jax.jit(lambda p: jax.lax.linalg.lu_pivots_to_permutation(p, shape[-2]))(pivots))
    k = min(shape[-2:])
    lower = np.tril(lu[..., :, :k], -1) + np.eye(shape[-2], k)
    close(lower @ np.triu(lu[..., :k, :]), np.take_along_axis(a, permutation[..., None], -2))
    np.testing.assert_array_equal(swapped, permutation)


@pytest.mark.parametrize("shape", [(3, 3), (2, 5, 3), (2, 3, 5), (0, 3), (3, 0), (0, 2, 2)], ids=str)
@pytest.mark.parametrize("full", [True, False])
def test_svd(matrices: Callable[..., np.ndarray], shape: tuple[int, ...], full: bool) -> None:
    a = matrices(*shape)
    with jax.enable_x64(True):
        u, s, vh = map(np.asarray, jax.jit(lambda a: jnp.linalg.svd(a, full_matrices=full))(a))
        alone = np.asarray(jax.jit(lambda a: jnp.linalg.svd(a, compute_uv=False))(a))
    k = min(shape[-2:])
    close(u[..., :k] * s[..., None, :] @ vh[..., :k, :], a)
    close(s, np.linalg.svd(a, compute_uv=False) if a.size else s)
    close(alone, s)


def test_hessenberg(matrices: Callable[..., np.ndarray]) -> None:
    a = matrices(5, 5)
    with jax.enable_x64(True):
        h, q = map(np.asarray, jax.jit(lambda a: jsl.hessenberg(a, calc_q=True))(a))
    close(q @ h @ adjoint(q), a)
    close(np.tril(h, -2), np.zeros_like(h))


@pytest.mark.parametrize("lower", [True, False])
def test_tridiagonal(matrices: Callable[..., np.ndarray], lower: bool) -> None:
    a = matrices(5, 5)
    hermitian = a + adjoint(a)
    with jax.enable_x64(True):
        _, d, e, _ = map(np.asarray, jax.jit(lambda a: jax.lax.linalg.tridiagonal(a, lower=lower))(hermitian))
    close(np.linalg.eigvalsh(np.diag(d) + np.diag(e, 1) + np.diag(e, -1)), np.linalg.eigvalsh(hermitian))


def test_functions_built_on_decompositions(agree: Callable[..., Any], rng: np.random.Generator) -> None:
    a = rng.standard_normal((4, 4)).astype(np.float32) + 4 * np.eye(4, dtype=np.float32)
    b = rng.standard_normal((4, 2)).astype(np.float32)
    agree(
        lambda a, b: (
            jnp.linalg.solve(a, b),
            jnp.linalg.inv(a),
            jnp.linalg.det(a),
            jnp.linalg.slogdet(a),
            jnp.linalg.pinv(a),
            jnp.linalg.norm(a, 2),
            jnp.linalg.cond(a),
            jnp.linalg.matrix_rank(a),
            jsl.expm(a * 0.1),
            jnp.linalg.cholesky(a @ a.T),
        ),
        a,
        b,
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize("function", [jnp.linalg.eigvalsh, jnp.linalg.det, lambda a: jnp.linalg.svd(a)[1]])
def test_gradients(agree: Callable[..., Any], rng: np.random.Generator, function: Callable[..., Any]) -> None:
    root = rng.standard_normal((4, 4)).astype(np.float32)
    a = root @ root.T + np.diag(np.arange(4, dtype=np.float32) * 3)
    agree(jax.grad(lambda a: function(a).sum()), a, rtol=1e-3, atol=1e-2)


def test_a_matrix_with_nan_gives_nan_and_its_neighbours_their_own(device: jax.Device) -> None:
    a = np.stack([np.eye(3, dtype=np.float32), np.full((3, 3), np.nan, np.float32)])
    w = np.asarray(jax.jit(jnp.linalg.eigvalsh)(a))
    np.testing.assert_allclose(w[0], 1)
    assert np.isnan(w[1]).all()


def tridiagonal(dl: np.ndarray, d: np.ndarray, du: np.ndarray) -> np.ndarray:
    """[..., m, m] from diagonals [..., m], of which dl[..., 0] and du[..., -1] lie outside."""
    m = d.shape[-1]
    below, above = np.eye(m, k=-1), np.eye(m, k=1)
    return dl[..., None] * below + d[..., None] * np.eye(m) + du[..., None] * above


def backward_error(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    """By how much, relative to its norm, a system would have to differ for x to be its solution, however ill
    conditioned it is: a random one may be nearly singular, and its x as large as that makes it."""
    wide = np.clongdouble if np.iscomplexobj(a) else np.longdouble
    a, x, b = (array.astype(wide) for array in (a, x, b))
    residual, size, right = (np.abs(array).max((-2, -1), initial=0) for array in (a @ x - b, x, b))
    scale = np.abs(a).sum(-1).max(-1, initial=0) * size + right
    return float((residual / np.where(scale, scale, 1)).max(initial=0))


@pytest.mark.parametrize("shape", [(7,), (3, 6), (2, 1), (0, 4), (2, 0)], ids=str)
@pytest.mark.parametrize("perturb", [False, True])
def test_tridiagonal_solve(matrices: Callable[..., np.ndarray], shape: tuple[int, ...], perturb: bool) -> None:
    """A first pivot of zero included, and others that are small beside what lies below them."""
    dl, d, du = (matrices(*shape) for _ in range(3))
    if shape[-1] > 1:
        d[..., 0], d[..., 2] = 0, 1e-6
        dl[..., 0], du[..., -1] = np.nan, np.nan  # outside of the matrix
    b = matrices(*shape, 2)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = jax.jit(lambda *a: jax.lax.linalg.tridiagonal_solve(*a, perturb_singular=perturb))(dl, d, du, b)
    if shape[-1] > 1:
        dl[..., 0], du[..., -1] = 0, 0
    assert backward_error(tridiagonal(dl, d, du), np.asarray(x), b) <= 8 * np.finfo(d.dtype).eps


def test_singular_tridiagonal_systems(matrices: Callable[..., np.ndarray]) -> None:
    """NaN for the singular one of a batch; perturbed, a large multiple of its null vector."""
    b = matrices(2, 3, 1)
    rows = ([[0, 1, 1]] * 2, [[1, 2, 1], [3, 3, 3]], [[1, 1, 0]] * 2)
    dl, d, du = (np.array(row, b.dtype) for row in rows)
    with jax.enable_x64(True):
        plain, perturbed = (
            np.asarray(jax.lax.linalg.tridiagonal_solve(*map(jnp.asarray, (dl, d, du, b)), perturb_singular=p))
            for p in (False, True)
        )
    assert np.isnan(plain[0]).all()
    close(tridiagonal(dl, d, du)[1] @ plain[1], b[1])
    null = perturbed[0, :, 0] / perturbed[0, 0, 0]
    assert np.abs(perturbed[0]).min() > 1e3
    close(null, np.array([1, -1, 1]).astype(null.dtype))


def test_eigenvectors_of_a_tridiagonal_matrix(rng: np.random.Generator) -> None:
    d, e = rng.standard_normal(12), rng.standard_normal(11)
    with jax.enable_x64(True):
        w, v = map(np.asarray, jsl.eigh_tridiagonal(d, e, eigvals_only=False))
    matrix = np.diag(d) + np.diag(e, 1) + np.diag(e, -1)
    close(matrix @ v, v * w)
    close(v.T @ v, np.eye(12))


# ---- Sparse matrices -----------------------------------------------------------------------------------------------


@pytest.fixture
def dense(rng: np.random.Generator) -> np.ndarray:
    return (rng.standard_normal((5, 4)) * (rng.random((5, 4)) < 0.5)).astype(np.float32)


@pytest.mark.parametrize("form", [sparse.CSR, sparse.COO, sparse.BCOO, sparse.BCSR])
@pytest.mark.parametrize("columns", [None, 3])
def test_sparse_product(rng: np.random.Generator, dense: np.ndarray, form: Any, columns: int | None) -> None:
    x = rng.standard_normal((4,) if columns is None else (4, columns)).astype(np.float32)
    matrix = form.fromdense(jnp.asarray(dense))
    np.testing.assert_allclose(np.asarray(jax.jit(lambda m, x: m @ x)(matrix, x)), dense @ x, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(matrix.todense()), dense)


def test_sparse_solve_and_its_gradient(rng: np.random.Generator) -> None:
    a = (rng.standard_normal((4, 4)) + 4 * np.eye(4)).astype(np.float32)
    b = rng.standard_normal(4).astype(np.float32)
    csr = sparse.BCSR.fromdense(jnp.asarray(a))
    solve = jax.jit(lambda data, b: sparse_linalg.spsolve(data, csr.indices, csr.indptr, b))
    np.testing.assert_allclose(np.asarray(solve(csr.data, b)), np.linalg.solve(a, b), rtol=1e-4, atol=1e-4)
    gradient = jax.grad(lambda b: solve(csr.data, b).sum())(jnp.asarray(b))
    np.testing.assert_allclose(np.asarray(gradient), np.linalg.solve(a.T, np.ones(4)), rtol=1e-3, atol=1e-3)


def test_scaled_matmul(rng: np.random.Generator) -> None:
    a, b = (jnp.asarray(rng.standard_normal((1, 4, 64)), jnp.float8_e4m3fn) for _ in range(2))
    scales = [jnp.asarray(2.0 ** rng.integers(-3, 4, (1, 4, 2)), jnp.float8_e8m0fnu) for _ in range(2)]
    from jax._src.cudnn.scaled_matmul_stablehlo import _scaled_matmul_p

    (ours,) = jax.jit(lambda *args: _scaled_matmul_p.bind(*args, preferred_element_type=jnp.float32))(a, b, *scales)
    wide = [
        np.asarray(x, np.float32) * np.repeat(np.asarray(s, np.float32), 32, -1)
        for x, s in zip((a, b), scales, strict=True)
    ]
    np.testing.assert_allclose(np.asarray(ours), wide[0] @ wide[1].swapaxes(-1, -2), rtol=1e-5, atol=1e-5)
