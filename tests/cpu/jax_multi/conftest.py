"""JAX with eight flagos devices, and eight of its own CPU as the oracle."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "flagos,cpu"
os.environ["FLAGOS_NUM_CPU_DEVICES"] = "8"
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import flagos_backend.frontends.jax
from flagos_backend.frontends.jax import jax_internals
from support.emitted import emitted

__all__ = ["emitted"]

flagos_backend.frontends.jax.initialize()


@pytest.fixture(autouse=True)
def forget_failed_programs() -> Iterator[None]:
    """JAX waits at exit for programs with effects, and reports again those that a test let fail."""
    yield
    jax_internals.lookup("jax._src.dispatch", "runtime_tokens").clear()


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    devices = jax.devices("flagos")
    assert len(devices) == 8
    return devices


@pytest.fixture
def mesh(devices: list[jax.Device]) -> Mesh:
    return make_mesh(devices)


@pytest.fixture
def agree(devices: list[jax.Device]) -> Callable[..., Any]:
    """Calls a function with a 2x4 mesh of flagos devices and with one of CPU devices; results and shardings agree."""

    def agree(function: Callable[[Mesh], Any]) -> Any:
        ours, theirs = function(make_mesh(devices)), function(make_mesh(jax.devices("cpu")))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert a.sharding.spec == b.sharding.spec
            assert a.sharding.mesh.devices.flat[0].platform == "flagos"
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
                assert x.index == y.index
        return ours

    return agree


def make_mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
