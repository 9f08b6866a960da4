"""Loops whose tiles are boxes: elements of every width that change places, with and without operations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import run_function
from plugin_abi.host import Context

_DTYPES = [np.bool_, np.int8, np.int16, ml_dtypes.bfloat16, np.float32, np.int64, np.complex64]
# Both larger and smaller than the squares of vectors, and no multiples of them; sides of one element.
_DIMS = [(1024, 96), (70, 133), (3, 1000), (1000, 3), (2, 1001), (1001, 4), (5, 7, 19), (2, 65, 64), (17, 1, 40)]
_DIMS += [(2, 3, 16, 33), (0, 4)]


def _run(context: Context, function: Callable[..., Any], *arguments: np.ndarray) -> list[np.ndarray]:
    with jax.enable_x64(True):
        results, text = run_function(context, function, *arguments)
    assert "runs as native tiles with 0 library calls" in text
    return results


def _random(rng: np.random.Generator, dims: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.integers(-100, 100, dims).astype(dtype)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("dims", _DIMS, ids=str)
def test_every_permutation(dims: tuple[int, ...], dtype: Any, context: Context, rng: np.random.Generator) -> None:
    x = _random(rng, dims, dtype)
    orders = list(permutations(range(len(dims))))
    results = _run(context, lambda x: [jnp.transpose(x, order) for order in orders], x)
    for order, result in zip(orders, results, strict=True):
        np.testing.assert_array_equal(result, np.transpose(x, order))


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.float32, np.float64])
@pytest.mark.parametrize("dims", [d for d in _DIMS if 0 not in d], ids=str)
def test_operations_on_what_changes_places(
    dims: tuple[int, ...], dtype: Any, context: Context, rng: np.random.Generator
) -> None:
    """Beside what does not, a row, a column and positions; one result is what was loaded."""
    x, y, row = (_random(rng, d, dtype) for d in (dims, dims[::-1], dims[:1]))

    def function(x: Any, y: Any, row: Any, np: Any = jnp) -> Any:
        transposed = x.T
        positions = np.arange(y.shape[0], dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        return (
            transposed * y + row - y[..., :1] + positions,
            transposed,
            np.where(transposed > y, x.dtype.type(1), transposed),
        )

    for result, expected in zip(_run(context, function, x, y, row), function(x, y, row, np), strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("dims", [(40, 1030), (300, 34), (65, 6, 4), (1, 9), (2, 2)], ids=str)
def test_other_steps_through_memory(
    dims: tuple[int, ...], dtype: Any, context: Context, rng: np.random.Generator
) -> None:
    """Backwards, in strides, interleaved, shifted, repeated."""
    x, y = (_random(rng, dims, dtype) for _ in range(2))

    def function(x: Any, y: Any, np: Any = jnp) -> Any:
        return (
            *(x[..., ::-1], x[::-1], x[::-1, ..., ::-1], x.T[::-1]),
            *(x[..., ::2], x[..., 1::3], x[..., 3::4], x[..., -1:0:-5][..., ::-1], x[::2, ..., 1::2].T),
            np.stack([x, y], -1),
            np.stack([x.T, y.T], 0),
            np.roll(x, 3, -1),
            np.tile(x, 3),
            np.repeat(x, 4, 0),
            np.broadcast_to(x[..., None], (*x.shape, 5)),
            np.concatenate([x, x[..., :1], y], -1),
        )

    for result, expected in zip(_run(context, function, x, y), function(x, y, np), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_rotation_of_short_rows(context: Context, rng: np.random.Generator) -> None:
    """As of positions in attention: interleaved halves of rows of 32."""
    x, c, s = (rng.integers(-9, 9, dims).astype(np.float32) for dims in ((3, 50, 4, 64), (50, 1, 32), (50, 1, 32)))

    def function(x: Any, c: Any, s: Any, np: Any = jnp) -> Any:
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)

    (result,) = _run(context, function, x, c, s)
    np.testing.assert_array_equal(result, function(x, c, s, np))


@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("dims", [(0,), (1,), (15,), (5000,), (3, 1100), (70, 9, 8)], ids=str)
def test_interleaved_arrays(
    dims: tuple[int, ...], count: int, dtype: Any, context: Context, rng: np.random.Generator
) -> None:
    """As coordinates of points; one of them is not computed with, one result stands as it is, and one is a number."""
    x, y = (_random(rng, (*dims, count), dtype) for _ in range(2))

    def function(x: Any, y: Any, np: Any = jnp) -> Any:
        parts, others = (np.split(array, count, -1) for array in (x, y))
        rotated = [a * b - parts[k - 1] for k, (a, b) in enumerate(zip(parts, others, strict=True))]
        number = np.full_like(parts[0], 7)
        return (
            np.concatenate(rotated, -1),
            np.concatenate([parts[1], *rotated[1:]], -1),
            np.concatenate([*rotated[:-1], number], -1),
            np.concatenate([rotated[1], *rotated[1:]], -1),
            sum(parts[1:]) + others[0],
            np.moveaxis(np.stack([part[..., 0] for part in rotated]), 0, -1),
        )

    for result, expected in zip(_run(context, function, x, y), function(x, y, np), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_interleaved_nans(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3000, 2)).astype(np.float32)
    x[rng.integers(3000, size=900), rng.integers(2, size=900)] = rng.choice([np.nan, np.inf, -np.inf, -0.0], 900)

    def function(x: Any, np: Any = jnp) -> Any:
        return np.stack([x[:, 1] - x[:, 0], x[:, 0] + x[:, 1]], -1)

    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(*_run(context, function, x), function(x, np))


def test_written_over_an_argument(context: Context, rng: np.random.Generator) -> None:
    """Each iteration of a loop reads its array as it stands and transposed."""
    x = rng.integers(-3, 3, (75, 75)).astype(np.int32)

    def function(x: Any) -> Any:
        return jax.lax.fori_loop(0, 5, lambda i, x: (x * 3 + x.T + i) % 1000, x)

    expected = x
    for iteration in range(5):
        expected = (expected * 3 + expected.T + iteration) % 1000
    (result,) = _run(context, function, x)
    np.testing.assert_array_equal(result, expected)
