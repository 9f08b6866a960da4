"""Real numbers become complex ones of two floats in loop nests, without a call."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from cpu.native.harness import run_function
from plugin_abi.host import Context

_TYPES = ["bool", "int8", "int32", "uint16", "float16", "bfloat16", "float32"]


@pytest.mark.parametrize("shape", [(), (1,), (7, 300)], ids=str)
@pytest.mark.parametrize("name", _TYPES)
def test_as_factors_of_complex_numbers(
    name: str, shape: tuple[int, ...], context: Context, rng: np.random.Generator
) -> None:
    x = (rng.integers(0, 2, shape) if name == "bool" else rng.integers(0, 100, shape)).astype(jnp.dtype(name))
    z = np.asarray(rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)
    (actual,), explanation = run_function(context, lambda x, z: x.astype(jnp.complex64) * z, x, z)
    assert "\ncall" not in explanation
    np.testing.assert_allclose(actual, x.astype(np.complex64) * z, rtol=1e-6)


def test_what_is_not_finite_stays(context: Context) -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 3e38], np.float32)
    (actual,), _ = run_function(context, lambda x: x.astype(jnp.complex64), x)
    np.testing.assert_array_equal(actual, x.astype(np.complex64))
    assert np.signbit(actual.real[3])
