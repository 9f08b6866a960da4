"""JAX's cumulative operations on flagos, against NumPy in double."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

OPERATIONS: dict[str, tuple[Any, np.ufunc]] = {
    "sum": (lax.cumsum, np.add),
    "product": (lax.cumprod, np.multiply),
    "maximum": (lax.cummax, np.maximum),
    "minimum": (lax.cummin, np.minimum),
    "logsumexp": (lax.cumlogsumexp, np.logaddexp),
}


def exact(accumulate: np.ufunc, x: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    wide = np.flip(x.astype(np.float64), axis) if reverse else x.astype(np.float64)
    found = accumulate.accumulate(wide, axis=axis)
    return np.flip(found, axis) if reverse else found


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_values(
    operation: str, dtype: str, axis: int, reverse: bool, device: jax.Device, rng: np.random.Generator
) -> None:
    compute, accumulate = OPERATIONS[operation]
    x = jnp.asarray(rng.uniform(0.5, 1.5, (4, 33, 5)), dtype)
    found = jax.jit(lambda x: compute(x, axis=axis, reverse=reverse))(jax.device_put(x, device))
    assert found.dtype == x.dtype
    precision = 8 * float(jnp.finfo(dtype).eps)
    expected = exact(accumulate, np.asarray(x), axis, reverse)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=precision, atol=precision)


def test_no_elements(device: jax.Device) -> None:
    x = jax.device_put(np.zeros((3, 0), np.float32), device)
    assert jax.jit(lambda x: lax.cumlogsumexp(x, axis=1))(x).shape == (3, 0)
    assert jax.jit(lambda x: lax.cumsum(x, axis=0))(x).shape == (3, 0)


def test_gradient_of_log_sums(device: jax.Device, rng: np.random.Generator) -> None:
    """Of the last one: the softmax."""
    x = rng.standard_normal((4, 50)).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda x: lax.cumlogsumexp(x, axis=1)[:, -1].sum()))(jax.device_put(x, device))
    weights = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(np.asarray(gradient), weights / weights.sum(1, keepdims=True), rtol=1e-4, atol=1e-6)


def test_exported_for_any_size(device: jax.Device, rng: np.random.Generator) -> None:
    (n,) = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((n, 8), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: lax.cumlogsumexp(x, axis=1)), platforms=["flagos"])(shape)
    x = rng.standard_normal((11, 8)).astype(np.float32)
    found = jax.export.deserialize(exported.serialize()).call(jax.device_put(x, device))
    np.testing.assert_allclose(np.asarray(found), exact(np.logaddexp, x, 1, False), rtol=1e-5, atol=1e-5)
