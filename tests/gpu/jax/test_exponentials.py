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


def of_all_sizes(length, rng):
    """Rows of numbers below 0, of which one is 0. In a row they are about alike, so that most are below no other."""
    bits = np.sort(rng.integers(0, COUNT, (4_000_000 // length) * length, dtype=np.uint32))
    x = -bits.view(np.float32).reshape(-1, length)
    x[:, rng.integers(0, length)] = 0
    return x


def on_flagos(x):
    return np.asarray(jax.jit(exponentials)(jax.device_put(x, jax.devices("flagos")[0])))


@pytest.mark.parametrize("length", [4096, 40960, 4097, 50257])
def test_of_all_sizes(length, rng):
    """Rows of one block and of several, and such as begin anywhere."""
    x = of_all_sizes(length, rng)
    ours, exact = on_flagos(x), np.exp(x.astype(np.float64))
    normal = exact >= LEAST_NORMAL * 1.0001
    apart = np.abs(ours - exact)[normal] / np.spacing(exact[normal].astype(np.float32))
    worst = np.argmax(apart + x[normal] / 40)
    assert apart[worst] <= 2.5 - x[normal][worst] / 40, f"{apart[worst]} ulp at {x[normal][worst]}"
    assert np.all((ours[~normal] >= 0) & (ours[~normal] <= LEAST_NORMAL * 1.0002))
    assert np.all(ours[x == 0] == 1)


@pytest.mark.parametrize("length", [4096, 40960, 4097, 50257])
def test_sums(length, rng):
    """Whose terms may be off by the more the smaller they are."""
    x = of_all_sizes(length, rng)
    x[1::2] = -np.abs(rng.uniform(0, 9, x[1::2].shape))
    # Terms that are off alike, and large enough for what is lost when one by one is added to 1 not to be as much.
    x[2::4, 1:], x[2::4, 0] = -rng.uniform(1, 7, (len(x[2::4]), 1)), 0
    most = x.max(1).astype(np.float64)
    exact = np.exp(x - most[:, None]).sum(1)
    x = jax.device_put(x, jax.devices("flagos")[0])
    np.testing.assert_allclose(jax.jit(lambda x: exponentials(x).sum(1))(x), exact, rtol=1e-6)
    logarithms = jax.jit(lambda x: jax.nn.logsumexp(x, 1))(x)
    # A millionth of the sum is a millionth in its logarithm, however near to 0 that is.
    np.testing.assert_allclose(logarithms, np.log(exact) + most, rtol=5e-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("length", [4096, 40960, 4097, 50257])
def test_what_is_rounded(length, dtype, rng):
    """To 16 bits is off by half a step of those, and hardly more."""
    x = of_all_sizes(length, rng)
    exact = np.exp(x.astype(np.float64))
    x = jax.device_put(x, jax.devices("flagos")[0])

    def steps(exact):
        nearest = exact.astype(np.float32).astype(dtype)
        above = np.nextafter(np.abs(nearest), np.asarray(np.inf, dtype))
        return (above.astype(np.float64) - np.abs(nearest).astype(np.float64)) * (0.5 + 2**-5)

    ours = np.asarray(jax.jit(lambda x: exponentials(x).astype(dtype))(x), np.float64)
    is_normal = exact >= LEAST_NORMAL * 1.0001
    assert np.all((np.abs(ours - exact) <= steps(exact))[is_normal])
    assert np.all(ours[~is_normal] <= LEAST_NORMAL * 1.0002)
    exact /= exact.sum(1, keepdims=True)
    ours = np.asarray(jax.jit(lambda x: jax.nn.softmax(x, 1).astype(dtype))(x), np.float64)
    is_normal = exact >= LEAST_NORMAL * 1.0001
    assert np.all((np.abs(ours - exact) <= steps(exact))[is_normal])


def test_sums_of_special_numbers(rng):
    x = rng.standard_normal((9, 50257)).astype(np.float32)
    x[0, 3], x[1, 4], x[2, 5], x[3, 6], x[4] = -np.inf, np.nan, np.inf, -3e38, -np.inf
    x[5], x[6, 1], x[7, 1], x[8, ::2] = -3e38, 3e38, -1e30, -3e38
    with np.errstate(invalid="ignore"):
        exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True)).sum(1)
    x = jax.device_put(x, jax.devices("flagos")[0])
    np.testing.assert_allclose(jax.jit(lambda x: exponentials(x).sum(1))(x), exact, rtol=1e-6)
    cpu = jax.device_put(np.asarray(x), jax.devices("cpu")[0])
    for function in (lambda x: jax.nn.logsumexp(x, 1), lambda x: jax.nn.softmax(x, 1).astype(jnp.bfloat16)):
        np.testing.assert_allclose(
            np.asarray(jax.jit(function)(x), np.float32), np.asarray(jax.jit(function)(cpu), np.float32), rtol=1e-2
        )


def test_of_special_numbers(rng):
    x = rng.standard_normal((6, 1000)).astype(np.float32)
    x[0, 3], x[1, 4], x[2, 5], x[3, 6], x[4] = -np.inf, np.nan, np.inf, -3e38, -np.inf
    ours = on_flagos(x)
    with np.errstate(invalid="ignore"):
        exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert np.array_equal(np.isnan(ours), np.isnan(exact))
    assert ours[0, 3] == 0 and ours[3, 6] == 0
    np.testing.assert_allclose(ours, exact, rtol=1e-5)
