"""JAX on its own CPU with eight devices, and the platform flagos known by name: enough to lower and to convert."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"

from collections.abc import Callable
from typing import Any

import jax
import pytest

from flagos_backend.frontends.jax import callbacks, dlpack, jax_internals, lowering


@pytest.fixture(scope="session", autouse=True)
def platform() -> None:
    """What registration does for an accepted backend, without one."""
    jax.devices()
    jax_internals.register_unavailable("flagos", -10, lambda: "no such device flagos: these tests have no backend")
    lowering.register_rules()
    jax_internals.enable_donation("flagos")
    jax_internals.enable_compilation_cache("flagos")
    jax_internals.enable_python_callbacks("flagos", callbacks.emit_python_callback)
    dlpack.enable("no adapter")


@pytest.fixture
def lower() -> Callable[..., Any]:
    """Lowers a function for flagos at these arguments, without a device."""

    def lower(function: Callable[..., Any], *args: Any, **jit_options: Any) -> Any:
        return jax.jit(function, **jit_options).trace(*args).lower(lowering_platforms=("flagos",))

    return lower
