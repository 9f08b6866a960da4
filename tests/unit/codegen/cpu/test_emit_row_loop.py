"""When a loop over rows computes what, and which regions the host runs as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.codegen.cpu.emit_row_loop import Phases, reduces_rows
from flagos_backend.codegen.cpu.fusion_policy import schedule
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import simplify
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Apply, Region
from programs import hlo_bytes


def regions_of(function: Callable[..., Any], *arguments: np.ndarray) -> list[Region]:
    items = schedule(flatten(import_module(hlo_bytes(function, *arguments)).entry)).items
    return [item for item in items if isinstance(item, Region)]


def rows(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def standardised(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    ("function", "phases", "kept"),
    [
        (lambda x: x.sum(-1), 2, 0),
        (lambda x: jax.nn.softmax(x, -1), 3, 1),  # the exponentials are kept for the quotients
        (standardised, 3, 1),  # the differences from the mean
        (lambda x: jnp.sum(x * 2, -1) + jnp.max(x, -1), 2, 0),
    ],
    ids=["sum", "softmax", "standardised", "two reductions"],
)
def test_phases(function: Callable[..., Any], phases: int, kept: int) -> None:
    (region,) = regions_of(function, rows(64, 512))
    found = Phases(region)
    assert reduces_rows(region, found.nest)
    assert found.count == phases
    assert found.kept_bytes == kept * 512 * 4


def test_every_operation_runs_once_in_a_phase_that_has_its_operands() -> None:
    for region in regions_of(lambda x: jax.nn.log_softmax(standardised(x), -1), rows(64, 512)):
        found = Phases(region)
        for expression in region.expressions():
            if isinstance(expression, Apply):
                assert found.computed(expression) >= found.stage[expression]
                for operand in expression.operands:
                    if isinstance(operand, Apply):
                        assert found.computed(operand) <= found.computed(expression)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((64, 512), 1),
        ((64, 16), 1),  # short rows, of which a tile holds several
        ((32, 400_000), 3),  # what is kept of a row leaves the cache
        ((2, 65536), 3),  # too few rows for threads
    ],
)
def test_rows_are_joined_where_it_pays(shape: tuple[int, int], count: int) -> None:
    regions = regions_of(lambda x: jax.nn.softmax(x, -1), rows(*shape))
    assert (len(regions) == 1) == (count == 1), [simplify(r) for r in regions]


def test_reductions_over_columns_of_the_same_array_share_a_loop() -> None:
    def sums(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (x * y).sum(0), x.sum(0)

    (region,) = regions_of(sums, rows(300, 200), rows(300, 200))
    assert len(region.reductions) == 2
    assert not reduces_rows(region, simplify(region))


def test_results_of_the_same_arguments_share_a_loop() -> None:
    (region,) = regions_of(lambda x, y: (x + y, x * y), rows(300, 200), rows(300, 200))
    assert len(region.stores) == 2
