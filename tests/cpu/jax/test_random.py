"""jax.random draws the same bits as on JAX's CPU: each generator, both ways to lay out threefry's counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg")
SHAPES = ((), (1,), (0, 4), (2, 513))
WIDTHS = (np.uint8, np.uint16, np.uint32, np.uint64)
FLOATS = (np.float16, jnp.bfloat16, np.float32, np.float64)
# What moves, adds and compares integers, or floats that nothing rounds: uniform draws of other ranges are scaled, which
# XLA may contract into one rounding.
DRAWS: dict[str, Callable[[jax.Array], Any]] = {
    "split": lambda key: random.key_data(random.split(key, 5)),
    "split_twice": lambda key: random.key_data(random.split(random.split(key, (2, 3))[1, 2])),
    "fold_in": lambda key: random.key_data(random.fold_in(key, 12345)),
    "fold_in_many": lambda key: random.key_data(jax.vmap(lambda n: random.fold_in(key, n))(jnp.arange(4))),
    "vmapped_bits": lambda key: jax.vmap(lambda k: random.bits(k, (3,)))(random.split(key, 4)),
    "randint": lambda key: random.randint(key, (33,), -100, 1000),
    "randint_s8": lambda key: random.randint(key, (33,), -128, 127, dtype=np.int8),
    "randint_u32": lambda key: random.randint(key, (9,), 0, jnp.uint32(4_000_000_000), dtype=np.uint32),
    "permutation": lambda key: random.permutation(key, 37),
    "permutation_of_each_row": lambda key: random.permutation(key, jnp.arange(24).reshape(8, 3), independent=True),
    "choice": lambda key: random.choice(key, 50, (20,), replace=False),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (65,)),
    "rademacher": lambda key: random.rademacher(key, (65,)),
    **{f"bits_{t.__name__}": lambda key, t=t: random.bits(key, (3, 43), t) for t in WIDTHS},
    **{f"bits_{s}": lambda key, s=s: random.bits(key, s) for s in SHAPES},
    **{f"uniform_{t.__name__}": lambda key, t=t: random.uniform(key, (3, 43), t) for t in FLOATS},
}


@pytest.fixture(params=[True, False], ids=["partitionable", "original"])
def counters(request: pytest.FixtureRequest) -> Iterator[None]:
    with jax.threefry_partitionable(request.param), jax.enable_x64(True):
        yield


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.usefixtures("counters")
def test_draws(generator: str, device: jax.Device, cpu: jax.Device) -> None:
    def draw(data: jax.Array) -> dict[str, jax.Array]:
        key = random.wrap_key_data(data, impl=generator)
        return {name: function(key) for name, function in DRAWS.items()}

    words = {"threefry2x32": 2}.get(generator, 4)
    data = np.random.default_rng(words).integers(0, 2**32, words, np.uint32)
    ours, theirs = (jax.device_get(jax.jit(draw)(jax.device_put(data, where))) for where in (device, cpu))
    for name in DRAWS:
        a, b = ours[name], theirs[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.usefixtures("counters")
def test_keys_of_seeds(generator: str, device: jax.Device, cpu: jax.Device) -> None:
    key = jax.jit(lambda number: random.key_data(random.key(number, impl=generator)))
    for number in (0, 1, -1, 2**31 - 1, -(2**31), 2**40 + 3):
        ours, theirs = (np.asarray(key(jax.device_put(number, where))) for where in (device, cpu))
        np.testing.assert_array_equal(ours, theirs)
