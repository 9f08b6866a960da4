"""Quotients by shared divisors on the accelerator, against NumPy's: one rounding, and what has no rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flagos_backend.ir.types import ElementType
from support.numbers import distance, special_values

# Below it what a correction has to know is lost to underflow.
LEAST = 2.0**-100


def by_row(x, y):
    return x / y[:, None]


def by_constant(x, y):
    return x / np.float32(0.7) + jnp.zeros_like(y)[:, None]


def by_sum(x, y):
    exponentials = jnp.exp(-jnp.abs(x))
    return exponentials / exponentials.sum(1, keepdims=True)


def of_a_row(x, y):
    """A quotient that a row shares, beside what has a value for each element."""
    quotient = y / x.max(1)
    return quotient, jnp.where(x == x.max(1, keepdims=True), quotient[:, None], x)


def on_flagos(function, *arrays):
    device = jax.devices("flagos")[0]
    return np.asarray(jax.jit(function)(*(jax.device_put(array, device) for array in arrays)))


@pytest.mark.parametrize("spread", [0, 60, 120])
def test_numbers_by_a_rows_number_round_once(spread, rng):
    x, y = (
        (rng.standard_normal(dims) * 2.0 ** rng.integers(-spread, spread + 1, dims)).astype(np.float32)
        for dims in ((700, 1000), (700,))
    )
    with np.errstate(all="ignore"):
        quotients = {by_row: x / y[:, None], by_constant: x / np.float32(0.7)}
    for function, exact in quotients.items():
        apart = distance(on_flagos(function, x, y), exact)
        assert not apart[np.abs(x) >= LEAST].any() and apart.max() <= 1


def test_special_numbers(rng):
    special = special_values(ElementType.F32)
    x = np.tile(np.concatenate([special, -special]), (2 * len(special), 1))
    y = np.concatenate([special, -special])
    with np.errstate(all="ignore"):
        exact = x / y[:, None]
    ours = on_flagos(by_row, x, y)
    assert np.array_equal(np.isnan(ours), np.isnan(exact))
    there = ~np.isnan(exact)
    assert np.array_equal(np.signbit(ours[there]), np.signbit(exact[there]))
    assert distance(ours, exact)[there].max() <= 1
    assert not distance(ours, exact)[there & (np.abs(x) >= LEAST)].any()


def test_a_quotient_that_a_row_shares_rounds_once(rng):
    """Of every special number by every other one, and of numbers of all sizes, those whose quotients are subnormal
    among them."""
    special = special_values(ElementType.F32)
    special = np.concatenate([special, -special])
    pairs = np.stack(np.meshgrid(special, special)).reshape(2, -1)
    sizes = rng.standard_normal((2, 30000)) * 2.0 ** rng.integers(-140, 127, (2, 30000))
    y, divisors = np.concatenate([pairs, sizes.astype(np.float32)], 1)
    x = np.repeat(divisors[:, None], 40, 1)
    with np.errstate(all="ignore"):
        exact = y / divisors
    device = jax.devices("flagos")[0]
    ours, beside = jax.jit(of_a_row)(jax.device_put(x, device), jax.device_put(y, device))
    there = ~np.isnan(exact)
    for found in (np.asarray(ours), np.asarray(beside)[:, 7]):
        assert np.array_equal(np.isnan(found), ~there)
        assert np.array_equal(found[there], exact[there])
        assert np.array_equal(np.signbit(found[there]), np.signbit(exact[there]))


def test_bfloat16_by_a_rows_number_rounds_once(rng):
    x, y = (
        (rng.standard_normal(dims) * 2.0 ** rng.integers(-40, 41, dims)).astype(ml_dtypes.bfloat16)
        for dims in ((700, 1000), (700,))
    )
    assert np.array_equal(on_flagos(by_row, x, y), x / y[:, None])


def test_bfloat16_that_is_seen_wider(rng):
    """Exact quotients stay whole, where numbers are quantised."""
    y = rng.integers(1, 128, 700)
    x = (y[:, None] * rng.integers(-2, 3, (700, 1000))).astype(ml_dtypes.bfloat16)
    y = y.astype(ml_dtypes.bfloat16)
    expected = np.floor((x / y[:, None]).astype(np.float32))
    assert np.array_equal(on_flagos(lambda x, y: jnp.floor(by_row(x, y).astype(jnp.float32)), x, y), expected)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda d: d.__name__)
def test_softmax_of_rows(dtype, rng):
    x = (rng.standard_normal((300, 4096)) * 20).astype(dtype)
    ours = on_flagos(by_sum, x, np.zeros(300, dtype)).astype(np.float64)
    exponentials = np.exp(-np.abs(x.astype(np.float64)))
    exact = exponentials / exponentials.sum(1, keepdims=True)
    assert np.abs(ours - exact).max() <= (2e-6 if dtype is np.float32 else 8e-3) * exact.max()
