"""Simplified loop nests: as few dimensions as possible, the same positions visited in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.codegen.cpu.transforms.collapse_dimensions import Nest, simplify
from flagos_backend.fusion.fuse import fuse
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Affine, Index, Load, Region
from programs import hlo_bytes


def regions_of(function: Callable[..., Any], *arguments: np.ndarray) -> list[Region]:
    schedule = fuse(flatten(import_module(hlo_bytes(function, *arguments)).entry))
    return [item for item in schedule.items if isinstance(item, Region)]


def positions(dims: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> list[int]:
    points = itertools.product(*map(range, dims))
    return [offset + sum(i * s for i, s in zip(point, strides, strict=True)) for point in points]


def same_walk(region: Region, nest: Nest, index: Affine) -> bool:
    return positions(region.dims, index.offset, index.coefficients) == positions(
        nest.dims, index.offset, nest.strides(index)
    )


@pytest.mark.parametrize(
    ("function", "dims"),
    [
        (lambda x: x + 1, (120,)),
        (lambda x: x[:, :, ::-1] + 1, (20, 6)),
        (lambda x: x.transpose(1, 2, 0) + 1, (30, 4)),
        (lambda x: x + jnp.arange(6.0), (20, 6)),
        (lambda x: x.sum(2), (20, 6)),
        (lambda x: x.sum((1, 2)), (4, 30)),
        (lambda x: x.sum(0), (4, 30)),
        (lambda x: x.sum(1), (4, 5, 6)),
        (lambda x: x[:1, :, :1] + 1, (5,)),
    ],
)
def test_dimensions_merge(function: Callable[..., Any], dims: tuple[int, ...]) -> None:
    regions = regions_of(function, np.zeros((4, 5, 6), np.float32))
    nest = simplify(regions[-1])
    assert nest.dims == dims
    for region in regions:
        nest = simplify(region)
        indices = [e.index for e in region.expressions() if isinstance(e, Load)]
        indices += [e.value for e in region.expressions() if isinstance(e, Index)]
        indices += [end.index for end in region.stores]
        assert all(same_walk(region, nest, index) for index in indices)


def test_a_reduction_over_a_size_one_dimension_keeps_it() -> None:
    (region,) = regions_of(lambda x: x.sum(1), np.zeros((4, 1), np.float32))
    nest = simplify(region)
    assert nest.dims == (4, 1)
    assert nest.reduced == (1,)
