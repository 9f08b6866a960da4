"""Sums of products along rows, of which no tile is filled, against float64 in NumPy: with what else reads the products
or their factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu.native.harness import run_function
from plugin_abi.host import Context

_PROGRAMS: dict[str, Callable[..., Any]] = {
    "a norm": lambda x, y, np: np.sqrt((x * x).sum(1)),
    "products of two": lambda x, y, np: (x * y).sum(1),
    "from a number": lambda x, y, np: 3 + (x * y).sum(1),
    "products that are stored": lambda x, y, np: (x * y, (x * y).sum(1)),
    "products that others read": lambda x, y, np: ((x * y).sum(1), (x * y + 1).max(1)),
    "products that are reduced twice": lambda x, y, np: ((x * y).sum(1), (x * y).max(1)),
    "products of products": lambda x, y, np: ((x * y * x).sum(1), (x * y).sum(1)),
    "products before theirs": lambda x, y, np: ((x * y).sum(1), (x * y * x).sum(1)),
    "products of three": lambda x, y, np: ((x * y * x * y).sum(1), (x * y * x).sum(1), (x * y).sum(1)),
    "squares of squares": lambda x, y, np: ((x * x * (x * x)).sum(1), (x * x).sum(1)),
    "several sums": lambda x, y, np: ((x * y).sum(1), (x * x).sum(1), (y * y).sum(1), x.sum(1)),
    "factors that are computed": lambda x, y, np: ((x + y) * (x - y)).sum(1) + ((x + y) * 2 + 1).sum(1),
    "by a number": lambda x, y, np: (x * np.float32(0.1)).sum(1),
    "by a number of the row": lambda x, y, np: (x * y[:, :1]).sum(1),
    "by a row of numbers": lambda x, y, np: (x * y[:1]).sum(1),
    "what the sum is used for": lambda x, y, np: x / np.sqrt((x * x).sum(1, keepdims=True) + 1) * y,
    "a variance": lambda x, y, np: ((x - x.mean(1, keepdims=True)) ** 2).mean(1),
    "products of 16-bit floats": lambda x, y, np: (
        (x.astype(np.float16) * y.astype(np.float16)).astype(np.float32).sum(1)
    ),
}


def _run(context: Context, function: Callable[..., Any], *arguments: np.ndarray) -> list[np.ndarray]:
    results, text = run_function(context, function, *arguments)
    assert "with 0 library calls" in text
    return results


@pytest.mark.parametrize("shape", [(40, 129), (300, 1024), (20, 5003), (2, 70_000)], ids=str)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_sums_of_products(name: str, shape: tuple[int, int], context: Context, rng: np.random.Generator) -> None:
    x, y = (rng.uniform(0.5, 2, shape).astype(np.float16).astype(np.float32) for _ in range(2))
    function = _PROGRAMS[name]
    ours = _run(context, lambda x, y: function(x, y, jnp), x, y)
    wide = (x, y) if name == "products of 16-bit floats" else (x.astype(np.float64), y.astype(np.float64))
    for result, expected in zip(ours, jax.tree.leaves(function(*wide, np)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-6)


def _gradient_of_norm(x: Any, y: Any, gain: Any, np: Any) -> Any:
    """Of a layer norm over the last two dimensions: the product with the gain is in both sums and in the result."""

    def mean(a: Any) -> Any:
        return a.mean((1, 2), keepdims=True)

    centered, gained = x - mean(x), y * gain
    scale = 1 / np.sqrt(mean(centered * centered) + 1e-5)
    normal = centered * scale
    return (gained - mean(gained) - normal * mean(gained * normal)) * scale


@pytest.mark.parametrize("shape", [(5, 11, 21), (40, 3, 700)], ids=str)
def test_products_that_are_kept_for_the_row(shape: tuple[int, ...], context: Context, rng: np.random.Generator) -> None:
    """And read in a later walk of it."""
    x, y, gain = (rng.standard_normal(dims).astype(np.float32) for dims in (shape, shape, shape[1:]))
    (ours,) = _run(context, lambda *arrays: _gradient_of_norm(*arrays, jnp), x, y, gain)
    expected = _gradient_of_norm(*(a.astype(np.float64) for a in (x, y, gain)), np)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_special_values(context: Context, rng: np.random.Generator) -> None:
    """Infinite sums, sums that are no numbers, and products beyond the greatest float, wherever they stand."""
    x, y = (rng.standard_normal((200, 900)).astype(np.float32) for _ in range(2))
    for row, (a, b) in enumerate([(np.inf, 1), (-np.inf, 1), (np.inf, 0), (np.nan, 0), (3e38, 10), (-3e38, 10)] * 30):
        column = rng.integers(900)
        x[row, column], y[row, column] = a, b
    (ours,) = _run(context, lambda x, y: (x * y).sum(1), x, y)
    with np.errstate(all="ignore"):
        expected = (x * y).astype(np.float64).sum(1).astype(np.float32)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 500), (5, 0)], ids=str)
def test_sums_of_nothing(shape: tuple[int, int], context: Context) -> None:
    x = np.zeros(shape, np.float32)
    (ours,) = _run(context, lambda x, y: (x * y).sum(1), x, x)
    np.testing.assert_array_equal(ours, np.zeros(shape[0], np.float32))


def test_sums_of_no_columns_of_few(context: Context) -> None:
    """Dots with a batch of one column and nothing to add up, among other operations."""
    x, y = np.zeros((0, 1, 1), np.float32), np.zeros((0, 1), np.float32)

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        dot = jax.lax.dot_general(x, y, (((0,), (0,)), ((2,), (1,))))
        return dot * 2 + dot

    (result,) = _run(context, function, x, y)
    assert result.shape == (1, 1) and result == 0
