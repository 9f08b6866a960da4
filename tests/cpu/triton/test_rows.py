"""Rows that begin anywhere in memory, walked from the first whole unit on, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu.triton.harness import run_both
from flagos_backend.codegen.triton import RegionKernel
from flagos_backend.importer import import_module
from flagos_backend.ir.types import ElementType
from programs import hlo_bytes
from support.numbers import NUMPY_DTYPE, distance, random_values
from support.passes import for_accelerator

E = ElementType
pytestmark = pytest.mark.usefixtures("short_blocks")
_TYPES = [E.F32, E.F64, E.BF16, E.F16, E.S8, E.U16, E.S32, E.S64, E.PRED]
# Of a row, and of what comes between it and the next one.
_SIZES = [(1001, 0), (607, 3), (600, 1), (516, 16)]


def compare(function: Callable[..., Any], *arguments: np.ndarray, ulp: float) -> RegionKernel:
    """What one kernel makes of ``function`` is what the reference does."""
    with jax.enable_x64(True):
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
        computation = for_accelerator(import_module(hlo_bytes(function, *shapes))).entry
    ours, theirs, (kernel,) = run_both(computation, arguments)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert not np.any(distance(a, b) > ulp)
    return kernel


def is_aligned(kernel: RegionKernel) -> bool:
    """Whether its rows are walked from the first whole unit on."""
    return kernel.tiling.alignment is not None


def positive(element_type: ElementType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    x = random_values(element_type, int(np.prod(shape)), rng).reshape(shape)
    return np.abs(x) if element_type.is_float else x


@pytest.mark.parametrize("element_type", _TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize(("size", "gap"), _SIZES)
def test_every_type_and_remainder(element_type: ElementType, size: int, gap: int, rng: np.random.Generator) -> None:
    """Rows, and windows of rows, beside others of another remainder; a sum of them, and an array with it."""
    add = jnp.max if element_type in (E.S8, E.PRED) else jnp.sum

    def function(x: jax.Array, y: jax.Array, first: int) -> tuple[jax.Array, jax.Array]:
        both = jnp.maximum(x[:, first : first + size], y)
        reduced = add(both, 1).astype(y.dtype)
        return jnp.minimum(both, reduced[:, None]), reduced

    # As many as there are places in a unit of 16 bytes where a row can begin, and one that begins where the first does.
    rows = 16 // element_type.bytes + 1
    x, y = (positive(element_type, (rows, n), rng) for n in (size + gap, size))
    for first in {0, gap}:
        kernel = compare(lambda x, y: function(x, y, first), x, y, ulp=8 if element_type.is_float else 0)  # noqa: B023
        # Most of the arrays have no gaps.
        assert is_aligned(kernel) is (size * element_type.bytes % 16 != 0)


@pytest.mark.parametrize("element_type", [E.F32, E.BF16, E.S8], ids=lambda t: t.name)
@pytest.mark.parametrize("gap", [1, 3])
def test_sizes_of_whole_units(element_type: ElementType, gap: int, rng: np.random.Generator) -> None:
    """Of rows that all begin between units: the ends are not full, whatever divides the size."""
    for units in (9, 10, 16, 17, 32):
        size = units * 512 // 16
        x = positive(element_type, (5, size + gap), rng)
        reduction = jnp.max if element_type is E.S8 else jnp.sum

        def function(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            row = x[:, gap:]
            reduced = reduction(row, 1).astype(x.dtype)  # noqa: B023
            return jnp.minimum(row, reduced[:, None]), reduced

        kernel = compare(function, x, ulp=8 if element_type.is_float else 0)
        assert is_aligned(kernel) is (size > 256)
        compare(lambda x: reduction(x[:, gap:], 1), x, ulp=8 if element_type.is_float else 0)  # noqa: B023


def test_many_dimensions_and_what_all_rows_read(rng: np.random.Generator) -> None:
    x, gain = (rng.uniform(0.1, 2, shape).astype(np.float32) for shape in ((3, 5, 7, 143), (7, 143)))

    def function(x: jax.Array, gain: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean((2, 3), keepdims=True)) * gain + jax.lax.iota(np.float32, 143)

    assert is_aligned(compare(function, x, gain, ulp=64))


def test_a_single_row(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 3000)).astype(np.float32)
    compare(lambda x: jax.nn.softmax(x[:, 3:2502], -1), x, ulp=16)


@pytest.mark.parametrize("element_type", [E.F32, E.BF16], ids=lambda t: t.name)
def test_what_all_threads_read_at_the_ends_is_not_written_over(
    element_type: ElementType, rng: np.random.Generator
) -> None:
    x = positive(element_type, (20, 777), rng)
    kernel = compare(lambda x: (x * 2, x.astype(np.float32).sum(1)), x, ulp=64)
    assert is_aligned(kernel)
    assert not any(kernel.may_overwrite(output, source) for output in kernel.outputs for source in kernel.inputs)


def test_positions_in_a_row(rng: np.random.Generator) -> None:
    """Compared with what a row has one of, and as numbers."""
    x, label = rng.standard_normal((40, 1001)).astype(np.float32), rng.integers(0, 1001, 40, dtype=np.int32)
    label[:6] = [0, 1, 2, 1000, 999, 998]

    def function(x: jax.Array, label: jax.Array) -> tuple[jax.Array, jax.Array]:
        position = jax.lax.broadcasted_iota(np.int32, x.shape, 1)
        chosen = jnp.where(position == label[:, None], x, 0).sum(1)
        return chosen, jnp.where(position == label[:, None], chosen[:, None], x + position)

    compare(function, x, label, ulp=0)


def test_a_maximum_of_rounded_numbers_is_one_of_them(rng: np.random.Generator) -> None:
    """Sums of bfloat16 whose roundings are larger than what their exponentials tell apart."""
    x, y = ((rng.standard_normal((16, 777)) * spread).astype(NUMPY_DTYPE[E.BF16]) for spread in (1e5, 3e2))
    for rows in (slice(None), slice(0, 200)):  # walked, and in one block
        kernel = compare(lambda x, y: jax.nn.softmax(x + y, -1), x[:, rows], y[:, rows], ulp=1)
        assert is_aligned(kernel) or rows.stop


@pytest.mark.parametrize("length", [40, 5000])
@pytest.mark.parametrize("place", [-1, 2, 11])
def test_results_that_a_row_shares_at_a_place_that_is_data(length: int, place: int, rng: np.random.Generator) -> None:
    """They are stored once both are known, whichever comes later."""

    def function(table: jax.Array, i: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        i, mean = i + 3, x.mean(1)
        most = jnp.maximum(mean, y.max(1))
        kept = jnp.exp(mean - most)
        return jax.lax.dynamic_update_slice(table, kept[None], (i, jnp.int32(0))), most, x * kept[:, None]

    table, x, y = (rng.standard_normal(shape, np.float32) for shape in ((9, 6), (6, length), (6, length)))
    arguments = (table, np.int32(place), x, y)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    ours, theirs, kernels = run_both(for_accelerator(import_module(hlo_bytes(function, *shapes))).entry, arguments)
    assert any(len(kernel.outputs) > 1 for kernel in kernels)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and not np.any(distance(a, b) > 32)
