"""Windows at places that are known: slices, and the same results as stock XLA's of the program as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from programs import hlo_bytes, run_on_xla
from support.passes import simplified


def opcodes(function: Callable[..., Any], *arguments: np.ndarray) -> Counter[Opcode]:
    """Those of the simplified program, which computes the same as stock XLA."""
    hlo = hlo_bytes(function, *arguments)
    module = simplified(import_module(hlo))
    verify(module)
    with torch.inference_mode():
        results = build_plan(module.entry).run(Run(), [torch.from_numpy(a.copy()) for a in arguments])
    for ours, theirs in zip(results, run_on_xla(hlo, arguments), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    return Counter(instruction.opcode for c in module.computations() for instruction in c.instructions)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([2], 1),
        ([1, 2, 3], 1),
        ([0, 2, 4], 1),
        ([4, 3, 2, 1, 0], 1),
        ([4, 2, 0], 1),
        ([1, 0], 1),
        ([-1, -2], 1),
        ([0, 3, 4, 1, 2], 3),
        ([2, 2, 1], 2),
        ([0, 2], 2),
    ],
)
def test_known_rows(rows: list[int], parts: int, axis: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 6, 7)).astype(np.float32)
    found = opcodes(lambda x: x[(*[slice(None)] * axis, np.array(rows))], x)
    assert not found[Opcode.GATHER]
    assert found[Opcode.SLICE] <= parts  # all of an array, or the same part again, is no further slice
    assert found[Opcode.CONCATENATE] == (parts > 1)


def test_known_places_are_clamped(rng: np.random.Generator) -> None:
    x = rng.integers(-100, 100, (4, 3), np.int32)
    found = opcodes(lambda x: x.at[np.array([-9, 2, 3, 99])].get(mode="clip"), x)
    assert not found[Opcode.GATHER]


def test_a_batch_of_several_dimensions(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 9, 3)).astype(np.float32)
    assert not opcodes(lambda x: x[:, np.arange(6).reshape(2, 3)], x)[Opcode.GATHER]
    assert not opcodes(lambda x: x[np.arange(4).reshape(2, 2)], x)[Opcode.GATHER]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_types_of_indices(dtype: type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((200, 2)).astype(np.float32)
    numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))

    def choose(x: jax.Array) -> jax.Array:
        places = np.array([[100], [-1 if dtype is not np.uint8 else 255]], dtype)
        return jax.lax.gather(x, places, numbers, (1, 2), mode=jax.lax.GatherScatterMode.CLIP)

    assert not opcodes(choose, x)[Opcode.GATHER]


def test_parts_of_windows(rng: np.random.Generator) -> None:
    """Windows that do not lie over all of the other dimensions begin at their start."""
    x = rng.standard_normal((5, 6)).astype(np.float32)
    numbers = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))

    def choose(x: jax.Array) -> jax.Array:
        return jax.lax.gather(x, np.array([[3], [1]]), numbers, (1, 4), mode=jax.lax.GatherScatterMode.CLIP)

    assert not opcodes(choose, x)[Opcode.GATHER]


def test_many_scattered_rows_stay(rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 3)).astype(np.float32)
    rows = np.array([0, 7, 3, 30, 12, 5, 21, 9, 2, 39])
    assert opcodes(lambda x: x[rows], x)[Opcode.GATHER] == 1


def test_two_known_components_stay(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 5)).astype(np.float32)
    assert opcodes(lambda x: x[np.array([1, 3]), np.array([0, 2])], x)[Opcode.GATHER] == 1


@pytest.mark.parametrize(("begin", "end", "concatenates"), [(0, 3, 0), (3, 7, 0), (4, 6, 0), (1, 5, 1), (2, 4, 1)])
def test_slices_of_parts(begin: int, end: int, concatenates: int, rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal((4, 4)).astype(np.float32)
    found = opcodes(lambda x, y: jnp.concatenate([x, y])[begin:end, 1:3], x, y)
    assert found[Opcode.CONCATENATE] == concatenates


def test_strided_slices_of_parts(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal(9).astype(np.float32), rng.standard_normal(9).astype(np.float32)
    found = opcodes(lambda x, y: jax.lax.slice(jnp.concatenate([x, y]), (9,), (18,), (4,)), x, y)
    assert not found[Opcode.CONCATENATE]


def test_columns_in_another_order(rng: np.random.Generator) -> None:
    """As sparse matrices turn their indices."""
    x = rng.integers(-100, 100, (50, 2), np.int32)
    found = opcodes(lambda x: x[:, np.array([1, 0])][:, 0] - x[:, 1], x)
    assert not found[Opcode.GATHER]
