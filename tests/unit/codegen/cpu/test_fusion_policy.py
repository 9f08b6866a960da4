"""How much of a computation one loop of the host takes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from flagos_backend.codegen.cpu.fusion_policy import schedule
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes


@pytest.mark.parametrize(("length", "loops"), [(100, 1), (250, 1), (300, 2)])
def test_chains(length: int, loops: int) -> None:
    def chain(x: jax.Array) -> jax.Array:
        for number in range(length):
            x = x * x if number % 2 else x + np.float32(0.5 + number)
        return x

    items = schedule(flatten(import_module(hlo_bytes(chain, np.ones(8, np.float32))).entry)).items
    assert len(items) == loops
    assert all(isinstance(item, Region) for item in items)


@pytest.mark.parametrize(("axis", "loops"), [(-1, 1), (-2, 2)])
def test_parts_of_short_rows(axis: int, loops: int) -> None:
    """Those that stand in turn in memory are one loop, those that stand side by side one each."""

    def rotated(x: jax.Array, c: jax.Array) -> jax.Array:
        return jax.numpy.stack([x * c - x[:, ::-1], x[:, ::-1] * c + x], axis)

    x, c = np.ones((4, 50, 8, 32), np.float32), np.ones((50, 1, 32), np.float32)
    items = schedule(flatten(import_module(hlo_bytes(rotated, x, c)).entry)).items
    assert len(items) == loops
    assert all(isinstance(item, Region) for item in items)
