"""Arrays that are put together of parts which are made of the same data: one loop stores them all. Against NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cpu.native.harness import run_function
from plugin_abi.host import Context


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("size", [1, 7, 3000])
def test_parts_of_the_same_data(size: int, axis: int, context: Context, rng: np.random.Generator) -> None:
    a, b = rng.integers(-1000, 1000, (2, size, 3), np.int32)

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.cross(a, b), -1, axis)

    (result,), text = run_function(context, function, a, b)
    np.testing.assert_array_equal(result, np.moveaxis(np.cross(a, b), -1, axis))
    assert "with 0 library calls" in text
    assert text.count("subtract") == 3
    if size > 64:  # shorter parts have loops of their own
        assert sum("subtract" in line for line in text.splitlines()) == 1


def test_parts_of_different_data(context: Context, rng: np.random.Generator) -> None:
    """They are better written one after the other."""
    a, b, c = rng.integers(-1000, 1000, (3, 5000), np.int32)
    (result,), text = run_function(context, lambda a, b, c: jnp.stack([a * 2 + 1, b ^ 5, c - 3]), a, b, c)
    np.testing.assert_array_equal(result, np.stack([a * 2 + 1, b ^ 5, c - 3]))
    assert text.count("native loop") == 3


@pytest.mark.parametrize("size", [1, 5, 2000])
def test_parts_of_what_they_are_carried_in(size: int, context: Context, rng: np.random.Generator) -> None:
    x = rng.integers(-1000, 1000, (3, size), np.int32)

    def iteration(x: Any, np: Any) -> Any:
        return np.stack([x[1] * 2 + x[0], x[2] - x[0] * x[1], x[0] ^ x[2]])

    (result,), _ = run_function(context, lambda x: lax.fori_loop(0, 7, lambda _, x: iteration(x, jnp), x), x)
    for _ in range(7):
        x = iteration(x, np)
    np.testing.assert_array_equal(result, x)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(2,), (7,), (1000,), (33, 40), (64, 3, 5), (5000, 2)], ids=str)
def test_scans_of_half_floats(shape: tuple[int, ...], dtype: Any, context: Context, rng: np.random.Generator) -> None:
    """An associative scan takes even and odd places apart and puts its results together, level by level."""
    x = rng.integers(-3, 4, shape).astype(dtype)
    (result,), text = run_function(context, lambda x: lax.associative_scan(jnp.add, x), x)
    expected = np.cumsum(x.astype(np.float64), 0)
    if dtype is jnp.bfloat16:  # sums beyond 256 are rounded
        np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=0.02 * np.abs(expected).max() + 1)
    else:
        np.testing.assert_array_equal(result, expected.astype(dtype))
    assert "with 0 library calls" in text


@pytest.mark.parametrize("length", [4, 9, 256])
def test_scans_of_pairs_in_reverse(length: int, context: Context, rng: np.random.Generator) -> None:
    a, x = rng.uniform(0.5, 1, (length, 12)), rng.standard_normal((length, 12))

    def function(a: jax.Array, x: jax.Array) -> jax.Array:
        return lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, x), reverse=True)[1]

    (result,), _ = run_function(context, function, a.astype(np.float32), x.astype(np.float32))
    state, expected = np.zeros(12), []
    for row, added in zip(a.astype(np.float32)[::-1], x.astype(np.float32)[::-1], strict=True):
        state = row * state + added
        expected.append(state)
    np.testing.assert_allclose(result, np.stack(expected[::-1]), rtol=1e-4, atol=1e-5)
