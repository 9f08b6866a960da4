"""Schur decompositions of one matrix, in f64 on the host: the shifted QR iteration on a Hessenberg matrix.

Real input: Francis's double shift with LAPACK's standardised 2×2 blocks; complex input: Wilkinson's single shift.
Golub & Van Loan, Matrix Computations, 4th ed., 7.5; blocks as in LAPACK's lanv2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]

_ITERATIONS_PER_EIGENVALUE = 60
_EXCEPTIONAL_EVERY = 10
_EPSILON = float(np.finfo(np.float64).eps)
_TINY = float(np.finfo(np.float64).tiny)


class NotConverged(ArithmeticError):
    """The QR iteration found no further eigenvalue within its limit."""


def _reflect_to_first(x: Matrix) -> tuple[Matrix, complex]:
    """v, with v[0] = 1, and tau, so that (I - tau v vᴴ)ᴴ x is a multiple of e0."""
    alpha = x[0]
    norm = np.linalg.norm(x)
    v = x.copy()
    v[0] = 1
    if norm == 0 or (not x[1:].any() and np.imag(alpha) == 0):
        v[1:] = 0
        return v, 0
    beta = -np.copysign(norm, alpha.real)
    v[1:] = x[1:] / (alpha - beta)
    return v, (beta - alpha) / beta


def _rotate(h: Matrix, z: Matrix, v: Matrix, tau: complex, first: int, from_column: int, to_row: int) -> None:
    """h := Hᴴ h H and z := z H for the reflector on rows ``first`` on, where h is nonzero."""
    rows = slice(first, first + len(v))
    block = h[rows, from_column:]
    block -= np.conj(tau) * np.outer(v, v.conj() @ block)
    block = h[:to_row, rows]
    block -= tau * np.outer(block @ v, v.conj())
    z[:, rows] -= tau * np.outer(z[:, rows] @ v, v.conj())


def _to_hessenberg(a: Matrix) -> tuple[Matrix, Matrix]:
    n = len(a)
    h, z = a.copy(), np.eye(n, dtype=a.dtype)
    for i in range(n - 2):
        v, tau = _reflect_to_first(h[i + 1 :, i])
        _rotate(h, z, v, tau, i + 1, i, n)
        h[i + 2 :, i] = 0
    return h, z


def _deflate(h: Matrix, high: int) -> int:
    """The first row of the unreduced block that ends at ``high``; clears the subdiagonal element above it."""
    for low in range(high, 0, -1):
        scale = abs(h[low - 1, low - 1]) + abs(h[low, low])
        if abs(h[low, low - 1]) <= max(_EPSILON * (scale or np.linalg.norm(h)), _TINY):
            h[low, low - 1] = 0
            return low
    return 0


def schur(a: Matrix) -> tuple[Matrix, Matrix]:
    """a [n, n] f64 or c128 -> (t, z unitary) with a = z t zᴴ. Raises NotConverged.

    Complex t is upper triangular. Real t may have 2×2 blocks on its diagonal, each a conjugate pair of eigenvalues with
    equal diagonal elements and off-diagonal ones of opposite signs.
    """
    greatest = np.abs(a).max(initial=0.0)
    if greatest == 0:
        return a.copy(), np.eye(len(a), dtype=a.dtype)
    scale = 2.0 ** np.round(np.log2(greatest))  # keeps squares and products in range
    t, z = (_complex_schur if np.iscomplexobj(a) else _real_schur)(a / scale)
    return t * scale, z


def _complex_schur(a: Matrix) -> tuple[Matrix, Matrix]:
    h, z = _to_hessenberg(a)
    high, tries = len(a) - 1, 0
    while high > 0:
        low = _deflate(h, high)
        if low == high:
            high, tries = high - 1, 0
            continue
        tries += 1
        if tries > _ITERATIONS_PER_EIGENVALUE:
            raise NotConverged
        shift = _wilkinson_shift(h, high) if tries % _EXCEPTIONAL_EVERY else h[high, high] + abs(h[high, high - 1])
        column = np.array([h[low, low] - shift, h[low + 1, low]])
        for k in range(low, high):
            v, tau = _reflect_to_first(column)
            _rotate(h, z, v, tau, k, max(k - 1, low), min(k + 3, high + 1))
            if k > low:
                h[k + 1, k - 1] = 0
            if k < high - 1:
                column = h[k + 1 : k + 3, k].copy()
    return np.triu(h), z


def _wilkinson_shift(h: Matrix, high: int) -> complex:
    """The eigenvalue of the last 2×2 block that is nearer its last element."""
    a, b, c, d = h[high - 1, high - 1], h[high - 1, high], h[high, high - 1], h[high, high]
    half = (a - d) / 2
    root = np.sqrt(half * half + b * c)
    return complex(d + half - root if abs(half - root) < abs(half + root) else d + half + root)


def _real_schur(a: Matrix) -> tuple[Matrix, Matrix]:
    h, z = _to_hessenberg(a)
    n = len(a)
    high, tries = n - 1, 0
    while high > 0:
        low = _deflate(h, high)
        if low == high:
            high, tries = high - 1, 0
        elif low == high - 1:
            _standardise(h, z, low)
            high, tries = high - 2, 0
        else:
            tries += 1
            if tries > _ITERATIONS_PER_EIGENVALUE:
                raise NotConverged
            _francis_step(h, z, low, high, exceptional=tries % _EXCEPTIONAL_EVERY == 0)
    keep = np.triu(np.ones((n, n), dtype=bool), -1)
    return np.where(keep, h, 0), z


def _francis_step(h: Matrix, z: Matrix, low: int, high: int, exceptional: bool) -> None:
    """One implicit double-shift sweep over the unreduced block low..high (at least 3×3)."""
    if exceptional:
        scale = abs(h[high, high - 1]) + abs(h[high - 1, high - 2])
        trace, determinant = 1.5 * scale + 2 * h[high, high], (h[high, high] + 0.75 * scale) ** 2
    else:
        trace = h[high - 1, high - 1] + h[high, high]
        determinant = h[high - 1, high - 1] * h[high, high] - h[high - 1, high] * h[high, high - 1]
    column = np.array(
        [
            h[low, low] * (h[low, low] - trace) + h[low, low + 1] * h[low + 1, low] + determinant,
            h[low + 1, low] * (h[low, low] + h[low + 1, low + 1] - trace),
            h[low + 1, low] * h[low + 2, low + 1],
        ]
    )
    for k in range(low, high):
        v, tau = _reflect_to_first(column)
        _rotate(h, z, v, tau, k, max(k - 1, low), min(k + 4, high + 1))
        if k > low:
            h[k + 1 : k + len(v), k - 1] = 0
        column = h[k + 1 : min(k + 4, high + 1), k].copy()


def _standardise(h: Matrix, z: Matrix, first: int) -> None:
    """Turns the 2×2 block at ``first`` triangular (real eigenvalues) or into equal diagonal elements (a pair)."""
    a, b, c, d = h[first, first], h[first, first + 1], h[first + 1, first], h[first + 1, first + 1]
    half = (a - d) / 2
    discriminant = half * half + b * c
    if half == 0 and discriminant < 0:
        return
    if discriminant >= 0:
        eigen = half + np.copysign(np.sqrt(discriminant), half)  # an eigenvalue, less d, without cancellation
        cosine, sine = _unit(eigen, c)
    else:
        # The angle that makes both diagonal elements the mean: tan 2θ = (d - a) / (b + c), here by half angles.
        sigma = b + c
        tau = np.hypot(sigma, a - d)
        cosine = np.sqrt((1 + abs(sigma) / tau) / 2)
        sine = -half / (tau * cosine) * np.copysign(1.0, sigma)
    rotation = np.array([[cosine, -sine], [sine, cosine]])
    rows = slice(first, first + 2)
    h[rows, first:] = rotation.T @ h[rows, first:]
    h[: first + 2, rows] = h[: first + 2, rows] @ rotation
    z[:, rows] = z[:, rows] @ rotation
    if discriminant >= 0:
        h[first + 1, first] = 0
    else:
        mean = (h[first, first] + h[first + 1, first + 1]) / 2
        h[first, first] = h[first + 1, first + 1] = mean


def _unit(x: float, y: float) -> tuple[float, float]:
    length = np.hypot(x, y)
    return (1.0, 0.0) if length == 0 else (x / length, y / length)
