"""Loops that read gathers where the elements stand, against stock XLA: in each kind of loop, with indices of each type,
in and out of range, of each width of element. No gather is a step of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from cpu.native.harness import run_function
from plugin_abi.host import Context
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same

_INDICES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_ELEMENTS = ("bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64", "complex64")
_MODES = ("clip", "fill", "promise_in_bounds")


def _check(context: Context, function: Callable[..., Any], *arguments: np.ndarray, tolerance: float | None) -> str:
    """What the program says of itself."""
    with jax.enable_x64(True):
        ours, text = run_function(context, function, *arguments)
        theirs = run_on_xla(hlo_bytes(function, *arguments), arguments)
    assert "with 0 library calls" in text and "native gather" not in text, text
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, np.asarray(other), tolerance)
    return text


def _numbers(rng: np.random.Generator, dtype: str, *dims: int) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if kind == np.bool_ or kind.kind in "iu":
        return rng.integers(0, 2 if kind == np.bool_ else 100, dims).astype(kind)
    values = rng.standard_normal(dims)
    return (values + 1j * rng.standard_normal(dims) if kind.kind == "c" else values).astype(kind)


def _indices(rng: np.random.Generator, dtype: str, size: int, *dims: int) -> np.ndarray:
    """From either end, a few beyond it, and as far as the type goes."""
    kind = np.iinfo(dtype)
    found = rng.integers(max(-size - 3, kind.min), min(size + 3, kind.max), dims).astype(dtype)
    found.reshape(-1)[:3] = kind.min, kind.max, 1
    return found


@pytest.mark.parametrize("index", _INDICES)
@pytest.mark.parametrize("mode", _MODES[:2])
def test_types_of_indices(index: str, mode: str, context: Context, rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
        return x.at[i].get(mode=mode) * 2 + y

    x, y = _numbers(rng, "float32", 90), _numbers(rng, "float32", 1500)
    _check(context, function, x, _indices(rng, index, 90, 1500), y, tolerance=None)


@pytest.mark.parametrize("dtype", _ELEMENTS)
def test_types_of_elements(dtype: str, context: Context, rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array, p: jax.Array) -> jax.Array:
        return jnp.where(p, x[i], x[0])

    x, i, p = _numbers(rng, dtype, 300), _indices(rng, "int32", 300, 70, 33), _numbers(rng, "bool", 70, 33)
    _check(context, function, x, i, p, tolerance=None)


def _row_sums(x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
    return (x[i] * y).sum(1)


def _column_maxima(x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
    return (x[i] + y).max(0)


def _softmax(x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
    return jax.nn.softmax(x[i] + y, 1)


def _each_row_its_own(x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
    """One element for each row, beside what is reduced of it."""
    return x[i[:, 0]] - y.sum(1)


def _of_reduced_rows(x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
    """One element for each row, within it."""
    return (x[i[:, 0]][:, None] * y).sum(1)


def _transposed(x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
    return x[i.T] * 2 + y.T


def _whole_sum(x: jax.Array, i: jax.Array, y: jax.Array) -> jax.Array:
    return (x[i] * y).sum()


_SHAPES = {
    _row_sums: ((40, 700), (900, 7), (3, 150)),
    _column_maxima: ((40, 700), (700, 5), (300, 64)),
    _softmax: ((40, 700), (600, 9), (8, 128)),
    _each_row_its_own: ((40, 700), (300, 20)),
    _of_reduced_rows: ((40, 700), (300, 20)),
    _transposed: ((40, 70), (200, 200)),
    _whole_sum: ((60, 70), (500, 700)),
}


@pytest.mark.parametrize(
    ("function", "dims"),
    [(f, dims) for f, shapes in _SHAPES.items() for dims in shapes],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_kinds_of_loops(
    function: Callable[..., Any], dims: tuple[int, int], context: Context, rng: np.random.Generator
) -> None:
    x, i, y = _numbers(rng, "float32", 123), _indices(rng, "int32", 123, *dims), _numbers(rng, "float32", *dims)
    _check(context, function, x, i, y, tolerance=1e-5)


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("index", ["int32", "uint8", "int64"])
def test_several_indices(mode: str, index: str, context: Context, rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        place = [jnp.clip(k, 0, 19) if mode == _MODES[2] else k for k in (i, j)]
        near, far = (x.at[place[0], d, place[1]].get(mode=mode) for d in (1, 2))
        return near * far - near

    x = _numbers(rng, "float64", 20, 3, 25)
    _check(context, function, x, *(_indices(rng, index, 22, 17, 90) for _ in "ij"), tolerance=None)


def test_along_an_axis(context: Context, rng: np.random.Generator) -> None:
    """Batches of the array and of the indices."""

    def function(x: jax.Array, i: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.take_along_axis(x, i % x.shape[axis], axis) + 1.5 for axis in (0, 1, 2))

    _check(context, function, _numbers(rng, "float32", 6, 7, 80), _indices(rng, "int32", 90, 6, 7, 80), tolerance=None)


def test_indices_that_are_known_to_be_inside(context: Context, rng: np.random.Generator) -> None:
    """Those that have been clamped, masked or counted are not clamped again."""

    def function(x: jax.Array, i: jax.Array) -> tuple[jax.Array, ...]:
        known = jnp.clip(i, 0, 63), i & 63, jnp.minimum(jnp.abs(jnp.maximum(i, -9)), 63), jnp.where(i > 3, 2, 7)
        return tuple(x[k] * 3 for k in known)

    x, i = _numbers(rng, "float32", 64), _indices(rng, "int32", 90, 2000)
    assert "select" not in _check(context, lambda x, i: x[jnp.clip(i, 0, 63)] * 3, x, i, tolerance=None)
    _check(context, function, x, i, tolerance=None)


@pytest.mark.parametrize("machine_code", ["0", "1"])
def test_within_a_loop(
    machine_code: str, context: Context, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk over a table, in machine code and as a list of calls."""
    monkeypatch.setenv("FLAGOS_MACHINE_CODE", machine_code)

    def function(table: jax.Array, i: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            i, x = carry
            x = x * 0.5 + table[i, (i * 3) % 11]
            return ((i * 7 + 1) % 29 - 5, x), x.max()

        (_, x), greatest = lax.scan(step, (i, x), None, 50)
        return x, greatest

    table, x = _numbers(rng, "float32", 24, 11), _numbers(rng, "float32", 40)
    _check(context, function, table, _indices(rng, "int32", 24, 40), x, tolerance=1e-6)


@pytest.mark.parametrize("dims", [(0,), (), (1,), (3, 0)])
def test_few_elements(dims: tuple[int, ...], context: Context, rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array) -> jax.Array:
        return x.at[i].get(mode="clip") + 1

    with jax.enable_x64(True):
        x, i = _numbers(rng, "float32", 9), rng.integers(-20, 20, dims).astype(np.int32)
        (ours,), _ = run_function(context, function, x, i)
        # Of JAX's negative indices the last nine count from the end.
        np.testing.assert_array_equal(ours, x[np.clip(np.where(i < 0, i + 9, i), 0, 8)] + np.float32(1))


def test_what_is_changed_in_place_is_read_before(context: Context, rng: np.random.Generator) -> None:
    def function(x: jax.Array, i: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x * 2
        seen = x[i]
        changed = x.at[i].add(y, mode="drop")
        return changed, seen + changed[0]

    x, i, y = _numbers(rng, "float64", 50), _indices(rng, "int32", 50, 300), _numbers(rng, "float64", 300)
    with jax.enable_x64(True):
        ours, _ = run_function(context, function, x, i, y)
        theirs = run_on_xla(hlo_bytes(function, x, i, y), (x, i, y))
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, np.asarray(other), 1e-12)


def test_random_programs(context: Context, rng: np.random.Generator) -> None:
    """Random shapes, types and reductions."""
    for _ in range(12):
        rows, columns, size = (int(n) for n in rng.integers(1, (90, 90, 200)))
        index, dtype = str(rng.choice(_INDICES)), str(rng.choice(["float32", "float64", "int32", "int64"]))
        axis, mode = rng.choice([-1, 0, 1]), str(rng.choice(_MODES[:2]))
        size = min(size, np.iinfo(index).max)  # of more JAX refuses such indices

        def function(x: jax.Array, i: jax.Array, y: jax.Array, axis: int = axis, mode: str = mode) -> jax.Array:
            found = x.at[i].get(mode=mode, fill_value=3) * y - y
            return found if axis < 0 else found.sum(axis)

        x, y = _numbers(rng, dtype, size), _numbers(rng, dtype, rows, columns)
        i = rng.integers(0, min(size + 5, np.iinfo(index).max), (rows, columns)).astype(index)
        _check(context, function, x, i, y, tolerance=1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("channels", (1, 2, 3, 4, 5))
@pytest.mark.parametrize("dtype", ("uint8", "bfloat16", "float32", "float64", "complex64"))
def test_channels_of_samples(channels: int, dtype: str, context: Context, rng: np.random.Generator) -> None:
    """Where a pixel is sampled is one for all of its channels; some of the pixels are beyond the image."""

    def function(image: jax.Array, y: jax.Array, x: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
        rows, columns = (jnp.clip(jnp.floor(p).astype(int), 0, n - 1) for p, n in zip((y, x), (19, 23), strict=True))
        sample = (
            jnp.stack([image[rows, columns, c] for c in range(channels)], -1) if channels > 3 else image[rows, columns]
        )
        return jnp.where(x[..., None] > y[..., None], sample, z), sample + z[::-1]

    image, z = _numbers(rng, dtype, 19, 23, channels), _numbers(rng, dtype, 70, 31, channels)
    y, x = (rng.uniform(-9, 30, (70, 31)).astype(np.float32) for _ in range(2))
    _check(context, function, image, y, x, z, tolerance=None)
