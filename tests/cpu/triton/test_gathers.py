"""Gathers inside generated kernels, alone and with what comes before and after them, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from cpu.triton.harness import run_both
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from programs import hlo_bytes
from support.numbers import distance
from support.passes import for_accelerator

Modes = lax.GatherScatterMode


def compare(function: Callable[..., Any], *arguments: np.ndarray, ulp: float = 0, kernels: int = 1) -> None:
    """``function`` in so many generated kernels, and nothing else, gives what the reference does."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    computation = for_accelerator(import_module(hlo_bytes(function, *shapes))).entry
    assert not kernels or any(i.opcode is Opcode.GATHER for i in computation.instructions)
    ours, theirs, made = run_both(computation, arguments)
    assert len(made) == kernels
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert not np.any(distance(a, b) > ulp)


def take(x: jax.Array, i: jax.Array) -> jax.Array:
    return x.at[i].get(mode="clip")


def test_rows(rng: np.random.Generator) -> None:
    table = rng.standard_normal((50, 24)).astype(np.float32)
    for shape in ((7,), (1, 2), (3, 5)):
        compare(take, table, rng.integers(-60, 60, shape, dtype=np.int32))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_type_of_index_is_clamped_as_it_is(dtype: type[np.integer[Any]], rng: np.random.Generator) -> None:
    """Numbers of any size, the largest and the least among them."""
    limits = np.iinfo(dtype)
    positions = np.concatenate([[limits.min, limits.max, 0, 1, 99, 100, 126], rng.integers(0, 100, 20)]).astype(dtype)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))

    def function(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.gather(x, i[:, None], numbers, (1, 3), mode=Modes.CLIP)

    with jax.enable_x64(True):
        compare(function, rng.standard_normal((100, 3)).astype(np.float32), positions)


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint16, np.int64, np.bool_, np.complex64],
    ids=lambda dtype: dtype.__name__,
)
def test_every_type_of_element(dtype: Any, rng: np.random.Generator) -> None:
    table = (rng.standard_normal((40, 6)) * 50).astype(dtype)
    with jax.enable_x64(True):
        compare(take, table, rng.integers(0, 40, (9,), dtype=np.int32))


def test_columns_and_single_elements(rng: np.random.Generator) -> None:
    x = rng.standard_normal((12, 30, 5)).astype(np.float32)
    i, j = (rng.integers(0, n, (8,), dtype=np.int32) for n in (12, 30))
    compare(lambda x, j: x.at[:, j].get(mode="clip"), x, j)
    compare(lambda x, i, j: x.at[i, j].get(mode="clip"), x, i, j)
    compare(lambda x, i, j: x.at[i, :, j].get(mode="clip"), x, i, j % 5)
    one = rng.integers(0, 5, (12, 30, 1), dtype=np.int32)
    compare(lambda x, i: jnp.take_along_axis(x, i, -1, mode="clip"), x, one)
    compare(lambda x, i: jnp.take_along_axis(x, i, 1, mode="clip"), x, rng.integers(0, 30, (12, 4, 5), dtype=np.int32))


@pytest.mark.parametrize("seed", range(12))
def test_any_dimension_numbers(seed: int) -> None:
    """Windows of any size, in any order of dimensions, starting outside too."""
    rng = np.random.default_rng(900 + seed)
    rank = int(rng.integers(1, 5))
    dims = tuple(int(n) for n in rng.integers(2, 7, rank))
    batching = tuple(sorted(rng.permutation(rank)[: int(rng.integers(0, min(rank, 2)))].tolist()))
    free = [d for d in range(rank) if d not in batching]
    indexed = tuple(int(d) for d in rng.permutation(free)[: int(rng.integers(1, len(free) + 1))])
    collapsed = tuple(sorted(d for d in indexed if rng.random() < 0.5))
    ones = (*collapsed, *batching)
    sizes = tuple(1 if d in ones else int(rng.integers(1, n + 1)) for d, n in enumerate(dims))
    free_batch = tuple(int(n) for n in rng.integers(1, 4, int(rng.integers(0, 3))))
    batch = (*(dims[d] for d in batching), *free_batch)
    windows = rank - len(collapsed) - len(batching)
    offsets = tuple(sorted(rng.permutation(len(batch) + windows)[:windows].tolist()))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=offsets,
        collapsed_slice_dims=collapsed,
        start_index_map=indexed,
        operand_batching_dims=batching,
        start_indices_batching_dims=tuple(range(len(batching))),
    )

    def function(x: jax.Array, i: jax.Array) -> jax.Array:
        return lax.gather(x * 2, i, numbers, sizes, mode=Modes.CLIP) + 1

    positions = rng.integers(-3, 9, (*batch, len(indexed)), dtype=np.int32)
    compare(function, rng.standard_normal(dims).astype(np.float32), positions)


def test_what_comes_before_and_after_is_in_the_kernel(rng: np.random.Generator) -> None:
    """Elementwise operations on the table are computed of the chosen rows, as indices are, and reductions follow."""
    table, places = (rng.standard_normal((n, 20)).astype(np.float32) for n in (70, 6))
    ids = rng.integers(-70, 70, (4, 6), dtype=np.int32)

    def embed(table: jax.Array, places: jax.Array, ids: jax.Array) -> jax.Array:
        rows = (table * 0.5)[jnp.where(ids < 0, ids + 70, ids)] + places
        return rows / jnp.sqrt((rows * rows).sum(-1, keepdims=True))

    compare(embed, table, places, ids, ulp=16)


def test_a_sum_over_chosen_elements(rng: np.random.Generator) -> None:
    x = rng.uniform(1, 2, (30, 200)).astype(np.float32)
    order = rng.integers(0, 200, (150,), dtype=np.int32)
    compare(lambda x, i: x.at[:, i].get(mode="clip").sum(1), x, order, ulp=16)
    compare(lambda x, i: x.at[:, i].get(mode="clip").sum(0), x, order, ulp=16)


def test_columns_beside_rows(rng: np.random.Generator) -> None:
    """Reductions over rows and over columns in one kernel, of rows that are chosen."""
    table = rng.standard_normal((60, 33)).astype(np.float32)
    ids = rng.integers(0, 60, (40,), dtype=np.int32)

    def function(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = take(table, ids)
        unit = rows / jnp.sqrt((rows * rows).sum(-1, keepdims=True))
        return unit, unit.sum(0)

    computation = for_accelerator(
        import_module(hlo_bytes(function, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (table, ids))))
    ).entry
    ours, theirs, _ = run_both(computation, (table, ids))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_without_elements(rng: np.random.Generator) -> None:
    """A library call: there is nothing to compute."""
    table = rng.standard_normal((5, 4)).astype(np.float32)
    compare(take, table, np.zeros((0,), np.int32), kernels=0)


def test_a_table_that_an_update_writes_over_is_read_before(rng: np.random.Generator) -> None:
    table = rng.standard_normal((20, 8)).astype(np.float32)
    ids, at = rng.integers(0, 20, (20,), dtype=np.int32), np.int32(3)

    def function(table: jax.Array, ids: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = take(table, ids) + 1
        return lax.dynamic_update_slice(table, rows[:4], (at, np.int32(0))), rows

    shapes = [jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in (table, ids, at)]
    computation = for_accelerator(import_module(hlo_bytes(function, *shapes))).entry
    ours, theirs, _ = run_both(computation, (table, ids, np.asarray(at)))
    for a, b in zip(ours, theirs, strict=True):
        assert not np.any(distance(a, b))
