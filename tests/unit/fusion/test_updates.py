"""Dynamic slices and their updates in schedules: which regions they become, and in which order. The oracle of values is
stock XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.codegen.triton.tiling import supports
from flagos_backend.fusion.fuse import fuse
from flagos_backend.fusion.merge import merge
from flagos_backend.fusion.policy import ACCELERATOR, HOST, Policy
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.updates import copied, sources, targets
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Load, Region
from flagos_backend.passes.pipelines import optimize
from programs import hlo_bytes, run_on_xla
from support.regions import evaluate


def schedules(function: Callable[..., Any], *arguments: Any, policy: Policy = ACCELERATOR) -> tuple[Schedule, Schedule]:
    """As fused and as merged; compares both with stock XLA."""
    arrays = [np.asarray(a) for a in arguments]
    hlo = hlo_bytes(function, *arrays)
    flat = flatten(optimize(import_module(hlo)).entry)
    fused = fuse(flat, policy)
    merged = merge(flat, fused, lambda region: True, expensive_launches=True)
    for schedule in (fused, merged):
        for ours, theirs in zip(evaluate(flat, schedule, arrays), run_on_xla(hlo, arrays), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    return fused, merged


def names(schedule: Schedule) -> list[str]:
    """What each item makes; ``copy`` where it only begins an update."""
    return [
        "copy" if copied(item) else "+".join(t.name.split(".")[0] for t in targets(item)) for item in schedule.items
    ]


def f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def update(x: jax.Array, y: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, y, (i, 0))


def test_the_host_has_its_own_way(rng: np.random.Generator) -> None:
    hlo = hlo_bytes(lambda x, i: lax.dynamic_slice(x, (i,), (3,)) * 2, f32(rng, 9), np.int32(1))
    items = fuse(flatten(optimize(import_module(hlo)).entry), HOST).items
    assert [item.opcode.value for item in items if not isinstance(item, Region)] == ["dynamic-slice"]


@pytest.mark.parametrize("i", [-20, -1, 0, 2, 6, 30])
def test_starts_are_computed_where_they_are_needed(i: int, rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, (i, i * 2), (3, 4)).T + 1

    fused, _ = schedules(function, f32(rng, 9, 8), np.int32(i))
    (region,) = fused.items
    assert isinstance(region, Region)
    (load,) = [e for e in region.expressions() if isinstance(e, Load) and e.index.shifts]
    assert {(shift.limit, shift.factor) for shift in load.index.shifts} == {(6, 8), (4, 1)}


def test_constant_starts_are_offsets(rng: np.random.Generator) -> None:
    fused, _ = schedules(lambda x: lax.dynamic_slice(x, (jnp.int32(7), 99), (3, 4)) + 1, f32(rng, 9, 8))
    (region,) = fused.items
    assert isinstance(region, Region)
    (load,) = [e for e in region.expressions() if isinstance(e, Load)]
    assert (load.index.offset, load.index.shifts) == (6 * 8 + 4, ())


def test_what_is_only_sliced_is_computed_there_alone(rng: np.random.Generator) -> None:
    fused, _ = schedules(lambda x, i: lax.dynamic_slice(jnp.exp(x), (i,), (3,)), f32(rng, 50), np.int32(8))
    assert [item.dims for item in fused.items if isinstance(item, Region)] == [(3,)]


def test_an_update_begins_with_its_array(rng: np.random.Generator) -> None:
    arguments = f32(rng, 9, 5), f32(rng, 2, 5), np.int32(3)
    fused, merged = schedules(lambda x, y, i: update(x, jnp.exp(y), i), *arguments)
    assert names(fused) == names(merged) == ["copy", "dynamic_update_slice"]
    fused, _ = schedules(lambda x, y, i: update(x * 2, y, i), *arguments)
    assert names(fused) == ["dynamic_update_slice"] * 2, "computed where it is updated"


def test_an_update_that_reads_its_array_is_computed_before(rng: np.random.Generator) -> None:
    fused, merged = schedules(lambda x, i: update(x, x[3:5] * 2, i), f32(rng, 9, 5), np.int32(1))
    assert names(fused) == names(merged) == ["mul", "copy", "dynamic_update_slice"]
    *_, last = merged.items
    assert isinstance(last, Region)
    assert "mul" in {source.name.split(".")[0] for source in sources(last)}


def test_what_reads_an_array_comes_before_its_update(rng: np.random.Generator) -> None:
    def function(x: jax.Array, y: jax.Array, i: jax.Array) -> tuple[jax.Array, ...]:
        changed = update(x, y, i)
        return jnp.exp(changed), jnp.tanh(x), x.sum()

    fused, merged = schedules(function, f32(rng, 9, 5), f32(rng, 2, 5), np.int32(1))
    for schedule in (fused, merged):
        assert names(schedule).index("copy") > max(
            number for number, name in enumerate(names(schedule)) if "tanh" in name or "reduce" in name
        )


def test_what_needs_the_update_too_stays_behind_it(rng: np.random.Generator) -> None:
    fused, _ = schedules(lambda x, y, i: update(x, y, i) - x[::-1], f32(rng, 9, 5), f32(rng, 2, 5), np.int32(1))
    assert names(fused) == ["copy", "dynamic_update_slice", "sub"]


def test_updates_are_stored_by_what_computes_them(rng: np.random.Generator) -> None:
    def function(x: jax.Array, wide: jax.Array, y: jax.Array, i: jax.Array) -> tuple[jax.Array, ...]:
        y = jnp.exp(y)
        return update(x, y, i), update(wide, y * 2, i), y

    _, merged = schedules(function, f32(rng, 9, 5), f32(rng, 7, 5), f32(rng, 2, 5), np.int32(1))
    assert len(merged.items) == 3, "two copies, unless the arrays may be written over, and one region"


def test_scalars_are_computed_where_they_are_used(rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(x) * jnp.exp(i.astype(jnp.float32)), i + 1

    _, merged = schedules(function, f32(rng, 6, 5), np.int32(2))
    (region,) = merged.items
    assert isinstance(region, Region)
    assert {store.index.coefficients for store in region.stores} == {(5, 1), (0, 0)}


def test_parts_of_one_size_are_put_together_at_once(rng: np.random.Generator) -> None:
    x, y = f32(rng, 6, 5), f32(rng, 6, 5)
    assert len(schedules(lambda x, y: jnp.concatenate((x, y * 2), 1), x, y)[1].items) == 1
    assert len(schedules(lambda x, y: jnp.concatenate((x, jnp.tanh(y[:4])), 0), x, y)[1].items) == 2

    def dependent(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.concatenate((x, jnp.tanh(x) @ w), 1)

    assert len(schedules(dependent, x, f32(rng, 5, 5))[1].items) == 3


def test_what_is_split_is_computed_part_by_part(rng: np.random.Generator) -> None:
    def function(x: jax.Array, bias: jax.Array) -> jax.Array:
        a, b = jnp.split(x + bias, 2, axis=1)
        return jnp.tanh(a) * b

    assert len(schedules(function, f32(rng, 6, 8), f32(rng, 8))[0].items) == 1

    def overlapping(x: jax.Array, bias: jax.Array) -> jax.Array:
        y = jnp.exp(x + bias)
        return y[:, 1:] * y[:, :-1]

    fused, _ = schedules(overlapping, f32(rng, 6, 8), f32(rng, 8))
    assert len(fused.items) == 2, "each exponential once"


def test_a_reduction_is_no_start_within_its_own_region(rng: np.random.Generator) -> None:
    hlo = hlo_bytes(lambda x: lax.dynamic_slice(x, (x.sum().astype(np.int32),), (30,)) + 1, f32(rng, 40))
    flat = flatten(optimize(import_module(hlo)).entry)
    for item in merge(flat, fuse(flat, ACCELERATOR), supports, expensive_launches=True).items:
        assert isinstance(item, Region)
        assert not item.reductions or not any(isinstance(e, Load) and e.index.shifts for e in item.expressions())
