"""Kernels that are launched while the one ahead of them ends: who may, and that they wait before they touch memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flagos_backend.codegen.triton import RegionKernel, prepare, schedule
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.passes import for_accelerator
from support.triton_compiled import compiled
from support.triton_programs import H100, NO_DEVICE_LIBRARY, bf16, f32

AMPERE = replace(H100, architecture="sm_80")
WAIT, START_NEXT = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def layer_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * gain


def gradients(x: jax.Array, gain: jax.Array, g: jax.Array) -> Any:
    return jax.vjp(layer_norm, x, gain)[1](g)


SHORT = jnp.tanh, [f32(512, 512)]
LONG = jnp.tanh, [f32(1024, 512)]
# As many programs as fit, each of which walks its part; then the parts are added.
IN_PARTS = lambda x: x.astype(jnp.float32).sum(0), [bf16(32768, 4096)]
NORM = gradients, [f32(8192, 1024), f32(1024), f32(8192, 1024)]


def kernels_of(function: Callable[..., Any], shapes: list[Any], target: Target) -> list[RegionKernel]:
    flat = flatten(for_accelerator(import_module(hlo_bytes(function, *shapes))).entry)
    return [prepare(item, target) for item in schedule(flat, target).items if isinstance(item, Region)]


@pytest.mark.parametrize(
    ("program", "early", "starts_next"),
    [
        pytest.param(SHORT, {"kernel": True}, {"kernel": True}, id="short"),
        pytest.param(LONG, {"kernel": True}, {"kernel": False}, id="long"),
        pytest.param(IN_PARTS, {"kernel": False, "finish": True}, {"kernel": False, "finish": True}, id="in parts"),
        pytest.param(NORM, {"kernel": False, "finish": True}, {"kernel": False, "finish": False}, id="norm"),
    ],
)
def test_who_starts_early(program: Any, early: dict[str, bool], starts_next: dict[str, bool]) -> None:
    (kernel,) = kernels_of(program[0], program[1], H100)
    assert {launch.function: launch.starts_early for launch in kernel.launches} == early
    assert {launch.function: launch.flags.get("launch_pdl", False) for launch in kernel.launches} == early
    for launch, ptx in zip(kernel.launches, compiled(kernel), strict=True):
        assert (WAIT in ptx) == early[launch.function]
        assert (START_NEXT in ptx) == starts_next[launch.function]


@pytest.mark.parametrize("program", [SHORT, LONG, IN_PARTS, NORM])
def test_it_waits_before_it_touches_memory(program: Any) -> None:
    (kernel,) = kernels_of(program[0], program[1], H100)
    for launch, ptx in zip(kernel.launches, compiled(kernel), strict=True):
        if launch.starts_early:
            touched = [n for n, line in enumerate(ptx.splitlines()) if "ld.global" in line or "st.global" in line]
            (waited,) = [n for n, line in enumerate(ptx.splitlines()) if WAIT in line]
            assert touched
            assert waited < min(touched)


@pytest.mark.parametrize("target", [AMPERE, NO_DEVICE_LIBRARY], ids=["before Hopper", "another vendor's"])
def test_other_chips_wait_for_the_launch(target: Target) -> None:
    for program in (SHORT, IN_PARTS):
        for kernel in kernels_of(program[0], program[1], target):
            assert "wait_for_previous" not in kernel.source
            assert not any("launch_pdl" in launch.flags for launch in kernel.launches)
