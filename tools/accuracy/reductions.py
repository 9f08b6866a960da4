"""Sums and what is made of them, against exact sums. Units are those of the sum of magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

Array = np.ndarray[Any, Any]

# Enough draws that the greatest and the mean error of two orders of summation compare.
ROWS = 64


@dataclass(frozen=True)
class Reduction:
    """``call`` takes [ROWS, n] arrays; ``exact`` a row of each as float64 and gives (value or values, their unit)."""

    name: str
    call: Callable[..., Any]
    exact: Callable[..., tuple[Any, Any]]
    arity: int = 1
    sizes: tuple[int, ...] = (3, 64, 1000, 30000)


def _exact_sum(terms: Array) -> np.longdouble:
    """To the 64 bits of a longdouble: an error of float64 results is smaller than their own unit."""
    high = math.fsum(terms)
    return np.longdouble(high) + np.longdouble(math.fsum([*terms, -high]))


def _sum(x: Array) -> tuple[Any, Any]:
    return _exact_sum(x), _exact_sum(np.abs(x))


def _mean(x: Array) -> tuple[Any, Any]:
    return _exact_sum(x) / len(x), _exact_sum(np.abs(x)) / len(x)


def _variance(x: Array) -> tuple[Any, Any]:
    wide = x.astype(np.longdouble)
    value = np.mean((wide - wide.mean()) ** 2)
    return value, value


def _log_sum_exp(x: Array) -> tuple[Any, Any]:
    wide = x.astype(np.longdouble)
    greatest = wide.max()
    value = greatest + np.log(np.sum(np.exp(wide - greatest)))
    return value, max(abs(value), abs(greatest))


def _softmax(x: Array) -> tuple[Any, Any]:
    wide = np.exp(x.astype(np.longdouble) - x.max())
    values = wide / wide.sum()
    return values, values


def _cumulative_sum(x: Array) -> tuple[Any, Any]:
    wide = x.astype(np.longdouble)
    return np.cumsum(wide), np.cumsum(np.abs(wide))


def _product(x: Array) -> tuple[Any, Any]:
    value = np.prod(x.astype(np.longdouble))
    return value, abs(value)


def _dot(x: Array, y: Array) -> tuple[Any, Any]:
    products = np.concatenate(_exact_products(x, y))
    return _exact_sum(products), _exact_sum(np.abs(products))


def _exact_products(x: Array, y: Array) -> tuple[Array, Array]:
    """Rounded products and what rounding took from them, after T. J. Dekker, Numerische Mathematik 18 (1971)."""
    (x_high, x_low), (y_high, y_low) = _halves(x), _halves(y)
    products = x * y
    return products, ((x_high * y_high - products) + x_high * y_low + x_low * y_high) + x_low * y_low


def _halves(x: Array) -> tuple[Array, Array]:
    shifted = x * 134217729.0  # 2^27 + 1
    high = shifted - (shifted - x)
    return high, x - high


def _norm(x: Array) -> tuple[Any, Any]:
    value = np.sqrt(np.sum(x.astype(np.longdouble) ** 2))
    return value, value


REDUCTIONS = (
    Reduction("sum", lambda x: jnp.sum(x, axis=1), _sum),
    Reduction("mean", lambda x: jnp.mean(x, axis=1), _mean),
    Reduction("variance", lambda x: jnp.var(x, axis=1), _variance),
    Reduction("norm", lambda x: jnp.sqrt(jnp.sum(x * x, axis=1)), _norm),
    Reduction("logsumexp", lambda x: jax.nn.logsumexp(x, axis=1), _log_sum_exp),
    Reduction("softmax", lambda x: jax.nn.softmax(x, axis=1), _softmax),
    Reduction("cumsum", lambda x: jnp.cumsum(x, axis=1), _cumulative_sum, sizes=(3, 64, 1000)),
    Reduction(
        "product", lambda x: jnp.prod(1 + x / 64, axis=1), lambda x: _product_of_near_one(x), sizes=(3, 64, 1000)
    ),
    Reduction("dot", lambda x, y: jnp.sum(lax.batch_matmul(x[:, None], y[:, :, None]), (1, 2)), _dot, arity=2),
    Reduction("matmul", lambda x, y: jnp.diagonal(x @ y.T), _dot, arity=2, sizes=(3, 64, 1000)),
)


def _product_of_near_one(x: Array) -> tuple[float, float]:
    """1 + x / 64 is rounded in the type of x, which came here as float64: values are chosen so that it is exact."""
    return _product(1 + x / 64)


def arguments(reduction: Reduction, dtype: np.dtype[Any], size: int, rng: np.random.Generator) -> tuple[Array, ...]:
    """Normal numbers; for products small multiples of an eighth, so that one plus a 64th of them is exact."""
    if reduction.name == "product":
        return ((rng.integers(-2, 3, (ROWS, size)) * (1.0 if dtype.itemsize > 2 else 2.0)).astype(dtype),)
    return tuple((rng.standard_normal((ROWS, size)) + 0.5).astype(dtype) for _ in range(reduction.arity))


def errors(reduction: Reduction, values: Array, columns: tuple[Array, ...]) -> Array:
    """Errors of a result in units in the last place of the type."""
    epsilon = float(ml_dtypes.finfo(values.dtype).eps)
    found = []
    for number, row in enumerate(values.astype(np.longdouble)):
        exact, unit = reduction.exact(*(column[number].astype(np.float64) for column in columns))
        with np.errstate(all="ignore"):
            spacing = 2.0 ** np.floor(np.log2(np.asarray(unit))) * epsilon
            found.append((np.abs(row - exact) / spacing).astype(np.float64))
    return np.concatenate([np.ravel(f) for f in found])
