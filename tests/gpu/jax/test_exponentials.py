"""Exponentials of what lies below a row's maximum, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Numbers from -0.0 down to -104, below which exponentials are 0: how many float32 there are.
COUNT = np.float32(104).view(np.uint32) + 1
LEAST_NORMAL = np.finfo(np.float32).tiny


def exponentials(x):
    return jnp.exp(x - x.max(1, keepdims=True))


def on_flagos(x):
    return np.asarray(jax.jit(exponentials)(jax.device_put(x, jax.devices("flagos")[0])))


@pytest.mark.parametrize("length", [4096, 40960, 4097, 50257])
def test_of_all_sizes(length, rng):
    """Rows of one block and of several, and such as begin anywhere."""
    bits = np.sort(rng.integers(0, COUNT, (4_000_000 // length) * length, dtype=np.uint32))
    x = (bits | np.uint32(1 << 31)).view(np.float32).reshape(-1, length)
    x[:, rng.integers(0, length)] = 0
    ours, exact = on_flagos(x), np.exp(x.astype(np.float64))
    normal = exact >= LEAST_NORMAL * 1.0001
    apart = np.abs(ours - exact)[normal] / np.spacing(exact[normal].astype(np.float32))
    worst = np.argmax(apart + x[normal] / 40)
    assert apart[worst] <= 2.5 - x[normal][worst] / 40, f"{apart[worst]} ulp at {x[normal][worst]}"
    assert np.all((ours[~normal] >= 0) & (ours[~normal] <= LEAST_NORMAL * 1.0002))
    assert np.all(ours[x == 0] == 1)


def test_of_special_numbers(rng):
    x = rng.standard_normal((6, 1000)).astype(np.float32)
    x[0, 3], x[1, 4], x[2, 5], x[3, 6], x[4] = -np.inf, np.nan, np.inf, -3e38, -np.inf
    ours = on_flagos(x)
    with np.errstate(invalid="ignore"):
        exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert np.array_equal(np.isnan(ours), np.isnan(exact))
    assert ours[0, 3] == 0 and ours[3, 6] == 0
    np.testing.assert_allclose(ours, exact, rtol=1e-5)
