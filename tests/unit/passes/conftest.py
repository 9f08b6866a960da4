"""A fresh seed for each run, from the shared generator, and JAX's CPU as the oracle, whatever ran before."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest


@pytest.fixture
def seed(rng: np.random.Generator) -> int:
    return int(rng.integers(1 << 31))


@pytest.fixture(autouse=True)
def on_the_cpu_of_jax() -> Iterator[None]:
    """Where a folder of tests/cpu is tested in this process too, JAX's default device is flagos, which is no oracle."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield
