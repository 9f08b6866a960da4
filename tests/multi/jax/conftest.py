"""JAX with every accelerator of this machine in one process, and as many devices of its own CPU as the oracle."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "flagos,cpu"
os.environ["FLAGOS_NUM_CPU_DEVICES"] = "4"  # of a simulated accelerator
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=16"

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import flagos_backend.frontends.jax
from flagos_backend.frontends.jax import jax_internals

flagos_backend.frontends.jax.initialize()
# The oracle knows no shorter products.
jax.config.update("jax_default_matmul_precision", "highest")

Agree = Callable[[Callable[[Mesh], Any]], Any]


@pytest.fixture(autouse=True)
def forget_failed_programs() -> Iterator[None]:
    """JAX waits at exit for programs with effects, and reports again those that a test let fail."""
    yield
    jax_internals.lookup("jax._src.dispatch", "runtime_tokens").clear()


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    return jax.devices("flagos")


@pytest.fixture
def mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("d",))


@pytest.fixture
def agree(mesh: Mesh) -> Agree:
    """Calls a function with a mesh of our devices and with one of as many CPU devices; the results agree, also on each
    device."""

    def agree(function: Callable[[Mesh], Any]) -> Any:
        oracle = Mesh(np.array(jax.devices("cpu")[: mesh.size]), ("d",))
        ours, theirs = function(mesh), function(oracle)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert a.devices() <= set(mesh.devices.flat)
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                assert x.index == y.index
                mine, expected = (np.asarray(shard.data).astype(np.float64) for shard in (x, y))
                np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-4)
        return ours

    return agree
