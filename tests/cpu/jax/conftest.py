"""JAX with the device flagos as its default and its own CPU beside it as the oracle."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3]))  # the tools are no part of the wheel
os.environ["JAX_PLATFORMS"] = "flagos,cpu"
if os.environ["FLAGOS_DEVICE"] != "cpu":
    # Where XLA too rounds what it multiplies unless asked not to, which the oracle is no measure for.
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

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
def device() -> jax.Device:
    (device,) = jax.devices("flagos")
    return device


@pytest.fixture(scope="session")
def cpu() -> jax.Device:
    return jax.devices("cpu")[0]


@pytest.fixture
def agree(device: jax.Device, cpu: jax.Device) -> Callable[..., Any]:
    """Runs a function compiled on both devices; the flagos results, which are near the CPU's."""

    def agree(function: Callable[..., Any], *args: Any, rtol: float = 1e-5, atol: float = 1e-5) -> Any:
        ours, theirs = (jax.jit(function)(*jax.device_put(args, where)) for where in (device, cpu))
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert a.devices() == {device}
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)
        return ours

    return agree
