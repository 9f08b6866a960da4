"""Scatters of one window at a known place: the rewritten program computes what stock XLA computes; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.passes.pipeline import optimize
from flagos_backend.runtime.build import build_plan
from programs import hlo_bytes, run_on_xla


def opcodes_left(function: Callable[..., Any], *arguments: np.ndarray) -> set[Opcode]:
    """The opcodes of the optimized program, which computes the same as stock XLA."""
    hlo = hlo_bytes(function, *arguments)
    module = optimize(import_module(hlo))
    verify(module)
    with torch.inference_mode():
        results = build_plan(module.entry).run(Run(), [torch.from_numpy(a.copy()) for a in arguments])
    for ours, theirs in zip(results, run_on_xla(hlo, arguments), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    return {i.opcode for c in module.computations() for i in c.instructions}


_PLACES: dict[str, Callable[[Any], Any]] = {
    "inside": lambda at: at[1:-1, 1:-1],
    "beside": lambda at: at[2:, 3:],
    "row": lambda at: at[4],
    "column": lambda at: at[:, -1],
    "element": lambda at: at[3, 5],
}


@pytest.mark.parametrize("combine", ["set", "add", "multiply", "max"])
@pytest.mark.parametrize("place", _PLACES)
def test_parts_of_an_array(place: str, combine: str, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 9, (7, 8)).astype(np.float32)
    y = rng.integers(-9, 9, _PLACES[place](x).shape).astype(np.float32)
    found = opcodes_left(lambda x, y: getattr(_PLACES[place](x.at), combine)(y), x, y)
    assert Opcode.SCATTER not in found


def _scatter(start: list[int], window: tuple[int, ...], **mode: Any) -> Callable[..., jax.Array]:
    numbers = jax.lax.ScatterDimensionNumbers(tuple(range(len(window))), (), tuple(range(len(start))))
    return lambda x, y: jax.lax.scatter_add(x, jnp.array(start), y, numbers, **mode)


@pytest.mark.parametrize("start", [[-1, 0], [0, 6], [9, 9]])
def test_windows_outside_are_not_written(start: list[int], rng: np.random.Generator) -> None:
    x, y = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(1, 9, (2, 3)).astype(np.float32)
    assert Opcode.SCATTER not in opcodes_left(_scatter(start, (2, 3), mode="drop"), x, y)


def test_windows_at_the_end(rng: np.random.Generator) -> None:
    x, y = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(1, 9, (2, 3)).astype(np.float32)
    assert Opcode.SCATTER not in opcodes_left(_scatter([5, 5], (2, 3)), x, y)


def test_several_windows_and_unknown_places_stay(rng: np.random.Generator) -> None:
    x, y = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(1, 9, (2, 8)).astype(np.float32)
    assert Opcode.SCATTER in opcodes_left(lambda x, y: x.at[jnp.array([2, 2])].add(y), x, y)
    place = rng.integers(0, 7, 1).astype(np.int32)
    assert Opcode.SCATTER in opcodes_left(lambda x, y, i: x.at[i].add(y[:1]), x, y, place)
