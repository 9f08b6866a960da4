"""Short dimensions beside reductions, as the coordinates of particles: one kernel computes them, and no array of pairs
is in memory. The oracle is the program in float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

from flagos_backend.compile import accelerator_plan
from flagos_backend.devices.target import Target
from flagos_backend.fusion.channels import unrolled, with_unrolled_channels
from flagos_backend.fusion.fuse import fuse
from flagos_backend.fusion.policy import ACCELERATOR
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import ConstantAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import from_bytes
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes
from support.live_bytes import run_and_count
from support.nest_values import arrays, compare
from support.passes import for_accelerator

# The package has a function of this name.
SCHEDULE = importlib.import_module("flagos_backend.codegen.triton.schedule")
TARGET = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
N = 128
PAIRS = N * N * 4
# Differences of positions are made where they are read, as those of more particles are.
POLICY = replace(ACCELERATOR, remade_bytes=PAIRS)
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def many_particles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEDULE, "ACCELERATOR", POLICY)


def gravity(x: Any, m: Any) -> Any:
    d = x[None] - x[:, None]
    weight = m * ((d * d).sum(-1) + 1e-2) ** -1.5
    return (d * weight[..., None]).sum(1)


def gravity_of_rows(x: Any, m: Any) -> Any:
    """The coordinates are the major dimension."""
    d = x[:, None, :] - x[:, :, None]
    return (d * (m * ((d * d).sum(0) + 1e-2) ** -1.5)).sum(-1)


def leapfrog(x: Any, m: Any) -> Any:
    v = 0.5 * gravity(x, m)
    x = x + 0.1 * v
    return x, v + 0.5 * gravity(x, m)


def lennard_jones(x: Any, m: Any) -> Any:
    def energy(x: Any) -> Any:
        d = x[:, None] - x[None]
        r2 = (d * d).sum(-1) + 1
        s = 1 / r2**3
        return (m * (s * s - s)).sum()

    return jax.grad(energy)(x)


def nearest(x: Any, m: Any) -> Any:
    return (((x[:, None] - x[None] + 0.5) ** 2).sum(-1) * m).min(1)


# The function, whether the coordinates are the minor dimension, and how many kernels it may take: a reduction in parts
# has one that puts them together, and what follows both directions of pairs another.
PROGRAMS = [
    (gravity, True, 1),
    (gravity_of_rows, False, 1),
    (leapfrog, True, 2),
    (lennard_jones, True, 2),
    (nearest, True, 1),
]


def module_of(function: Function, *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Module:
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return for_accelerator(import_module(hlo_bytes(function, *arguments)))


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize(("function", "is_minor", "kernels"), PROGRAMS)
def test_no_array_of_pairs_is_in_memory(
    function: Function, is_minor: bool, kernels: int, dims: int, rng: np.random.Generator
) -> None:
    shape = (N, dims) if is_minor else (dims, N)
    module = module_of(function, shape, (N,))
    plan = accelerator_plan.build(module.entry, (), torch.device("cpu"), TARGET)
    assert sum(step.enqueues for step in plan.steps) <= kernels
    points, masses = rng.standard_normal(shape), rng.uniform(0.5, 1, N)
    narrow = [torch.empty(a.shape).copy_(torch.from_numpy(a)) for a in (points, masses)]
    with torch.inference_mode():
        found, most = run_and_count(plan, narrow)
    assert most <= plan.temporary_bytes < PAIRS // 4
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        wide = [jnp.asarray(a.numpy(), jnp.float64) for a in narrow]
        expected = jax.tree.leaves(jax.jit(function)(*wide))
    for result, truth in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, truth, rtol=1e-4, atol=1e-5 * float(np.abs(truth).max()))


def mean_of_channels(x: Any) -> Any:
    return x.mean((1, 2))


def softmax_of_four(x: Any) -> Any:
    return jax.nn.softmax(x, -1)


def narrow_sum(x: Any) -> Any:
    return lax.reduce((x[:, None] - x[None]) ** 2, jnp.bfloat16(0), lax.add, (2,)).max(1)


def regions_of(module: Module, with_channels: bool) -> list[Region]:
    flat = flatten(module.entry)
    fused = fuse(flat, POLICY)
    items = with_unrolled_channels(flat, fused).items if with_channels else fused.items
    return [item for item in items if isinstance(item, Region)]


def values_of(region: Region, rng: np.random.Generator, special: bool = False) -> dict[Instruction, torch.Tensor]:
    """Random ones, but for constants."""
    values = arrays([region], rng, special)
    for array in values:
        if array.opcode is Opcode.CONSTANT and isinstance(array.shape, ArrayShape):
            values[array] = from_bytes(array.attributes_as(ConstantAttributes).data, array.shape).reshape(-1)
    return values


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_unrolled_regions_store_the_same(number: int, rng: np.random.Generator) -> None:
    function, is_minor, _ = PROGRAMS[number]
    module = module_of(function, (N, 3) if is_minor else (3, N), (N,))
    before, after = (regions_of(module, with_channels) for with_channels in (False, True))
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a is not b]
    assert changed
    for a, b in changed:
        for special in (False, True):
            for found in compare([a], [b], values_of(a, rng, special)).values():
                assert found.is_same or found.exact <= 2.0**-40


def test_every_short_dimension_can_be_unrolled(rng: np.random.Generator) -> None:
    """Whether it pays or not: of integers and truth values, maxima and products, too."""

    def several(x: Any) -> Any:
        y = x.reshape(5, 3, 2, 4)
        n = jnp.round(y * 4).astype(jnp.int32)
        return y.max(1), (y * n).prod((0, 3)), (n ^ 5).sum(2), jnp.any(n > 2, 3), jnp.sin(y) + y.min(0, keepdims=True)

    count = 0
    for region in regions_of(module_of(several, (5, 24)), with_channels=False):
        for d, size in enumerate(region.dims):
            if 1 < size <= 5:
                count += 1
                for found in compare([region], [unrolled(region, d)], values_of(region, rng)).values():
                    assert found.is_same or found.exact <= 2.0**-40
    assert count > 8


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (softmax_of_four, (32768, 4), jnp.float32),  # whole rows from memory and back
        (lambda x: x.sum(-1), (32768, 3), jnp.float32),
        (narrow_sum, (N, 3), jnp.bfloat16),  # added up wider
        (lambda x: ((x[:, None] - x[None]) ** 2).sum(-1).max(1), (N // 8, 3), jnp.float32),  # too few points
        (lambda x: ((x[:, None] - x[None]) ** 2).sum(-1).max(1), (N, 8), jnp.float32),  # too long
    ],
)
def test_what_stays_as_it_is(function: Function, shape: tuple[int, ...], dtype: Any) -> None:
    module = module_of(function, shape, dtype=dtype)
    for a, b in zip(*(regions_of(module, unroll) for unroll in (False, True)), strict=True):
        assert a.dims == b.dims and len(a.stores) == len(b.stores)


def test_a_mean_of_channels_reads_an_image_once(rng: np.random.Generator) -> None:
    module = module_of(mean_of_channels, (2, 128, 128, 3))
    flat = flatten(module.entry)
    (region,) = [item for item in SCHEDULE.schedule(flat, TARGET).items if isinstance(item, Region)]
    assert len(region.reductions) == 3
    plan = accelerator_plan.build(module.entry, (), torch.device("cpu"), TARGET)
    image = rng.standard_normal((2, 128, 128, 3)).astype(np.float32)
    with torch.inference_mode():
        (found,) = plan.run(Run(), [torch.empty(image.shape).copy_(torch.from_numpy(image))])
    np.testing.assert_allclose(found, image.astype(np.float64).mean((1, 2)), rtol=1e-4, atol=1e-6)
