"""Fused schedules compute what stock XLA computes, in as few regions as they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.fusion.fuse import fuse
from flagos_backend.fusion.policy import ACCELERATOR, HOST, MAX_OPERATIONS, Policy
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.flat import FlatComputation, flatten
from flagos_backend.loop_ir.region import Apply, Load, Region
from programs import hlo_bytes, run_on_xla
from support.regions import evaluate


def schedule_of(
    function: Callable[..., Any], *arguments: np.ndarray, policy: Policy = HOST
) -> tuple[FlatComputation, Schedule, bytes]:
    hlo = hlo_bytes(function, *arguments)
    flat = flatten(import_module(hlo).entry)
    return flat, fuse(flat, policy), hlo


def check(function: Callable[..., Any], *arguments: np.ndarray, policy: Policy = HOST) -> list[Any]:
    """Compares with stock XLA and returns the schedule's items."""
    flat, schedule, hlo = schedule_of(function, *arguments, policy=policy)
    expected = run_on_xla(hlo, arguments)
    for ours, theirs in zip(evaluate(flat, schedule, list(arguments)), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    return list(schedule.items)


def test_elementwise_chain_is_one_region(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 5, 7)).astype(np.float32)
    (region,) = check(lambda x, y: jnp.exp(x * 2 - y) / (y * y + 1), x, y)
    assert isinstance(region, Region)
    assert region.dims == (5, 7)


def test_broadcast_row_and_column_are_loads_with_zero_strides(rng: np.random.Generator) -> None:
    x, row, column = (rng.standard_normal(s).astype(np.float32) for s in ((5, 7), (7,), (5, 1)))
    (region,) = check(lambda x, row, column: x * row + column, x, row, column)
    strides = {e.index.coefficients for e in region.expressions() if isinstance(e, Load)}
    assert strides == {(7, 1), (0, 1), (1, 0)}


@pytest.mark.parametrize("policy", [HOST, ACCELERATOR])
@pytest.mark.parametrize(
    ("step", "on_numpy"),
    [
        pytest.param(lambda x: x[:, 1:], None, id="slices"),
        pytest.param(lambda x: x[::-1].T, None, id="reverses and transposes"),
        pytest.param(lambda x: x.reshape(x.shape[::-1])[::-1], None, id="reverses and reshapes"),
        pytest.param(
            lambda x: lax.dynamic_slice(x, (0, 1), (x.shape[0], x.shape[1] - 1)), lambda x: x[:, 1:], id="windows"
        ),
        pytest.param(lambda x: (x * 2)[:, 1:], None, id="products and slices"),
        pytest.param(lambda x: (x + 1).T, None, id="sums and transposes"),
        pytest.param(
            lambda x: lax.select(x > 2, x, -x)[:, 1:], lambda x: np.where(x > 2, x, -x)[:, 1:], id="choices and slices"
        ),
    ],
)
def test_chains_longer_than_calls_can_be_deep(
    step: Callable[[Any], Any], on_numpy: Callable[[np.ndarray], np.ndarray] | None, policy: Policy, rng: Any
) -> None:
    """Of some of which XLA's own compiler overflows the stack."""

    def repeated(x: Any, step: Callable[[Any], Any]) -> Any:
        for _ in range(500):
            x = step(x)
        return x

    x = rng.integers(-9, 9, (3, 503)).astype(np.float32)
    flat, schedule, _ = schedule_of(lambda x: repeated(x, step), x, policy=policy)
    (result,) = evaluate(flat, schedule, [x])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(result, repeated(x, on_numpy or step))


def test_what_is_reached_by_several_movements_is_computed_once(rng: np.random.Generator) -> None:
    s, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((64,), (64, 8, 2)))

    def function(s: jax.Array, b: jax.Array) -> jax.Array:
        m = -s * s + 1
        u = lax.broadcast_in_dim(m, (64, 8), (0,)) * b[:, :8, 0]
        return lax.broadcast_in_dim(u, b.shape, (0, 1)) * b + lax.broadcast_in_dim(m, b.shape, (0,))

    (region,) = check(function, s, b, policy=ACCELERATOR)
    assert sum(isinstance(e, Apply) for e in region.expressions()) == 6


def scaled(x: jax.Array, variance: jax.Array, scale: jax.Array) -> jax.Array:
    return x * (lax.rsqrt(variance + 0.1) * scale)


@pytest.mark.parametrize(("policy", "regions"), [(HOST, 2), (ACCELERATOR, 1)])
def test_factors_of_rows_are_repeated_on_accelerators(policy: Policy, regions: int, rng: np.random.Generator) -> None:
    x, variance, scale = (rng.random(s).astype(np.float32) for s in ((5, 7), (7,), (7,)))
    assert len(check(scaled, x, variance, scale, policy=policy)) == regions


@pytest.mark.parametrize(
    ("function", "regions"),
    [
        # Not what is long to compute, nor what a region has made, nor what is as large as what reads it.
        (lambda x, v: x * jnp.log(v), 2),
        (lambda x, v: x * lax.rsqrt(v.sum()), 3),
        (lambda x, v: (lambda w: (x * w, w))(lax.rsqrt(v)), 2),
        (lambda x, v: x[0] * lax.rsqrt(v) + 1, 1),
    ],
)
def test_what_is_not_repeated(function: Callable[..., Any], regions: int, rng: np.random.Generator) -> None:
    x, v = rng.random((5, 7)).astype(np.float32), rng.random(7).astype(np.float32) + 1
    assert len(check(function, x, v, policy=ACCELERATOR)) == regions


@pytest.mark.parametrize(("policy", "regions"), [(HOST, 2), (ACCELERATOR, 1)])
def test_many_narrow_factors_are_widened_where_they_are_read(
    policy: Policy, regions: int, rng: np.random.Generator
) -> None:
    size = ACCELERATOR.repeated_elements + 5
    x, factors = rng.random((2, size)).astype(np.float32), rng.random(size).astype(np.float16)
    assert len(check(lambda x, f: x * f.astype(x.dtype), x, factors, policy=policy)) == regions
    assert len(check(lambda x, f: x * lax.sqrt(f.astype(x.dtype)), x, factors, policy=policy)) == 2
    assert len(check(lambda x, f: x.astype(np.float16) * f.astype(np.float16), x, x[0], policy=policy)) == 2


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.T + 1,
        lambda x: x[1:5:2, ::-1] * 2,
        lambda x: x.reshape(3, 2, 4).transpose(1, 0, 2) + 1,
        lambda x: x.reshape(-1)[3:17] + 1,
        lambda x: (x + 1).reshape(2, 12) * 2,
        lambda x: (x.T + 1).reshape(24),
        lambda x: x[None, :, None, :] + jnp.arange(3)[:, None, None, None],
        lambda x: jnp.broadcast_to(x[:, None, :], (6, 3, 4)).reshape(18, 4) - 1,
        lambda x: lax.rev(x, (0, 1)).T,
    ],
)
def test_data_movement(move: Callable[..., Any], rng: np.random.Generator) -> None:
    check(move, rng.standard_normal((6, 4)).astype(np.float32))


def test_movement_costs_no_region_of_its_own(rng: np.random.Generator) -> None:
    items = check(lambda x: x.T[1:3, ::-1] + 1, rng.standard_normal((6, 4)).astype(np.float32))
    assert len(items) == 1


def test_softmax_is_two_reductions_and_two_loops(rng: np.random.Generator) -> None:
    items = check(lambda x: jax.nn.softmax(x, axis=-1), rng.standard_normal((5, 33)).astype(np.float32))
    assert sum(bool(item.reductions) for item in items) == 2


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_reductions_over_any_dimensions(axes: tuple[int, ...], rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 5, 6)).astype(np.float32)
    check(lambda x: (jnp.sum(x * x, axes), jnp.max(x.transpose(2, 0, 1), axes)), x)


def test_concatenate_and_pad_write_parts_of_one_buffer(rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4), (3, 2)))
    items = check(lambda x, y: jnp.concatenate([x * 2, y, x], axis=1) + 1, x, y)
    assert len({store.target for item in items for store in item.stores}) == 2
    check(lambda x: lax.pad(x + 1, -3.0, ((1, 2, 1), (0, 3, 0))), x)


def test_value_with_two_readers_is_computed_once(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.exp(x)
        return y.sum(0), y.T * 3

    items = check(function, rng.standard_normal((4, 6)).astype(np.float32))
    computed = [e for item in items for e in item.expressions() if isinstance(e, Apply) and e.opcode is Opcode.EXP]
    assert len(computed) == 1


def test_value_is_not_recomputed_for_each_element_it_is_broadcast_to(rng: np.random.Generator) -> None:
    items = check(
        lambda x, y: jnp.exp(y)[None, :] * x, *(rng.standard_normal(s).astype(np.float32) for s in ((64, 8), 8))
    )
    assert [item.dims for item in items] == [(8,), (64, 8)]


def test_long_chains_are_cut(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> jax.Array:
        for _ in range(100):
            x = x * 1.01 + 0.5
        return x

    items = check(function, rng.standard_normal(10).astype(np.float32))
    assert len(items) > 1
    assert all(sum(isinstance(e, Apply) for e in item.expressions()) <= MAX_OPERATIONS + 1 for item in items)


def test_products_stay_calls_between_regions(rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4, 5), (5, 6)))
    items = check(lambda x, w: jnp.tanh(jnp.einsum("bik,kj->bij", x, w)) + 1, x, w)
    assert [isinstance(item, Region) for item in items] == [False, True]


def test_results_that_are_arguments_or_constants(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 3)).astype(np.float32)
    flat, schedule, _ = schedule_of(lambda x: (x, x, jnp.arange(3) * 0 + 7, x.reshape(6)), x)
    outputs = evaluate(flat, schedule, [x])
    np.testing.assert_array_equal(outputs[0], x)
    np.testing.assert_array_equal(outputs[3], x.reshape(6))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_odd_shapes(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = np.asarray(rng.standard_normal(shape), np.float32)
    check(lambda x: (x * 2 + 1, jnp.sum(x), jnp.ravel(x) + 1), x)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.bool_])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 5, 6])
def test_what_alternates_is_written_once(size: int, axis: int, dtype: type, rng: np.random.Generator) -> None:
    """As associative scans put together what they have of even and odd places: no pad is written before."""
    dims = tuple(size if d == axis else n for d, n in enumerate((3, 4, 2)))
    x = rng.integers(0, 2 if dtype is np.bool_ else 100, dims).astype(dtype)

    def function(x: jax.Array) -> jax.Array:
        even, odd = (lax.slice_in_dim(x, start, size, 2, axis) for start in (0, 1))
        return alternating(even ^ odd[:1, :1, :1] if dtype is np.bool_ else even + even, odd, axis)

    regions = check(function, x)
    assert sum(isinstance(item, Region) for item in regions) == len(regions) == 2
    targets = {store.target for region in regions for store in region.stores}
    assert len(targets) == 1


def alternating(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """As jax.lax.associative_scan has it."""
    more = a.shape[axis] - b.shape[axis]
    join = lax.bitwise_or if a.dtype == np.bool_ else lax.add
    zero = np.zeros((), a.dtype)
    pads = [[(0, 0, 0)] * a.ndim for _ in range(2)]
    pads[0][axis], pads[1][axis] = (0, 1 - more, 1), (1, more, 1)
    return join(lax.pad(a, zero, pads[0]), lax.pad(b, zero, pads[1]))


def test_negative_zeros_that_alternate(rng: np.random.Generator) -> None:
    """A sum with zero makes them zeros."""
    x = np.array([-0.0, 0.0, -1.0, np.nan, -np.inf], np.float32)
    flat, schedule, _ = schedule_of(lambda x: alternating(x, -x, 0), x)
    (ours,) = evaluate(flat, schedule, [x])
    expected = np.stack([x, -x], 1).reshape(-1) + np.float32(0)
    np.testing.assert_array_equal(np.asarray(ours).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 1, 1), (0, 1, 1)),  # both at even places
        ((0, 3, 2), (1, 2, 2)),  # the third of three places is nobody's
        ((4, 0, 0), (0, 4, 0)),  # one behind the other
    ],
    ids=str,
)
def test_what_does_not_alternate(
    first: tuple[int, int, int], second: tuple[int, int, int], rng: np.random.Generator
) -> None:
    x, y = rng.standard_normal((2, 4, 3)).astype(np.float32)
    rows = (0, 0, 0)
    check(lambda x, y: lax.pad(x, np.float32(0), [first, rows]) + lax.pad(y, np.float32(0), [second, rows]), x, y)


def test_pads_with_other_numbers_are_added(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 4)).astype(np.float32)
    check(lambda x, y: lax.pad(x, np.float32(0), [(0, 1, 1)]) + lax.pad(y, np.float32(2), [(1, 0, 1)]), x, y)
