"""Windows before what makes their arrays: the program computes what stock XLA does, of the windows' elements alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.cpu.hoist_dynamic_slices import hoist_dynamic_slices
from flagos_backend.passes.dce import eliminate_dead_code
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same, run_module
from support.passes import simplified

ROWS, COLUMNS = 400, 6
# Also where nothing is left to show: they are clamped.
STARTS = (0, 3, ROWS - 1, ROWS, 10**6, -1, -(10**6))


def sunk(function: Callable[..., Any], *arguments: np.ndarray) -> Module:
    hlo = hlo_bytes(function, *arguments)
    module = eliminate_dead_code(hoist_dynamic_slices(simplified(import_module(hlo))))
    verify(module)
    for ours, theirs in zip(run_module(module, arguments), run_on_xla(hlo, arguments), strict=True):
        assert_same(ours, theirs, 2e-6)
    return module


def largest(module: Module) -> int:
    """Elements of the largest array that a computation makes, beside parameters and their elements."""
    given = (Opcode.PARAMETER, Opcode.GET_TUPLE_ELEMENT, Opcode.CONSTANT)
    made = [i.shape for c in module.computations() for i in c.instructions if i.opcode not in given]
    return max(shape.num_elements for shape in made if isinstance(shape, ArrayShape))


def row(x: jax.Array, i: jax.Array, rows: int = 1) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, i, rows)


def table(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, r, c, i: row(jnp.sin(x) * 2 + 1, i), id="operations with numbers"),
        pytest.param(lambda x, r, c, i: row(x * r + c[:, None], i, 3), id="rows and columns"),
        pytest.param(lambda x, r, c, i: row(jnp.where(x > 0, x, r), i, 2), id="choices"),
        pytest.param(lambda x, r, c, i: row(jnp.full_like(x, 3.5), i), id="a number"),
        pytest.param(lambda x, r, c, i: row(jnp.zeros_like(x) + c.sum(), i), id="a computed number"),
        pytest.param(lambda x, r, c, i: row(jnp.broadcast_to(r, x.shape), i, 3), id="a row"),
        pytest.param(lambda x, r, c, i: row(jnp.broadcast_to(c[:, None], x.shape), i, 3), id="a column"),
        pytest.param(lambda x, r, c, i: row(jnp.arange(ROWS) * 3, i, 4), id="positions"),
        pytest.param(lambda x, r, c, i: row(jnp.arange(ROWS, dtype=jnp.uint32) // 3, i, 4), id="unsigned positions"),
        pytest.param(lambda x, r, c, i: row(lax.broadcasted_iota(jnp.int32, x.shape, 1) + 1, i), id="across"),
        pytest.param(lambda x, r, c, i: row(jnp.cos(jnp.sort(x, 0)), i), id="of what is made as a whole"),
        pytest.param(lambda x, r, c, i: (row(jnp.exp(x), i), row(jnp.exp(x), i + 1)), id="two windows of one array"),
        pytest.param(lambda x, r, c, i: lax.dynamic_slice(jnp.exp(x), (i, i // 2), (2, 2)), id="in both dimensions"),
    ],
)
def test_small_windows(function: Callable[..., Any], start: int, rng: np.random.Generator) -> None:
    x = table(rng)
    arguments = x, x[0] + 1, x[:, 0] - 1, np.int32(start)
    module = sunk(function, *arguments)
    sorted_at_once = any(i.opcode is Opcode.SORT for i in module.entry.instructions)
    assert largest(module) <= (x.size if sorted_at_once else ROWS // 8)


@pytest.mark.parametrize("start", [3, -1, 127])
@pytest.mark.parametrize(
    ("dtype", "size"), [(np.int8, 300), (np.uint8, 300), (np.int16, 40_000), (np.uint16, 70_000), (np.int64, 300)]
)
def test_starts_that_do_not_reach_the_end(dtype: type[np.integer], size: int, start: int) -> None:
    """Their types do not hold the greatest one that there is."""
    with jax.enable_x64(True):
        x, i = np.zeros(size, np.int32), np.array(start).astype(dtype)
        module = sunk(lambda x, i: lax.dynamic_slice(jnp.arange(size) + 0 * x, (i,), (4,)), x, i)
    assert largest(module) <= 4


def test_in_loops(rng: np.random.Generator) -> None:
    """As a scan over numbers that are all the same, and the gradient of a mean of a scan's results."""
    x, weights = table(rng), (rng.standard_normal((COLUMNS, COLUMNS)) / 4).astype(np.float32)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda h, v: (jnp.tanh(h @ weights + v),) * 2, x[0], x)[1].mean()

    def bodies(module: Module) -> int:
        body = [i for c in module.computations() if c is not module.entry for i in c.instructions]
        whole = [i for i in body if isinstance(i.shape, ArrayShape) and i.shape.num_elements >= x.size]
        return sum(i.opcode not in (Opcode.GET_TUPLE_ELEMENT, Opcode.DYNAMIC_UPDATE_SLICE) for i in whole)

    assert bodies(sunk(jax.grad(loss), weights, x)) == 0
    ones = lambda c: lax.scan(lambda c, v: (c * 0.5 + v, None), c, jnp.ones((ROWS, COLUMNS)))[0]  # noqa: E731
    assert bodies(sunk(ones, x[0])) == 0
    chosen = lambda x: lax.fori_loop(0, ROWS, lambda i, c: c * 0.9 + (x * 2 + 1)[i], x[0])  # noqa: E731
    assert bodies(sunk(chosen, x)) == 0


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, i: row(x, i), id="what lies in memory"),
        pytest.param(lambda x, i: row(jnp.exp(x), i, ROWS // 2), id="a large window"),
        pytest.param(lambda x, i: [row(jnp.exp(x), i + n) for n in range(60)], id="many windows"),
        pytest.param(lambda x, i: (jnp.exp(x), row(jnp.exp(x), i)), id="the array is a result"),
        pytest.param(lambda x, i: (jnp.sort(jnp.exp(x)), row(jnp.exp(x), i)), id="the array is read elsewhere"),
    ],
)
def test_what_stays(function: Callable[..., Any], rng: np.random.Generator) -> None:
    x = table(rng)
    module = simplified(import_module(hlo_bytes(function, x, np.int32(7))))
    assert hoist_dynamic_slices(module) is module


def test_too_many_operations(rng: np.random.Generator) -> None:
    """More than are computed of a window, and than calls can be deep."""

    def function(x: jax.Array, i: jax.Array, count: int) -> jax.Array:
        for _ in range(count):
            x = jnp.sin(x) * x
        return row(x, i)

    for count, stays in ((10, False), (20, True), (800, True)):
        hlo = hlo_bytes(lambda x, i: function(x, i, count), table(rng), np.int32(7))  # noqa: B023
        module = simplified(import_module(hlo))
        assert (hoist_dynamic_slices(module) is module) is stays
