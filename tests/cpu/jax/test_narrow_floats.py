"""Floats of 8 and 4 bits in order: every code, also several of NaN.

When XLA's CPU client sorts, all NaN of most of these types become one code; it takes 0 of float8_e8m0fnu for NaN in
maxima and minima, orders subnormal numbers of float8_e5m2fnuz wrongly, and has no arrays of 4 bits in top-k. The oracle
is what ml_dtypes says that the codes are, and the total order of theirs.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

_NAMES = [
    name
    for name in (
        *("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2"),
        *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"),
    )
    if hasattr(jnp, name)
]


def _codes(name: str, rng: np.random.Generator) -> np.ndarray:
    """Each code of the type once, shuffled."""
    return rng.permutation(np.arange(16 if name.startswith("float4") else 256)).astype(np.uint8)


def _bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.fixture(params=_NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _numbers(name: str, codes: np.ndarray) -> np.ndarray:
    return codes.view(np.dtype(getattr(ml_dtypes, name))).astype(np.float64)


def test_sorts_keep_every_code(name: str, device: jax.Device, rng: np.random.Generator) -> None:
    codes = _codes(name, rng)
    x = jax.device_put(codes.view(np.dtype(getattr(ml_dtypes, name))), device)
    found = _bits(jax.jit(lax.sort)(x))
    np.testing.assert_array_equal(np.sort(found), np.sort(codes))
    numbers = _numbers(name, found)
    ordered = np.sort(numbers)  # NaN are last; but for those types whose only NaN has the sign of a negative number
    if name.endswith("fnuz"):
        ordered = np.roll(ordered, 1)
    np.testing.assert_array_equal(numbers, ordered)
    # Stable: where numbers compare equal, as zeros and NaN do, they stay in their order.
    places = np.asarray(jax.jit(lambda x: jnp.argsort(x, stable=True))(x))
    kept = np.argsort(_numbers(name, codes), stable=True)
    np.testing.assert_array_equal(places, np.roll(kept, 1) if name.endswith("fnuz") else kept)
    np.testing.assert_array_equal(codes[places], found)


def test_top_k_keeps_every_code(name: str, device: jax.Device, rng: np.random.Generator) -> None:
    """In total order, in which NaN of either sign are the first or the last."""
    codes = _codes(name, rng)
    x = jax.device_put(codes.view(np.dtype(getattr(ml_dtypes, name))), device)
    values, places = jax.jit(lambda x: lax.top_k(x, len(codes)))(x)
    found = _bits(values)
    np.testing.assert_array_equal(codes[np.asarray(places)], found)
    numbers = _numbers(name, found)
    finite = numbers[~np.isnan(numbers)]
    np.testing.assert_array_equal(finite, np.sort(finite)[::-1])
    assert not np.isnan(numbers[np.flatnonzero(~np.isnan(numbers))[0] : np.flatnonzero(~np.isnan(numbers))[-1]]).any()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(jnp.maximum, np.maximum), (jnp.minimum, np.minimum), (jnp.less, np.less), (jnp.equal, np.equal)],
)
def test_pairs_of_all_codes(
    name: str,
    ours: Callable[..., jax.Array],
    theirs: Callable[..., np.ndarray],
    device: jax.Device,
    rng: np.random.Generator,
) -> None:
    a, b = np.meshgrid(_codes(name, rng), _codes(name, rng))
    x, y = (
        jax.device_put(np.ascontiguousarray(codes).view(np.dtype(getattr(ml_dtypes, name))), device) for codes in (a, b)
    )
    found = np.asarray(jax.jit(ours)(x, y))
    wanted = theirs(_numbers(name, np.ascontiguousarray(a)), _numbers(name, np.ascontiguousarray(b)))
    np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


@pytest.mark.parametrize("largest", [True, False])
# JAX begins its reductions with NaN
@pytest.mark.parametrize("name", [name for name in _NAMES if name != "float8_e8m0fnu"])
def test_argmin_and_argmax_of_rows(name: str, largest: bool, device: jax.Device, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 16 if name.startswith("float4") else 256, (64, 9)).astype(np.uint8)
    x = jax.device_put(codes.view(np.dtype(getattr(ml_dtypes, name))), device)
    value, place = jax.jit(
        lambda x: (jnp.max(x, 1), jnp.argmax(x, 1)) if largest else (jnp.min(x, 1), jnp.argmin(x, 1))
    )(x)
    numbers = _numbers(name, codes)
    wanted = np.max(numbers, 1) if largest else np.min(numbers, 1)
    np.testing.assert_array_equal(np.asarray(value).astype(np.float64), wanted)
    np.testing.assert_array_equal(np.asarray(place), np.argmax(numbers, 1) if largest else np.argmin(numbers, 1))
