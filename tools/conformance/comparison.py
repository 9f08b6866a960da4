"""Compares a platform's results with JAX's CPU: by tolerance, or by what a decomposition must satisfy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# Relative to the magnitude of the reference; float32 and wider as XLA backends themselves differ.
_TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
_LOOSE = {  # primitives whose reference is itself an iteration or an approximation
    "random_gamma": 50.0,
    "igamma": 20.0,
    "igammac": 20.0,
    "regularized_incomplete_beta": 20.0,
    "digamma": 10.0,
    "lgamma": 10.0,
    "erf_inv": 10.0,
    "custom_linear_solve": 50.0,
    "tridiagonal_solve": 50.0,
    "triangular_solve": 50.0,
    "cholesky": 50.0,
    "lu": 50.0,
    "fft": 10.0,
    "integer_pow": 10.0,
    "cumlogsumexp": 10.0,
    "tan": 10.0,
}


def compare(
    group: str,
    arguments: Sequence[Any],
    ours: Any,
    theirs: Any,
    parameters: Mapping[str, Any],
    *,
    tensor_float: bool = False,
) -> str:
    """What differs, or "" when nothing does. ``parameters``: the harness's own. ``tensor_float``: operands of
    products may be rounded from f32 to TF32, whose fraction is float16's."""
    mine, reference = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    if len(mine) != len(reference):
        return f"{len(mine)} results instead of {len(reference)}"
    mine, reference = [np.asarray(x) for x in mine], [np.asarray(x) for x in reference]
    for number, (a, b) in enumerate(zip(mine, reference, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {number} is {a.dtype}{a.shape} instead of {b.dtype}{b.shape}"
    check = _DECOMPOSITIONS.get(group)
    if check is not None and mine and mine[0].size:
        return check(arguments, mine, reference)
    if group == "sort" and not parameters["is_stable"]:
        mine, reference = _equals_in_one_order(mine, **parameters), _equals_in_one_order(reference, **parameters)
    if group == "conv_general_dilated" and mine[0].dtype.kind == "c":
        # JAX's CPU computes complex convolutions in the operands' type, also where a wider one is preferred.
        mine, reference = ([x.astype(np.asarray(arguments[0]).dtype) for x in xs] for xs in (mine, reference))
    for number, (a, b) in enumerate(zip(mine, reference, strict=True)):
        factor = _LOOSE.get(group, 1.0)
        if tensor_float and _key(a.dtype) == "float32":
            factor *= _TOLERANCE["float16"] / _TOLERANCE["float32"]
        difference = _difference(a, b, factor)
        if difference:
            return f"result {number}: {difference}"
    return ""


def _equals_in_one_order(arrays: list[np.ndarray], *, dimension: int, num_keys: int, **_: Any) -> list[np.ndarray]:
    """A sort that is not stable may leave equal keys in any order: here the other arrays decide among them."""
    keys, others = arrays[:num_keys], arrays[num_keys:]
    if not others:
        return arrays
    ranks = np.zeros(arrays[0].shape, np.int64)
    for key in keys:  # a new rank wherever a key changes along the sorted dimension
        ranks += np.cumsum(np.diff(key, axis=dimension, prepend=key.take([0], dimension)) != 0, axis=dimension)
    order = np.lexsort([*reversed(others), ranks], axis=dimension)
    return keys + [np.take_along_axis(other, order, dimension) for other in others]


def _key(dtype: np.dtype) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype.name, dtype.name)


def _difference(a: np.ndarray, b: np.ndarray, factor: float) -> str:
    if a.dtype.kind not in "fcV" and a.dtype.name not in _TOLERANCE:
        wrong = a.astype(np.int64, copy=False) != b.astype(np.int64, copy=False) if a.dtype.kind != "b" else a != b
        return _report(a, b, wrong)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    tolerance = _TOLERANCE.get(_key(a.dtype), 0.25) * factor  # 8-bit floats: one step
    with np.errstate(all="ignore"):
        tiny = 1e-37 if a.dtype.name in ("float32", "bfloat16", "complex64") else 0.0
        close = np.isclose(x, y, rtol=tolerance, atol=max(tolerance * _scale(y), tiny), equal_nan=True)
    return _report(a, b, ~close)


def _scale(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(min(finite.mean(), 1e30)) if finite.size else 1.0


def _report(a: np.ndarray, b: np.ndarray, wrong: np.ndarray) -> str:
    if not np.any(wrong):
        return ""
    where = tuple(np.argwhere(wrong)[0])
    return (
        f"{int(np.sum(wrong))} of {a.size} differ, first at {tuple(map(int, where))}: {a[where]} instead of {b[where]}"
    )


def _small(residual: np.ndarray, scale: float, dtype: np.dtype, what: str) -> str:
    bound = 200 * _TOLERANCE[_key(dtype)] * max(scale, 1.0)
    worst = float(np.max(np.abs(residual), initial=0.0))
    return "" if worst <= bound else f"{what}: residual {worst:.3g}, allowed {bound:.3g}"


def _symmetric_input(arguments: Sequence[Any]) -> np.ndarray:
    return np.asarray(next(a for a in arguments if np.ndim(a) >= 2))


def _check_eigh(arguments: Sequence[Any], ours: list[np.ndarray], theirs: list[np.ndarray]) -> str:
    values = min(ours, key=np.ndim)
    reference = min(theirs, key=np.ndim)
    return _difference(np.sort(values, -1), np.sort(reference, -1), 50.0)


def _check_eig(arguments: Sequence[Any], ours: list[np.ndarray], theirs: list[np.ndarray]) -> str:
    matrix = _symmetric_input(arguments)
    values, reference = np.sort_complex(ours[0]), np.sort_complex(theirs[0])
    if not np.all(np.isfinite(matrix)):
        return "" if np.all(np.isnan(ours[0])) == np.all(np.isnan(theirs[0])) else "NaN handling differs"
    if np.max(np.abs(np.abs(values) - np.abs(reference)), initial=0) > 1e-2 * (
        1 + np.max(np.abs(reference), initial=0)
    ):
        return "eigenvalues differ"
    for number in range(1, len(ours)):
        vectors = ours[number]
        left = theirs[number]
        right_residual = np.max(np.abs(matrix @ left - left * theirs[0][..., None, :]), initial=0)
        adjoint = matrix.conj().swapaxes(-1, -2)
        is_right = right_residual < 1e-2 * (1 + np.max(np.abs(theirs[0]), initial=0))
        a, w = (matrix, ours[0]) if is_right else (adjoint, ours[0].conj())
        problem = _small(
            a @ vectors - vectors * w[..., None, :], float(np.max(np.abs(w))), ours[0].dtype, "eigenvectors"
        )
        if problem:
            return problem
    return ""


def _check_svd(arguments: Sequence[Any], ours: list[np.ndarray], theirs: list[np.ndarray]) -> str:
    matrix = _symmetric_input(arguments)
    if len(ours) == 1:
        return _difference(ours[0], theirs[0], 50.0)
    s, u, vt = _svd_parts(ours, matrix)
    k = s.shape[-1]
    rebuilt = (u[..., :, :k] * s[..., None, :]) @ vt[..., :k, :]
    return _small(rebuilt - matrix, float(np.max(s, initial=0)), s.dtype, "u s vt")


def _svd_parts(results: list[np.ndarray], matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    s = min(results, key=np.ndim)
    rest = [r for r in results if r is not s]
    return s, rest[0], rest[1]


def _check_qr(arguments: Sequence[Any], ours: list[np.ndarray], theirs: list[np.ndarray]) -> str:
    matrix = _symmetric_input(arguments)
    q, r = ours[0], ours[1]
    scale = float(np.max(np.abs(matrix), initial=0))
    problem = _small(q @ r - matrix, scale, q.dtype, "q r")
    identity = np.eye(q.shape[-1])
    return problem or _small(q.conj().swapaxes(-1, -2) @ q - identity, 1.0, q.dtype, "q^H q")


def _check_lu(arguments: Sequence[Any], ours: list[np.ndarray], theirs: list[np.ndarray]) -> str:
    """Libraries measure complex pivots by |re| + |im|, or by their absolute values, of which the factors are at most 1
    or so by at most the square root of 2."""
    if ours[0].dtype.kind != "c":
        return next(filter(None, (_difference(a, b, _LOOSE["lu"]) for a, b in zip(ours, theirs, strict=True))), "")
    matrix = np.asarray(arguments[0])
    lu, pivots, order = ours
    rank = min(lu.shape[-2:])
    lower = np.tril(lu[..., :rank], -1) + np.eye(lu.shape[-2], rank)
    if np.max(np.abs(np.tril(lu[..., :rank], -1)), initial=0) > 1.5:
        return "a factor is larger than its pivot"
    swapped = np.broadcast_to(np.arange(lu.shape[-2]), order.shape).copy()
    for rows, swaps in zip(swapped.reshape(-1, lu.shape[-2]), pivots.reshape(-1, rank), strict=True):
        for row, other in enumerate(swaps):
            rows[[row, other]] = rows[[other, row]]
    if not np.array_equal(swapped, order):
        return "the permutation is not that of the pivots"
    chosen = np.take_along_axis(matrix, order[..., None], -2)
    return _small(lower @ np.triu(lu[..., :rank, :]) - chosen, float(np.max(np.abs(matrix))), lu.dtype, "l u")


def _check_cholesky(arguments: Sequence[Any], ours: list[np.ndarray], theirs: list[np.ndarray]) -> str:
    # The other triangle of input and result holds whatever is left there.
    lower = np.tril(ours[0])
    if not np.all(np.isfinite(np.tril(theirs[0]))):
        return _difference(lower, np.tril(theirs[0]), 50.0)
    matrix = np.tril(np.asarray(arguments[0]))
    return _small(
        np.tril(lower @ lower.conj().swapaxes(-1, -2)) - matrix, float(np.max(np.abs(matrix))), lower.dtype, "l l^H"
    )


def _check_approx_top_k(arguments: Sequence[Any], ours: list[np.ndarray], theirs: list[np.ndarray]) -> str:
    # Equal values may come from different places.
    axis = next(
        d for d in range(ours[0].ndim) if ours[0].shape[d] != np.shape(arguments[0])[d] or d == ours[0].ndim - 1
    )
    picked = np.take_along_axis(np.asarray(arguments[0]), ours[1], axis)
    return _difference(ours[0], theirs[0], 1.0) or _difference(picked, ours[0], 1.0)


_DECOMPOSITIONS: dict[str, Callable[[Sequence[Any], list[np.ndarray], list[np.ndarray]], str]] = {
    "eigh": _check_eigh,
    "eig": _check_eig,
    "approx_top_k": _check_approx_top_k,
    "cholesky": _check_cholesky,
    "svd": _check_svd,
    "qr": _check_qr,
    "lu": _check_lu,
}
