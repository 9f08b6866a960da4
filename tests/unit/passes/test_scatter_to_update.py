"""Scatters of one window: the rewritten program computes what stock XLA computes; others stay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import from_bytes
from flagos_backend.passes.rewrite import array_shape
from flagos_backend.runtime.plan import Plan
from programs import hlo_bytes, run_on_xla
from support.passes import simplified


@functools.lru_cache(maxsize=1)
def _planned(hlo: bytes) -> tuple[Module, Plan]:
    """The optimized program. What differs in its arguments alone is compiled once."""
    module = simplified(import_module(hlo))
    verify(module)
    return module, build_plan(module.entry)


def opcodes_left(hlo: bytes, *arguments: np.ndarray, expected: np.ndarray | None = None) -> set[Opcode]:
    """The opcodes of the optimized program, which computes what is expected, or else the same as stock XLA."""
    module, plan = _planned(hlo)
    given = [from_bytes(a.tobytes(), array_shape(p)) for a, p in zip(arguments, module.entry.parameters, strict=True)]
    with torch.inference_mode():
        results = plan.run(Run(), given)
    theirs_all = run_on_xla(hlo, arguments) if expected is None else [expected]
    for ours, theirs in zip(results, theirs_all, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    return {i.opcode for c in module.computations() for i in c.instructions}


def opcodes_of(function: Callable[..., Any], *arguments: np.ndarray) -> set[Opcode]:
    return opcodes_left(hlo_bytes(function, *arguments), *arguments)


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
    found = opcodes_of(lambda x, y: getattr(_PLACES[place](x.at), combine)(y), x, y)
    assert Opcode.SCATTER not in found


def _scatter(start: list[int], window: tuple[int, ...], **mode: Any) -> Callable[..., jax.Array]:
    numbers = jax.lax.ScatterDimensionNumbers(tuple(range(len(window))), (), tuple(range(len(start))))
    return lambda x, y: jax.lax.scatter_add(x, jnp.array(start), y, numbers, **mode)


@pytest.mark.parametrize("start", [[-1, 0], [0, 6], [9, 9]])
def test_windows_outside_are_not_written(start: list[int], rng: np.random.Generator) -> None:
    x, y = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(1, 9, (2, 3)).astype(np.float32)
    assert Opcode.SCATTER not in opcodes_of(_scatter(start, (2, 3), mode="drop"), x, y)


def test_windows_at_the_end(rng: np.random.Generator) -> None:
    x, y = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(1, 9, (2, 3)).astype(np.float32)
    assert Opcode.SCATTER not in opcodes_of(_scatter([5, 5], (2, 3)), x, y)


@pytest.mark.parametrize("combine", ["set", "add", "min"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("size", [7, 300])
def test_places_that_are_not_known(size: int, dtype: str, combine: str, rng: np.random.Generator) -> None:
    """In bounds, at their ends, and out of them, as far as the type has such numbers. 300 is more than 8 bits have: XLA
    then compares to what is left of it."""
    x, y = rng.integers(-9, 9, (size, 8)).astype(np.float32), rng.integers(-9, 9, (2, 3)).astype(np.float32)
    limits = np.iinfo(dtype)
    numbers = jax.lax.ScatterDimensionNumbers((0, 1), (), (1, 0))
    scatter = {"set": jax.lax.scatter, "add": jax.lax.scatter_add, "min": jax.lax.scatter_min}[combine]

    def function(x: Any, i: Any, y: Any) -> Any:
        return scatter(x, i, y, numbers, mode="drop")

    with jax.enable_x64(True):
        hlo = hlo_bytes(function, x, np.zeros(2, dtype), y)
        for row in (0, 3, size - 2, size - 1, -1, limits.min, limits.max):
            for column in (0, 5, 6, -3):
                bits = np.array([column % 2**limits.bits, row % 2**limits.bits], f"uint{limits.bits}")
                place = bits.view(dtype)
                expected = x.copy()
                if 0 <= place[1] <= size - 2 and 0 <= place[0] <= 5:
                    window = expected[place[1] :, place[0] :][:2, :3]
                    window[:] = {"set": y, "add": window + y, "min": np.minimum(window, y)}[combine]

                assert Opcode.SCATTER not in opcodes_left(hlo, x, place, y, expected=expected)


def test_rows_in_a_loop(rng: np.random.Generator) -> None:
    x, y = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(-9, 9, 10).astype(np.float32)

    def written(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10, lambda i, x: x.at[2 * i - 5].add(y[i], mode="drop"), x)

    assert Opcode.SCATTER not in opcodes_of(written, x, y)


def test_several_windows_stay(rng: np.random.Generator) -> None:
    x, y = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(1, 9, (2, 8)).astype(np.float32)
    assert Opcode.SCATTER in opcodes_of(lambda x, y: x.at[jnp.array([2, 2])].add(y), x, y)
    places = rng.integers(0, 7, 2).astype(np.int32)
    assert Opcode.SCATTER in opcodes_of(lambda x, y, i: x.at[i].add(y), x, y, places)
