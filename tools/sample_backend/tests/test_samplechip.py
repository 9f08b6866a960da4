"""A vendor's own tests: the built backend is accepted, computes what JAX's CPU computes, and says what it cannot.

FLAGOS_DRIVER_FILES=build JAX_PLATFORMS=flagos,cpu pytest tests
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

DEVICE = jax.devices("flagos")[0]
CPU = jax.devices("cpu")[0]

FUNCTIONS: dict[str, Callable[..., object]] = {
    "add an integer": lambda x, y: x + 1,
    "arithmetic": lambda x, y: (x - y) * x / (jnp.abs(y) + 1),
    "order": lambda x, y: (jnp.maximum(x, y), jnp.minimum(x, 0.5)),
    "functions": lambda x, y: jnp.tanh(x) + jnp.exp(-jnp.abs(y)) + jnp.sqrt(jnp.abs(x)),
    "product": lambda x, y: x @ y.reshape(4, 3),
    "constants": lambda x, y: x + np.arange(12, dtype=np.float32).reshape(3, 4),
    "call": lambda x, y: jax.jit(lambda v: (v, v * 2))(x)[1] + y,
}


def test_it_is_this_backend() -> None:
    assert "samplechip" in DEVICE.client.platform_version


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_computes_what_the_cpu_computes(name: str) -> None:
    random = np.random.default_rng()
    arguments = [random.normal(size=(3, 4)).astype(np.float32) for _ in range(2)]
    function = jax.jit(FUNCTIONS[name])
    results = jax.tree.leaves(function(*jax.device_put(arguments, DEVICE)))
    expected = jax.tree.leaves(function(*jax.device_put(arguments, CPU)))
    for result, value in zip(results, expected, strict=True):
        assert result.devices() == {DEVICE}
        np.testing.assert_allclose(result, value, rtol=1e-5, atol=1e-6)


def test_nan_and_no_elements() -> None:
    x = jax.device_put(np.array([np.nan, 1, -np.inf], np.float32), DEVICE)
    np.testing.assert_array_equal(jnp.maximum(x, 0.0), np.array([np.nan, 1, 0], np.float32))
    assert (jax.device_put(np.zeros((0, 4), np.float32), DEVICE) * 2.0).shape == (0, 4)


def test_what_it_cannot_compute_is_an_error_that_names_it() -> None:
    x = jax.device_put(np.ones(4, np.float32), DEVICE)
    with pytest.raises(Exception, match=r"UNIMPLEMENTED: .*the samplechip backend does not compute it"):
        jnp.sort(x)
    with pytest.raises(Exception, match=r"UNIMPLEMENTED: .*computes F32"):
        jnp.add(x.astype(np.int32), 1)
    np.testing.assert_array_equal(x * 2.0, np.full(4, 2, np.float32))  # later programs are unharmed
