"""Approximate top k on flagos, which is exact there, against NumPy's sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("largest", [True, False])
def test_approximate_top_k(dtype: str, axis: int, largest: bool, device: jax.Device, rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal((3, 200, 40)), dtype)
    find = lax.approx_max_k if largest else lax.approx_min_k
    values, indices = jax.jit(lambda x: find(x, 5, reduction_dimension=axis))(jax.device_put(x, device))
    wide = np.asarray(x, np.float32)
    ordered = np.sort(-wide if largest else wide, axis=axis)
    expected = np.take(-ordered if largest else ordered, range(5), axis)
    np.testing.assert_array_equal(np.asarray(values, np.float32), expected)
    np.testing.assert_array_equal(np.take_along_axis(wide, np.asarray(indices), axis), expected)


def test_without_aggregation_more_are_found(device: jax.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 3000)).astype(np.float32)
    find = jax.jit(lambda x: lax.approx_max_k(x, 5, recall_target=0.9, aggregate_to_topk=False))
    values, indices = map(np.asarray, find(jax.device_put(x, device)))
    assert values.shape[1] > 5
    np.testing.assert_array_equal(values, -np.sort(-x)[:, : values.shape[1]])
    np.testing.assert_array_equal(np.take_along_axis(x, indices, 1), values)


def test_gradient(device: jax.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 300)).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda x: lax.approx_max_k(x, 7)[0].sum()))(jax.device_put(x, device))
    np.testing.assert_array_equal(np.asarray(gradient), x >= -np.sort(-x)[:, 6:7])
