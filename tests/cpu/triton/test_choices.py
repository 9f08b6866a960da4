"""Concatenates, pads and rolls inside the kernels that read them, against NumPy and the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from cpu.triton.harness import run_both
from flagos_backend.codegen.triton import RegionKernel
from flagos_backend.importer import import_module
from programs import hlo_bytes
from support.numbers import distance
from support.passes import for_accelerator

TYPES = [np.bool_, np.int8, np.uint8, np.int32, np.uint64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def compare(
    function: Callable[..., Any], *arguments: np.ndarray, kernels: int = 1, expected: Any = None, ulp: float = 0
) -> list[RegionKernel]:
    """``function`` in so many generated kernels gives what the reference does, and NumPy if ``expected`` is given."""
    with jax.enable_x64(True):
        computation = for_accelerator(import_module(hlo_bytes(function, *arguments))).entry
    ours, theirs, made = run_both(computation, arguments)
    assert len(made) == kernels
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert not np.any(distance(a, b) > ulp)
    if expected is not None:
        np.testing.assert_array_equal(ours[0], expected)
    return made


def draw(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) * 20).astype(np.int64).astype(dtype)


def f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shift", [-20, -7, -1, 0, 1, 3, 6, 8, 23])
def test_rolls_by_any_shift(shift: int, rng: np.random.Generator) -> None:
    x = f32(rng, 7)
    compare(lambda x: jnp.roll(x, shift) + x, x, expected=np.roll(x, shift) + x)
    y = f32(rng, 5, 7)
    for axis in (0, 1):
        compare(lambda y, axis=axis: jnp.roll(y, shift, axis) * 2, y, expected=np.roll(y, shift, axis) * 2)


def test_rolls_along_several_dimensions(rng: np.random.Generator) -> None:
    x = f32(rng, 4, 5, 6)
    for axes in ((0, 1), (0, 2), (1, 2), (0, 1, 2)):
        shifts = tuple(int(s) for s in rng.integers(1, 4, len(axes)))
        rolled = np.roll(x, shifts, axes)
        compare(lambda x, s=shifts, a=axes: x - jnp.roll(x, s, a), x, expected=x - rolled)
        (kernel,) = compare(lambda x, s=shifts, a=axes: jnp.roll(x, s, a), x, expected=rolled)
        # Where a roll by half a dimension comes last, both halves are written at once.
        assert kernel.source.count("tl.load") <= 2


def test_a_stencil_is_one_kernel(rng: np.random.Generator) -> None:
    shifts = [(a, b) for a, b in itertools.product((-1, 0, 1), repeat=2) if (a, b) != (0, 0)]

    def around(roll: Callable[..., Any], x: Any) -> Any:
        return sum(roll(x, shift, (0, 1)) for shift in shifts)

    x = rng.integers(0, 2, (9, 12), dtype=np.int32)
    compare(lambda x: around(jnp.roll, x), x, expected=around(np.roll, x))


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_chosen(dtype: Any, rng: np.random.Generator) -> None:
    x, y = draw(rng, dtype, 5, 6), draw(rng, dtype, 5, 3)
    both = np.concatenate([x, y], 1)
    compare(lambda x, y: jnp.concatenate([x, y], 1), x, y, expected=both)
    compare(
        lambda x, y: jnp.concatenate([x, y], 1) == jnp.concatenate([y, x], 1),
        x,
        y,
        expected=both == np.concatenate([y, x], 1),
    )
    compare(lambda x: jnp.pad(x, 1, constant_values=1), x, expected=np.pad(x, 1, constant_values=1))
    compare(lambda x: jnp.pad(x, ((1, 2), (0, 3))) == 0, x, expected=np.pad(x, ((1, 2), (0, 3))) == 0)


def test_what_is_only_moved(rng: np.random.Generator) -> None:
    x = (f32(rng, 6, 5) + 1j * f32(rng, 6, 5)).astype(np.complex64)
    compare(lambda x: jnp.roll(x, (2, 1), (0, 1)).T, x, expected=np.roll(x, (2, 1), (0, 1)).T)
    compare(lambda x: jnp.concatenate([x, x[:2]], 0), x, expected=np.concatenate([x, x[:2]], 0))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 9, 10])
def test_so_many_operands_one_of_them_empty(count: int, rng: np.random.Generator) -> None:
    arrays = [f32(rng, 4, int(size)) for size in rng.permutation(count)]
    kernels = 1 if count <= 9 else 10  # nine that have elements are put together part by part
    expected = np.concatenate(arrays, 1) * 2
    compare(lambda *arrays: jnp.concatenate(arrays, 1) * 2, *arrays, expected=expected, kernels=kernels)


@pytest.mark.parametrize("mode", ["reflect", "symmetric", "wrap", "edge"])
def test_pads_that_repeat_elements(mode: Any, rng: np.random.Generator) -> None:
    x = f32(rng, 6, 7)
    made = compare(lambda x: jnp.pad(x, ((2, 1), (3, 2)), mode) + 1, x, expected=np.pad(x, ((2, 1), (3, 2)), mode) + 1)
    assert made[0].source.count("tl.load") <= (9 if mode == "edge" else 1)


@pytest.mark.parametrize(
    "padding",
    [
        ((0, 0, 0), (2, 1, 0)),
        ((-2, 3, 0), (1, -1, 0)),
        ((0, 0, 1), (1, 0, 2)),
        ((-1, 2, 2), (2, -3, 1)),
        ((3, -5, 0), (0, 0, 0)),
        ((-9, 9, 0), (0, 0, 0)),
    ],
)
def test_pads(padding: Sequence[tuple[int, int, int]], rng: np.random.Generator) -> None:
    """Negative ones crop; the third number goes between elements."""
    x = f32(rng, 5, 6)
    for value in (np.float32(3), np.float32(-0.0)):
        compare(lambda x, v: lax.pad(x, v, padding) * 2, x, value)
        compare(lambda x, v: lax.pad(x, v, padding), x, value)
    compare(lambda x, v: lax.pad(x * x, v * 2, padding).sum(0), x, np.float32(1.5), ulp=4)


def test_interleaved(rng: np.random.Generator) -> None:
    x, y = f32(rng, 5, 3), f32(rng, 4, 3)

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        zero = jnp.zeros((), x.dtype)
        return lax.add(lax.pad(x, zero, ((0, 0, 1), (0, 0, 0))), lax.pad(y, zero, ((1, 1, 1), (0, 0, 0))))

    expected = np.zeros((9, 3), np.float32)
    expected[::2], expected[1::2] = x, y
    compare(function, x, y, expected=expected)
    # Of which one half is wanted, nothing is divided for.
    (kernel,) = compare(lambda x, y: function(x, y)[1::2] * 3, x, y, expected=y * 3)
    assert "remainder" not in kernel.source


def test_scans(rng: np.random.Generator) -> None:
    a, b = f32(rng, 37, 5), f32(rng, 37, 5)

    def after(one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return one[0] * two[0], one[1] * two[0] + two[1]

    computation = for_accelerator(
        import_module(hlo_bytes(lambda a, b: lax.associative_scan(after, (a, b))[1], a, b))
    ).entry
    ours, theirs, made = run_both(computation, [a, b])
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    assert len(made) <= 8, "one for each step down, and one for several steps up"
    x = f32(rng, 100)
    compare(lambda x: lax.associative_scan(jnp.minimum, x), x, kernels=7, expected=np.minimum.accumulate(x))


def test_what_is_not_chosen_leaves_no_trace(rng: np.random.Generator) -> None:
    """Neither NaN in the other operand, nor quotients by what lies beyond an operand's end."""
    x, y = f32(rng, 6, 4), np.full((6, 3), np.nan, np.float32)
    made = compare(lambda x, y: jnp.concatenate([x, y], 1)[:, :5].sum(1), x, y)
    assert len(made) == 1
    compare(lambda x, y: jnp.concatenate([x, y], 1)[:, :4] * 2, x, y, expected=x * 2)
    n, d = rng.integers(1, 99, (6, 4), dtype=np.int32), rng.integers(1, 9, (6, 4), dtype=np.int32)
    compare(
        lambda n, d: jnp.pad(lax.div(n, d), ((0, 0), (2, 5))) + 1, n, d, expected=np.pad(n // d, ((0, 0), (2, 5))) + 1
    )


def test_operands_are_computed_where_they_are_chosen(rng: np.random.Generator) -> None:
    x, c, s = f32(rng, 2, 6, 3, 8), f32(rng, 6, 1, 8), f32(rng, 6, 1, 8)

    def rope(x: Any, c: Any, s: Any, n: Any = jnp) -> Any:
        return x * c + n.concatenate([-x[..., 4:], x[..., :4]], -1) * s

    compare(rope, x, c, s, expected=rope(x, c, s, np))
    # Whole numbers that BF16 holds, also their products and sums: elsewhere rounding decides what is above zero.
    narrow = [rng.integers(-8, 9, a.shape).astype(ml_dtypes.bfloat16) for a in (x, c, s)]
    compare(lambda x, c, s: rope(x, c, s) > 0, *narrow, expected=rope(*map(np.float32, narrow), np) > 0)


def test_what_is_expensive_is_not_computed_for_all(rng: np.random.Generator) -> None:
    x, y = f32(rng, 6, 4), f32(rng, 6, 3)
    made = compare(lambda x, y: jnp.concatenate([jnp.tanh(x), y], 1) * 2, x, y, kernels=2, ulp=4)
    assert "select" not in made[0].text
    compare(lambda x, y: jnp.concatenate([jnp.tanh(x), jnp.exp(y)], 1), x, y, kernels=2, ulp=4)


def test_reductions_over_them(rng: np.random.Generator) -> None:
    x, y = f32(rng, 40, 30), f32(rng, 40, 13)
    for axis in (0, 1, (0, 1)):
        compare(lambda x, y, axis=axis: jnp.concatenate([x, y], 1).max(axis), x, y)
    compare(lambda x: jax.nn.softmax(jnp.roll(x, 3, 1), -1), x, ulp=8)
    compare(lambda x: jax.nn.softmax(jnp.pad(x, ((0, 0), (1, 7)), constant_values=-jnp.inf), -1), x, ulp=8)
    row = f32(rng, 1, 13)
    compare(lambda x, r: jnp.concatenate([x, jnp.broadcast_to(r, (40, 13))], 1).max(0), x, row)


def test_long_rows(rng: np.random.Generator) -> None:
    """Walked several times, and of a length that begins anywhere: their ends are apart. Few of them are spread."""
    x, y = f32(rng, 24, 20_001), f32(rng, 24, 13_000)
    (kernel,) = compare(lambda x, y: jax.nn.log_softmax(jnp.concatenate([x, y], 1)), x, y, ulp=64)
    assert kernel.walks == 3
    compare(lambda x, y: jax.nn.log_softmax(jnp.concatenate([x, y], 1)), x[:3], y[:3], ulp=64, kernels=3)


def test_rows_and_columns(rng: np.random.Generator) -> None:
    """What a block shares of a row or a column is loaded where something of it is chosen."""
    x, r = f32(rng, 64, 1536), f32(rng, 512)
    compare(
        lambda x, r: jnp.concatenate([jnp.broadcast_to(r, (64, 512)), x], 1) + 1,
        x,
        r,
        expected=np.concatenate([np.broadcast_to(r, (64, 512)), x], 1) + 1,
    )
    c = f32(rng, 64)
    compare(
        lambda x, c: jnp.concatenate([x, c[:, None]], 1).T + 1, x, c, expected=np.concatenate([x, c[:, None]], 1).T + 1
    )


def test_places_that_numbers_tell(rng: np.random.Generator) -> None:
    """Slices, rolls and gathers whose starts are known at run time, of what is put together."""
    x, y = f32(rng, 9, 4), f32(rng, 5, 4)
    for start in (0, 3, 8, 13, 99):
        compare(lambda x, y, i: lax.dynamic_slice_in_dim(jnp.concatenate([x, y], 0), i, 4) * 2, x, y, np.int32(start))
    for shift in (-3, 0, 4, 20):
        compare(lambda x, s: jnp.roll(x, s, 0) + x, x, np.int32(shift), expected=np.roll(x, shift, 0) + x)
    rows = rng.integers(0, 14, 20, dtype=np.int32)
    compare(lambda x, y, i: jnp.concatenate([x, y], 0)[i] + 1, x, y, rows, expected=np.concatenate([x, y], 0)[rows] + 1)
    compare(
        lambda x, i: jnp.pad(x[i], ((2, 0), (0, 1))) + 1,
        x,
        rows % 9,
        kernels=2,
        expected=np.pad(x[rows % 9], ((2, 0), (0, 1))) + 1,
    )


def test_nothing_is_written_over_what_is_still_read(rng: np.random.Generator) -> None:
    x = f32(rng, 8, 8)
    (kernel,) = compare(lambda x: jnp.roll(x, 1, 0) + x, x)
    assert not kernel.may_overwrite(kernel.outputs[0], kernel.inputs[0])
    (kernel,) = compare(lambda x, y: jnp.pad(x[1:], ((0, 1), (0, 0))) + y, x, x)
    assert not kernel.may_overwrite(kernel.outputs[0], kernel.inputs[0])
    assert kernel.may_overwrite(kernel.outputs[0], kernel.inputs[1])
