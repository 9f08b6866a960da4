"""Values that few operations make of much smaller arrays: every kernel that reads one makes it, at the places where it
reads it, and none is in memory. The oracle is XLA."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

from flagos_backend.compile import accelerator_plan
from flagos_backend.devices.target import Target
from flagos_backend.fusion.policy import ACCELERATOR
from flagos_backend.importer import import_module
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.plan import Plan
from programs import hlo_bytes
from support.passes import for_accelerator

# The package has a function of this name.
SCHEDULE = importlib.import_module("flagos_backend.codegen.triton.schedule")
TARGET = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
ROWS, COLUMNS = 16, 16
LEAST = 512
SMALL = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS,), (COLUMNS,))]


def plan_of(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], least: int = LEAST) -> Plan:
    policy = dataclasses.replace(ACCELERATOR, remade_bytes=least)
    monkeypatch.setattr(SCHEDULE, "ACCELERATOR", policy)
    module = for_accelerator(import_module(hlo_bytes(function, *SMALL)))
    return accelerator_plan.build(module.entry, (), torch.device("cpu"), TARGET)


def compare(plan: Plan, function: Callable[..., Any], rng: np.random.Generator) -> None:
    arrays = [rng.standard_normal(shape.shape).astype(np.float32) for shape in SMALL]
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(function)(*arrays)
    with torch.inference_mode():
        results = plan.run(Run(), [torch.empty(array.shape).copy_(torch.from_numpy(array)) for array in arrays])
    for result, truth in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, truth, rtol=1e-4, atol=1e-4)


def scanned(a: jax.Array, b: jax.Array) -> Any:
    """What a state-space model scans over is spread from a row and a column."""
    decay, step = jnp.exp(-jnp.abs(a[:, None] * b)), a[:, None] * b
    states = lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (decay, step))[1]
    return states.sum(1), (states[::-1] * decay).sum(0)


def test_what_a_scan_takes_is_not_in_memory(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    remade, stored = plan_of(monkeypatch, scanned), plan_of(monkeypatch, scanned, least=0)
    assert len(remade.steps) <= len(stored.steps)
    assert remade.temporary_bytes <= stored.temporary_bytes - ROWS * COLUMNS * 4
    compare(remade, scanned, rng)


def of_chance(rng: np.random.Generator) -> Callable[..., Any]:
    """Values spread from a row and a column, read by several kernels in parts, backwards, padded, and moved."""
    spread, read = rng.integers(4, size=3).tolist(), rng.integers(6, size=6).tolist()

    def function(a: jax.Array, b: jax.Array) -> Any:
        makes = [
            lambda: jnp.exp(-jnp.abs(a[:, None] * b)),
            lambda: jnp.where(a[:, None] < b, a[:, None], b),
            lambda: (lax.iota(jnp.int32, ROWS)[:, None] <= lax.iota(jnp.int32, COLUMNS)).astype(jnp.float32) * b,
            lambda: jnp.sqrt(jnp.abs(a))[:, None] + b * b,
        ]
        values = [makes[kind]() for kind in spread]
        results = []
        for number, kind in enumerate(read):
            value = values[number % len(values)]
            match kind:
                case 0:
                    value = value[::2]
                case 1:
                    value = value[::-1, 3:]
                case 2:
                    value = jnp.pad(value, ((2, 0), (0, 1)))
                case 3:
                    value = value.T
                case 4:
                    value = jnp.roll(value, 3, 0)
                case _:
                    value = jnp.concatenate([value[5:], 2 * value])
            results.append(jnp.sort(jnp.cumsum(value, 1).sum(0)))
        return results

    return function


@pytest.mark.parametrize("number", range(8))
def test_programs_of_chance(number: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    function = of_chance(rng)
    compare(plan_of(monkeypatch, function), function, rng)


def test_what_takes_long_to_make_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logarithm takes as long as reading what it made."""

    def function(a: jax.Array, b: jax.Array) -> Any:
        value = jnp.log(jnp.abs(a[:, None] + b))
        return jnp.sort(value.sum(0)), jnp.sort(value[::2].T.sum(0))

    sizes = [plan_of(monkeypatch, function, least).temporary_bytes for least in (0, LEAST)]
    assert sizes[0] == sizes[1]
