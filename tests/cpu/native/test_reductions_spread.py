"""Reductions that are stored again for each element of what they reduce: alone, and beside others. Against NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu.native.harness import run_function
from plugin_abi.host import Context

# Short columns and rows, runs that are far apart, and few long rows.
_CASES = [
    ((4, 100), (0,)),
    ((2, 65), (0,)),
    ((7, 600), (0,)),
    ((64, 2048), (0,)),
    ((3, 7, 600), (1,)),
    ((10_000, 3), (1,)),
    ((40, 30, 8), (0, 2)),
    ((300, 129), (1,)),
    ((2, 140_000), (1,)),
    ((16, 131_109), (1,)),
    ((32, 131_109), (1,)),
]


@pytest.mark.parametrize(("shape", "axes"), _CASES, ids=str)
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside others"])
def test_minima_and_maxima(
    shape: tuple[int, ...], axes: tuple[int, ...], is_alone: bool, context: Context, rng: np.random.Generator
) -> None:
    x = rng.standard_normal(shape).astype(np.float32)

    def function(x: Any, numpy: Any) -> tuple[Any, ...]:
        spread = numpy.broadcast_to(x.max(axes, keepdims=True), x.shape)
        return (spread,) if is_alone else (spread, x.min(axes), numpy.broadcast_to(x.min(axes, keepdims=True), x.shape))

    ours, _ = run_function(context, lambda x: function(x, jnp), x)
    for result, expected in zip(ours, function(x, np), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_within_a_concatenation(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 300)).astype(np.float32)

    def function(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.broadcast_to(x.max(0), (2, 300)), jnp.broadcast_to(x.min(0), x.shape)])

    (ours,), _ = run_function(context, function, x)
    expected = np.concatenate([x, np.broadcast_to(x.max(0), (2, 300)), np.broadcast_to(x.min(0), x.shape)])
    np.testing.assert_array_equal(ours, expected)
