"""Tridiagonal systems by LU with partial pivoting: the default of JAX does not pivot, and does not perturb."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.lowering.rule import LoweringRule

# A row of U on its diagonal, one and two places right of it, and its right-hand sides.
_Row = tuple[Any, ...]


def _factorize(dl: Any, d: Any, du: Any, b: Any) -> _Row:
    """U and the right-hand sides that belong to it, of ``dl``, ``d``, ``du`` [m] and ``b`` [m, k]."""

    def eliminate(row: _Row, below: _Row) -> tuple[_Row, _Row]:
        pivot, right, rhs = row
        lower, pivot_below, right_below, rhs_below = below
        zero = jnp.zeros_like(pivot)
        pairs = ((pivot, lower), (right, pivot_below), (zero, right_below), (rhs, rhs_below))
        swap = jnp.abs(lower) > jnp.abs(pivot)
        u = tuple(jnp.where(swap, second, first) for first, second in pairs)
        rest = tuple(jnp.where(swap, first, second) for first, second in pairs)
        factor = jnp.where(rest[0] == 0, zero, rest[0] / u[0])
        return (rest[1] - factor * u[1], rest[2] - factor * u[2], rest[3] - factor * u[3]), u

    rows = (dl[1:], d[1:], du[1:], b[1:])
    (pivot, _, rhs), u = lax.scan(eliminate, (d[0], du[0], b[0]), rows)
    zero = jnp.zeros_like(pivot)
    return tuple(jnp.concatenate((x, last[None])) for x, last in zip(u, (pivot, zero, zero, rhs), strict=True))


def _perturbed(u: _Row) -> _Row:
    """No pivot smaller than the machine's precision times the largest number of U."""
    precision = np.finfo(u[0].dtype).eps
    largest = jnp.max(jnp.stack([jnp.abs(x) for x in u[:3]]))
    least = precision * jnp.where(largest > 0, largest, 1)
    direction = jnp.where(u[0] == 0, 1, jnp.sign(u[0]))
    return (jnp.where(jnp.abs(u[0]) < least, direction * least.astype(u[0].dtype), u[0]), *u[1:])


def _solve(dl: Any, d: Any, du: Any, b: Any, *, perturb_singular: bool) -> Any:
    u = _factorize(dl, d, du.at[-1].set(0), b)
    if perturb_singular:
        u = _perturbed(u)

    def substitute(known: tuple[Any, Any], row: _Row) -> tuple[tuple[Any, Any], Any]:
        pivot, right, second, rhs = row
        x = (rhs - right * known[0] - second * known[1]) / pivot
        return (x, known[0]), x

    zeros = jnp.zeros_like(b[0])
    _, x = lax.scan(substitute, (zeros, zeros), u, reverse=True)
    return x if perturb_singular else jnp.where(jnp.any(u[0] == 0), jnp.nan, x)


def _tridiagonal_solve(dl: Any, d: Any, du: Any, b: Any, *, perturb_singular: bool = False) -> tuple[Any]:
    """[..., m] diagonals and [..., m, k] right-hand sides to [..., m, k]; NaN where a matrix is singular."""
    if d.shape[-1] == 0:
        return (b,)

    def solve(*operands: Any) -> Any:
        return _solve(*operands, perturb_singular=perturb_singular)

    for _ in range(d.ndim - 1):
        solve = jax.vmap(solve)
    return (solve(dl, d, du, b),)


def _rule(ctx: Any, *operands: Any, perturb_singular: bool = False) -> Any:
    return jax_internals.lower_function(_tridiagonal_solve)(ctx, *operands, perturb_singular=perturb_singular)


RULES: Final = (LoweringRule("jax._src.lax.linalg", "tridiagonal_solve_p", _rule),)
