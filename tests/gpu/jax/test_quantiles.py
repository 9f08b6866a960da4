"""The inverse of the error function, of which normal random numbers are made, against float64."""

import jax
import numpy as np
from scipy.special import erfinv


def on_flagos(x):
    return np.asarray(jax.jit(jax.lax.erf_inv)(jax.device_put(x, jax.devices("flagos")[0])))


def test_of_all_sizes(rng):
    x = [rng.uniform(-1, 1, 3_000_000), 1 - 10 ** rng.uniform(-7.2, 0, 1_000_000), 10 ** rng.uniform(-30, 0, 1_000_000)]
    x = np.concatenate(x).astype(np.float32)
    x = x[np.abs(x) < 1]
    exact = erfinv(x.astype(np.float64))
    apart = np.abs(on_flagos(x) - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert apart.max() < 5, f"{apart.max()} ulp at {x[np.argmax(apart)]}"
    assert apart.mean() < 1.1


def test_of_special_numbers():
    x = np.array([1, -1, 0, -0.0, 1.5, -2, np.inf, -np.inf, np.nan, 1e-38, -1e-30], np.float32)
    ours, exact = on_flagos(x), erfinv(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(ours, exact, rtol=1e-6)
    assert np.array_equal(np.signbit(ours[:4]), np.signbit(x[:4]))


def test_normal_numbers(rng):
    """JAX's CPU is up to 6e-6 of a number away, where the square of a uniform one rounds off what it lacks to one."""
    key = rng.integers(1 << 32, size=2, dtype=np.uint32)
    flagos, cpu = (jax.devices(name)[0] for name in ("flagos", "cpu"))

    def uniform(key):
        least = np.nextafter(np.float32(-1), np.float32(0))
        return jax.random.uniform(jax.random.wrap_key_data(key), (1_000_000,), minval=least, maxval=1.0)

    def normal(key):
        return jax.random.normal(jax.random.wrap_key_data(key), (1_000_000,))

    exact = np.sqrt(2) * erfinv(np.asarray(jax.jit(uniform)(jax.device_put(key, cpu))).astype(np.float64))
    np.testing.assert_allclose(np.asarray(jax.jit(normal)(jax.device_put(key, flagos))), exact, rtol=1e-6)
