"""Indices that only count, or have nothing to choose from: the program computes what stock XLA does, with less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import GatherAttributes, ScatterAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.passes.rewrite import array_shape
from programs import hlo_bytes, run_on_xla
from support.passes import simplified


def instructions(function: Callable[..., Any], *arguments: np.ndarray) -> list[Instruction]:
    """The optimized program, which computes the same as stock XLA."""
    hlo = hlo_bytes(function, *arguments)
    module = simplified(import_module(hlo))
    verify(module)
    with torch.inference_mode():
        results = build_plan(module.entry).run(Run(), [torch.from_numpy(a.copy()) for a in arguments])
    for ours, theirs in zip(results, run_on_xla(hlo, arguments), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    return [instruction for c in module.computations() for instruction in c.instructions]


def only(found: list[Instruction], opcode: Opcode) -> Instruction:
    (instruction,) = (i for i in found if i.opcode is opcode)
    return instruction


def count(found: list[Instruction], opcode: Opcode) -> int:
    return sum(i.opcode is opcode for i in found)


def random(rng: np.random.Generator, *dims: int) -> np.ndarray:
    return rng.standard_normal(dims).astype(np.float32)


def labels(rng: np.random.Generator, size: int, *dims: int) -> np.ndarray:
    return rng.integers(0, size, dims).astype(np.int32)


def test_rows_that_are_counted(rng: np.random.Generator) -> None:
    found = instructions(lambda x, y: x[jnp.arange(5), y], random(rng, 5, 9), labels(rng, 9, 5))
    gather = only(found, Opcode.GATHER).attributes_as(GatherAttributes)
    assert (gather.operand_batching_dims, gather.start_indices_batching_dims) == ((0,), (0,))
    assert gather.start_index_map == (1,)
    assert not count(found, Opcode.CONCATENATE)


def test_two_dimensions_that_are_counted_in_either_order(rng: np.random.Generator) -> None:
    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return x[jnp.arange(4)[:, None], jnp.arange(5)[None, :], y]

    def turned(x: jax.Array, y: jax.Array) -> jax.Array:
        return x[jnp.arange(4)[None, :], jnp.arange(5)[:, None], y.T]

    x, y = random(rng, 4, 5, 6), labels(rng, 6, 4, 5)
    for function, dims in ((choose, (0, 1)), (turned, (1, 0))):
        gather = only(instructions(function, x, y), Opcode.GATHER).attributes_as(GatherAttributes)
        assert (gather.operand_batching_dims, gather.start_indices_batching_dims) == ((0, 1), dims)


def test_windows_beside_counted_rows(rng: np.random.Generator) -> None:
    x, y = random(rng, 4, 5, 6), labels(rng, 5, 4)
    gather = only(instructions(lambda x, y: x[jnp.arange(4), y], x, y), Opcode.GATHER)
    assert gather.attributes_as(GatherAttributes).operand_batching_dims == (0,)


@pytest.mark.parametrize(
    "rows", [np.arange(3), np.array([0, 1, 2, 4]), np.arange(4)[::-1].copy()], ids=["few", "skipping", "backwards"]
)
def test_rows_that_are_not_all_counted_stay(rows: np.ndarray, rng: np.random.Generator) -> None:
    x, y = random(rng, 5, 9), labels(rng, 9, len(rows))
    gather = only(instructions(lambda x, r, y: x[r, y], x, rows.astype(np.int32), y), Opcode.GATHER)
    assert not gather.attributes_as(GatherAttributes).operand_batching_dims
    few = only(instructions(lambda x, y: x[jnp.arange(len(y)), y], random(rng, 7, 9), y), Opcode.GATHER)
    assert not few.attributes_as(GatherAttributes).operand_batching_dims


def test_the_diagonal_stays_a_gather(rng: np.random.Generator) -> None:
    assert count(instructions(lambda x: x[jnp.arange(5), jnp.arange(5)], random(rng, 5, 5)), Opcode.GATHER) == 1


def test_positions_that_wrap_are_not_counted(rng: np.random.Generator) -> None:
    """Of 200 rows an S8 names those beyond 127 by negative numbers."""
    x, y = random(rng, 200, 9), rng.integers(0, 9, 200).astype(np.int8)
    numbers = jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1))

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        indices = jnp.stack([jax.lax.iota(np.int8, 200), y], -1)
        return jax.lax.gather(x, indices, numbers, (1, 1), mode=jax.lax.GatherScatterMode.CLIP)

    gather = only(instructions(choose, x, y), Opcode.GATHER)
    assert not gather.attributes_as(GatherAttributes).operand_batching_dims


@pytest.mark.parametrize("way", ["set", "add", "multiply", "max"])
def test_updates_of_counted_rows(way: str, rng: np.random.Generator) -> None:
    x, y, u = random(rng, 5, 9), labels(rng, 9, 5), random(rng, 5)
    found = instructions(lambda x, y, u: getattr(x.at[jnp.arange(5), y], way)(u), x, y, u)
    scatter = only(found, Opcode.SCATTER).attributes_as(ScatterAttributes)
    assert (scatter.input_batching_dims, scatter.scatter_dims_to_operand_dims) == ((0,), (1,))


def test_updates_out_of_range_are_dropped(rng: np.random.Generator) -> None:
    y = np.array([-1, -9, 9, -10, 2**31 - 1], np.int32)
    instructions(lambda x, y: x.at[jnp.arange(5), y].add(1.0), random(rng, 5, 9), y)


def test_one_place_to_begin(rng: np.random.Generator) -> None:
    x, y = random(rng, 5, 1), labels(rng, 3, 1)
    assert not count(instructions(lambda x, y: jnp.take(x, y, axis=1, mode="clip"), x, y), Opcode.GATHER)


def test_an_update_of_everything(rng: np.random.Generator) -> None:
    x, u = random(rng, 5, 1), random(rng, 5)
    assert not count(instructions(lambda x, u: x.at[:, 0].add(u), x, u), Opcode.SCATTER)
    # Or of nothing, where the one window lies outside.
    found = instructions(lambda x, u, i: x.at[:, i].add(u), x, u, labels(rng, 2))
    assert not count(found, Opcode.SCATTER)
    assert sum(i.opcode is Opcode.SELECT and array_shape(i).dims == (5, 1) for i in found) == 1


def test_positions_are_not_negative(rng: np.random.Generator) -> None:
    found = instructions(lambda x: jnp.where(jnp.arange(5) < 0, x, -x), random(rng, 5))
    assert not count(found, Opcode.COMPARE)
    found = instructions(lambda x: jnp.where(jnp.arange(5, dtype=np.int8)[:, None] >= 0, x, -x), random(rng, 5, 3))
    assert not count(found, Opcode.COMPARE)
    assert count(instructions(lambda x: jnp.where(jnp.arange(5) - 2 < 0, x, -x), random(rng, 5)), Opcode.COMPARE) == 1
    wraps = instructions(lambda x: jnp.where(jax.lax.iota(np.int8, 200) < 0, x, -x), random(rng, 200))
    assert count(wraps, Opcode.COMPARE) == 1
