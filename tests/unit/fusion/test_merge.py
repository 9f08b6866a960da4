"""Merged schedules compute what stock XLA computes, in as few regions and with as few stores as they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.fusion.fuse import fuse
from flagos_backend.fusion.merge import MAX_BUFFERS, MAX_OPERATIONS, merge
from flagos_backend.fusion.policy import ACCELERATOR
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Apply, Load, Region
from flagos_backend.passes.pipelines import optimize
from programs import hlo_bytes, run_on_xla
from support.against_xla import hlo_of_text
from support.regions import evaluate


def check(
    function: Callable[..., Any], *arguments: np.ndarray, accepts: Callable[[Region], bool] = lambda region: True
) -> list[Any]:
    """Compares with stock XLA and returns the merged schedule's items."""
    hlo = hlo_bytes(function, *arguments)
    flat = flatten(optimize(import_module(hlo)).entry)
    schedule = merge(flat, fuse(flat, ACCELERATOR), accepts)
    for ours, theirs in zip(evaluate(flat, schedule, list(arguments)), run_on_xla(hlo, arguments), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    return list(schedule.items)


def f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def normalize(x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


def test_reductions_over_the_same_rows_join(rng: np.random.Generator) -> None:
    (region,) = check(lambda x: jax.nn.softmax(x, -1), f32(rng, 5, 33))
    assert len(region.reductions) == 2
    assert len(region.stores) == 1


def test_nothing_joins_that_the_emitter_does_not_take(rng: np.random.Generator) -> None:
    x = f32(rng, 5, 33)
    refused = check(lambda x: jax.nn.softmax(x, -1), x, accepts=lambda region: False)
    assert len(refused) == 5


def test_rows_of_rows_have_common_dimensions(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> jax.Array:
        total = x.reshape(6, 4, 5).sum(-1)  # (24, 5) seen as (6, 4, 5)
        return x / total.reshape(24, 1)

    (region,) = check(function, np.abs(f32(rng, 24, 5)))
    assert region.dims == (6, 4, 5)


def test_a_rows_values_wait_for_the_row(rng: np.random.Generator) -> None:
    """Labels and sums of rows stay with the gradient, which needs the exponentials too: were they part of the loss, the
    gradient would wait for it, and the exponentials be written."""

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), labels[:, None], -1).mean()

    rows, total = check(jax.value_and_grad(loss), f32(rng, 12, 40), rng.integers(-40, 40, (12,), dtype=np.int32))
    assert [len(store.index.dims) for store in rows.stores].count(2) == 1
    assert total.dims == (12,)


def test_rows_of_a_table_are_loaded_where_they_are_used(rng: np.random.Generator) -> None:
    table, ids = f32(rng, 30, 8), rng.integers(0, 30, (2, 6), dtype=np.int32)
    (region,) = check(lambda t, ids: normalize(t[ids]), table, ids)
    assert len(region.stores) == 1
    positions = [load.index for load in region.expressions() if isinstance(load, Load) and load.index.starts]
    assert positions and all(region.along(index) == {0, 1, 2} for index in positions)


def test_shapes_whose_steps_do_not_divide_each_other_stay_apart(rng: np.random.Generator) -> None:
    assert (
        len(check(lambda x: jnp.exp(x).reshape(4, 6).sum(1) + jnp.exp(x).reshape(6, 4).max(1).sum(), f32(rng, 24))) > 1
    )


def test_rows_and_columns_of_one_array_join(rng: np.random.Generator) -> None:
    (region,) = check(
        lambda x, y: ((x * y).sum(0), (x - (x * y).mean(1, keepdims=True))), f32(rng, 6, 8), f32(rng, 6, 8)
    )
    assert {reduction.dims for reduction in region.reductions} == {(0,), (1,)}


def test_a_value_needed_on_the_way_is_not_passed_by(rng: np.random.Generator) -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.exp(x)
        return y + jnp.tanh(y @ w)

    items = check(function, f32(rng, 6, 6), f32(rng, 6, 6))
    assert [isinstance(item, Region) for item in items] == [True, False, True]


def test_parts_of_one_buffer_keep_their_order(rng: np.random.Generator) -> None:
    check(lambda x: lax.pad(jnp.exp(x), 2.0, ((1, 2, 1), (0, 3, 0))) * 2 + 1, f32(rng, 4, 5))
    check(lambda x, y: jnp.concatenate([x + y, y * 2, x], 0).sum(0), f32(rng, 3, 4), f32(rng, 3, 4))


@pytest.mark.parametrize("layers", [2, 8])
def test_deep_programs_fuse_to_the_end(layers: int, rng: np.random.Generator) -> None:
    """Residuals that the backward pass reads put hundreds of steps between a value and its last reader."""

    def loss(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for weight in weights:
            x = x + jnp.tanh(normalize(x) @ weight)
        return (x * x).sum()

    def function(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        return jax.grad(loss, argnums=1)(x, list(weights))

    items = check(function, f32(rng, 6, 8), *(f32(rng, 8, 8) * 0.1 for _ in range(layers)))
    regions = [item for item in items if isinstance(item, Region)]
    assert len(regions) <= 3 * layers + 2


def test_what_has_effects_keeps_its_order() -> None:
    """The sine and its cosine would be one region, behind the second call and before the first, which reads a sine."""
    text = """ENTRY e { x = f32[64] parameter(0)
      y = f32[64] parameter(1)
      s = f32[64] sine(x)
      first = f32[64] custom-call(s), custom_call_target="draw", custom_call_has_side_effect=true
      second = f32[64] custom-call(y), custom_call_target="draw", custom_call_has_side_effect=true
      c = f32[64] cosine(s)
      d = f32[64] multiply(c, second)
      ROOT r = (f32[64], f32[64], f32[64]) tuple(first, s, d) }"""

    def calls(text: str) -> list[str]:
        flat = flatten(import_module(hlo_of_text(text)).entry)
        items = merge(flat, fuse(flat, ACCELERATOR), lambda region: True).items
        return [item.name for item in items if not isinstance(item, Region)]

    assert calls(text) == ["first", "second"]
    assert calls(text.replace(", custom_call_has_side_effect=true", "")) == ["second", "first"]


def opcodes(region: Region) -> list[str]:
    return [e.opcode.value for e in region.expressions() if isinstance(e, Apply)]


def test_what_is_cheap_to_compute_again_is_not_stored(rng: np.random.Generator) -> None:
    def function(x: jax.Array, row: jax.Array, w: jax.Array) -> jax.Array:
        moved = x - row
        return jnp.exp(jnp.tanh(moved) @ w) * moved

    first, _, last = check(function, f32(rng, 16, 16), f32(rng, 16), f32(rng, 16, 16))
    assert len(first.stores) == 1
    assert "subtract" in opcodes(last)


def test_what_is_expensive_to_compute_again_is_stored(rng: np.random.Generator) -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        return jnp.exp((y * 2) @ w) * y

    first, _, last = check(function, f32(rng, 6, 6), f32(rng, 6, 6))
    assert len(first.stores) == 2
    assert "tanh" not in opcodes(last)


def test_what_takes_more_to_read_than_it_is_is_stored(rng: np.random.Generator) -> None:
    def function(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        both = x + y
        return jnp.exp(jnp.tanh(both) @ w) * both

    first, _, _ = check(function, f32(rng, 6, 6), f32(rng, 6, 6), f32(rng, 6, 6))
    assert len(first.stores) == 2


def test_regions_keep_within_limits(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> jax.Array:
        for n in range(130):
            x = lax.select(lax.gt(x, float(n) + x * 0), x * 1.01, x + 0.5)
        return x

    items = check(function, f32(rng, 10))
    assert 1 < len(items) < 10
    for item in items:
        assert sum(isinstance(e, Apply) for e in item.expressions()) <= MAX_OPERATIONS
    many = check(lambda *xs: [x + 1 for x in xs], *(f32(rng, 3) for _ in range(40)))
    for item in many:
        assert len({e.source for e in item.expressions() if isinstance(e, Load)}) + len(item.stores) <= MAX_BUFFERS
