"""Along which dimension tiles of short rows run: what they compute is tested in cpu/native/test_tile_dimension.py."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import jax
import numpy as np

from flagos_backend.codegen.cpu.fusion_policy import schedule
from flagos_backend.codegen.cpu.transforms.choose_tile_dimension import tiled
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Region
from programs import hlo_bytes


def tile_dimension(function: Callable[..., jax.Array], *arguments: np.ndarray) -> int:
    """The size of that of the largest loop of ``function``."""
    items = schedule(flatten(import_module(hlo_bytes(function, *arguments)).entry)).items
    region = max((item for item in items if isinstance(item, Region)), key=lambda region: prod(region.dims))
    return tiled(region).dims[-1]


def test_dense_rows_and_what_repeats_in_them() -> None:
    """Tiles hold many rows; along the outer dimension each element of the dense arrays would be loaded by itself."""
    x, row, column = (np.ones(dims, np.float32) for dims in ((3000, 9, 9), (3000, 1, 9), (3000, 9, 1)))
    assert tile_dimension(lambda x, r, c: x * (1 - r) * (1 - c) + x * r * c - x, x, row, column) == 9


def test_arrays_that_are_dense_along_the_outer_dimension() -> None:
    x, y = np.ones((9, 3000), np.float32), np.ones((9, 3000), np.float32)
    assert tile_dimension(lambda x, y: (x * y - x / y).T, x, y) > 9
