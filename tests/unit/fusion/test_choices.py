"""Which operand of a concatenate or a pad has an element, evaluated with NumPy; what no guard lets in is NaN there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.fusion.fuse import fuse
from flagos_backend.fusion.policy import ACCELERATOR, HOST, Policy
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Load, Region
from flagos_backend.passes.pipelines import optimize
from programs import hlo_bytes, run_on_xla
from support.regions import evaluate


def regions(function: Callable[..., Any], *arguments: np.ndarray, policy: Policy = ACCELERATOR) -> list[Region]:
    """Those of ``function``, which give what stock XLA does."""
    hlo = hlo_bytes(function, *arguments)
    flat = flatten(optimize(import_module(hlo)).entry)
    schedule = fuse(flat, policy)
    for ours, theirs in zip(evaluate(flat, schedule, list(arguments)), run_on_xla(hlo, list(arguments)), strict=True):
        np.testing.assert_allclose(ours.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-6)
    return [item for item in schedule.items if isinstance(item, Region)]


def loads(region: Region) -> list[Load]:
    return [e for e in region.expressions() if isinstance(e, Load)]


def f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def test_only_policies_with_guards_choose(rng: np.random.Generator) -> None:
    x, y = f32(rng, 4, 5), f32(rng, 4, 3)
    for policy, count in ((ACCELERATOR, 1), (HOST, 3)):
        found = regions(lambda x, y: jnp.concatenate([x, y], 1) * 2, x, y, policy=policy)
        assert len(found) == count
        guards = [load.guard for region in found for load in loads(region)]
        assert all(guards) if policy.chooses else not any(guards)


def test_of_one_value_the_index_is_chosen(rng: np.random.Generator) -> None:
    x = f32(rng, 5, 7)
    for function in (
        lambda x: jnp.roll(x, (2, -3), (0, 1)) * 2,
        lambda x: jnp.pad(x, ((0, 0), (2, 3)), "reflect") + 1,
        lambda x: jnp.concatenate([x, x[1:3]], 0) + 1,
    ):
        (region,) = regions(function, x)
        (load,) = loads(region)
        assert load.guard is None
        assert load.index.shifts


def test_what_bounds_tell_is_not_asked(rng: np.random.Generator) -> None:
    x, y = f32(rng, 4, 5), f32(rng, 4, 3)
    (region,) = regions(lambda x, y: jnp.concatenate([x, y], 1)[:, 5:] * 2, x, y)
    assert [load.source.name for load in loads(region)] == ["y.1"]
    assert loads(region)[0].guard is None
    (region,) = regions(lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 1)))[:, ::2] * 2, x)
    assert loads(region)[0].guard is None


@pytest.mark.parametrize("padding", [(0, 0, 1), (2, 1, 2), (-1, 3, 1), (1, -2, 0), (-2, -1, 3)])
def test_pads_of_every_kind(padding: tuple[int, int, int], rng: np.random.Generator) -> None:
    x = f32(rng, 4, 6)
    (region,) = regions(lambda x: lax.pad(x, 2.0, ((1, 0, 0), padding)) * 2, x)
    assert len(loads(region)) == 1


def test_a_guard_holds_where_those_around_it_do(rng: np.random.Generator) -> None:
    """Concatenates of pads of concatenates, whose innermost indices lie outside at most points."""
    x, y = f32(rng, 4, 3), f32(rng, 4, 2)

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        inner = jnp.pad(jnp.concatenate([x, -y], 1), ((1, 2), (0, 3)))
        return jnp.concatenate([jnp.pad(jnp.concatenate([y, x], 1)[::-1], ((3, 0), (1, 1))), inner], 1) * 2

    assert len(regions(function, x, y)) == 1


def test_expensive_operands_are_buffers(rng: np.random.Generator) -> None:
    x, y = f32(rng, 4, 5), f32(rng, 4, 3)
    assert len(regions(lambda x, y: jnp.concatenate([jnp.exp(x), y], 1) * 2, x, y)) == 2
    assert len(regions(lambda x, y: jnp.concatenate([jnp.exp(x), jnp.tanh(y)], 1), x, y)) == 2
