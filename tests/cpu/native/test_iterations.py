"""Iterations of loops: single points, a few elements, blocks and windows at run-time starts, against XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cpu.native.harness import get, put
from flagos_backend.importer import schema
from plugin_abi.host import Artifact, Context, Executable
from programs import hlo_bytes, run_on_xla

_ITERATIONS = 37
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float32", "float64", "bfloat16", "float16")


def _both(
    function: Callable[..., Any], *arguments: Any, context: Context, native: bool = True
) -> list[tuple[np.ndarray, np.ndarray]]:
    """What we and XLA make of a program that is native from end to end, unless it says otherwise."""
    with jax.enable_x64(any(a.dtype.itemsize == 8 for a in arguments)):
        hlo = hlo_bytes(function, *arguments)
    message = schema.Program(schema_version=1, producer="tests")
    message.module.MergeFromString(hlo)
    memory = context.devices[0].default_memory
    with Executable.compile(context, message.SerializeToString()) as executable:
        assert not native or "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        outputs, done = executable.execute([[put(memory, np.asarray(a)) for a in arguments]])
        done[0].wait()
        ours = [get(output) for output in outputs[0]]
    return list(zip(ours, run_on_xla(hlo, arguments), strict=True))


def _assert_equal(function: Callable[..., Any], *arguments: Any, context: Context) -> None:
    for mine, theirs in _both(function, *arguments, context=context):
        wide = mine.dtype if mine.dtype.kind in "iub" else np.float64  # one that knows its NaNs
        np.testing.assert_array_equal(mine.astype(wide), theirs.astype(wide))


def _scanned(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of elements of arrays, one of each an iteration."""
    return lambda *arrays: lax.scan(lambda _, elements: (0, function(*elements)), 0, arrays)[1]


_ANY = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "compare": lambda x, y: (x == y, x != y, x < y, x <= y, x > y, x >= y),
    "select": lambda x, y: jnp.where(x < y, x, y),
    "abs": lambda x, y: (jnp.abs(x), lax.sign(y)),
    "negate": lambda x, y: (-x, -y),
    "clamp": lambda x, y: lax.clamp(y, x, jnp.maximum(y, 1).astype(x.dtype)),
}
_OF_INTEGERS = {
    "divide": lax.div,
    "remainder": lax.rem,
    "bits": lambda x, y: (x & y, x | y, x ^ y, ~x),
    "shift": lambda x, y: (lax.shift_left(x, y), lax.shift_right_logical(x, y), lax.shift_right_arithmetic(x, y)),
}
_OF_FLOATS = {
    "divide": lax.div,
    "rounded": lambda x, y: (jnp.ceil(x), jnp.floor(y), lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)),
    "root": lambda x, y: (jnp.sqrt(x), jnp.sqrt(jnp.abs(y))),
}


@pytest.mark.parametrize("name", _INTEGERS)
def test_points_of_integers(name: str, context: Context, rng: np.random.Generator) -> None:
    limits = np.iinfo(name)
    edges = np.array([limits.min, limits.min + 1, 0, 1, 2, 7, 8, 31, 64, limits.max - 1, limits.max], name)
    drawn = rng.integers(limits.min, limits.max, (2, _ITERATIONS), name, endpoint=True)
    x, y = (np.concatenate([rng.permutation(edges), row, edges]) for row in drawn)
    for function in (_ANY | _OF_INTEGERS).values():
        _assert_equal(_scanned(function), x, y, context=context)


@pytest.mark.parametrize("name", _FLOATS)
def test_points_of_floats(name: str, context: Context, rng: np.random.Generator) -> None:
    edges = np.array([0.0, -0.0, 1.0, -1.5, 2.5, np.inf, -np.inf, np.nan, 1e-3, -6e4])
    x, y = (np.concatenate([rng.permutation(edges), rng.standard_normal(_ITERATIONS), edges]) for _ in range(2))
    dtype = jnp.dtype(name)
    for function in (_ANY | _OF_FLOATS).values():
        _assert_equal(_scanned(function), x.astype(dtype), y.astype(dtype), context=context)


@pytest.mark.parametrize("name", ["float32", "float64", "uint32", "uint64"])
def test_pairs_of_points(name: str, context: Context, rng: np.random.Generator) -> None:
    """Of numbers whose sums and products are exact."""
    x, y, z = rng.integers(0, 1 << 7, (3, _ITERATIONS)).astype(name)

    def function(x: jax.Array, y: jax.Array, z: jax.Array) -> Any:
        return x + y + z, x + y - z, (x + y) * z, (x - y) * z, x * y + z, z - x * y, x * y * z

    _assert_equal(_scanned(function), x, y, z, context=context)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (17,), (3, 5), (2, 3, 4)], ids=str)
def test_values_that_others_still_need(shape: tuple[int, ...], context: Context, rng: np.random.Generator) -> None:
    """Carried values that are overwritten where they stand, change places, or are kept twice."""

    def step(state: tuple[jax.Array, ...], x: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        a, b, c, d = state
        return (a + x, a - b, d, c ^ a), (a, b + a, a)

    def function(a: jax.Array, b: jax.Array, xs: jax.Array) -> Any:
        return lax.scan(step, (a, b, a + b, a - b), xs)

    a, b, xs = (rng.integers(-100, 100, s, np.int32) for s in (shape, shape, (_ITERATIONS, *shape)))
    _assert_equal(function, a, b, xs, context=context)


def test_tiles_of_a_few_elements(context: Context, rng: np.random.Generator) -> None:
    """Elements that are repeated, counted, reversed, strided, transposed, and of several types."""

    def step(m: jax.Array, i: jax.Array) -> tuple[jax.Array, Any]:
        v = m[0] + i
        other = (m.T + jnp.arange(4)[:, None] * i)[::-1].T
        return other % 1009, (v[::-1], v[::2] * 3, (v > i).astype(jnp.uint8), v.astype(jnp.int16), jnp.full(5, v[1]))

    def function(m: jax.Array, xs: jax.Array) -> Any:
        return lax.scan(step, m, xs)

    _assert_equal(
        function, rng.integers(0, 1000, (3, 4), np.int32), rng.integers(0, 9, _ITERATIONS, np.int32), context=context
    )


@pytest.mark.parametrize("name", ["int8", "int32", "int64", "uint8", "uint32", "uint64"])
def test_blocks_at_starts(name: str, context: Context, rng: np.random.Generator) -> None:
    """Starts outside are clamped: of elements, rows, and boxes."""

    def step(state: jax.Array, at: jax.Array) -> tuple[jax.Array, Any]:
        element = lax.dynamic_slice(state, (at[0], at[1]), (1, 1))
        row, box = (lax.dynamic_slice(state, (at[1], at[0]), size) for size in ((1, 6), (2, 3)))
        state = lax.dynamic_update_slice(state, element + 1, (at[1], at[0]))
        return lax.dynamic_update_slice(state, row * 3, (at[0], at[1])), (element, row, box)

    limits = np.iinfo(name)
    starts = rng.integers(max(-3, limits.min), 9, (_ITERATIONS, 2)).astype(name)
    starts[:4] = limits.max, limits.min
    state = rng.integers(0, 99, (5, 6), np.int64)
    _assert_equal(lambda s, at: lax.scan(step, s, at), state, starts, context=context)


@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_starts_of_fewer_than_eight_bits(name: str, context: Context, rng: np.random.Generator) -> None:
    """At starts of int2, XLA of jaxlib 0.10.2 itself writes where it may not."""

    def step(state: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        block = lax.dynamic_slice(state, (at[0], at[1]), (2, 3))
        return lax.dynamic_update_slice(state, block + 1, (at[1], at[0])), block

    def function(state: jax.Array, at: jax.Array) -> Any:
        return lax.scan(step, state, at.astype(name))  # converted, and compared with 0, by library calls

    limits = jnp.iinfo(name)
    starts = rng.integers(int(limits.min), int(limits.max), (_ITERATIONS, 2), np.int8, endpoint=True)
    state = rng.integers(0, 99, (5, 6), np.int32)
    for mine, theirs in _both(function, state, starts, context=context, native=False):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_windows_at_indices(mode: str, context: Context, rng: np.random.Generator) -> None:
    """One window an iteration, of an element or a row; of indices from the end, and outside."""

    def step(state: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        (v, m), (i, j, x) = state, xs
        v = v.at[i].add(x, mode=mode).at[j].set(x, mode=mode).at[i].max(7, mode=mode)
        m = m.at[i, j].multiply(x, mode=mode).at[j].add(v[:6], mode=mode)
        taken = (v.at[j].get(mode="clip"), m.at[j].get(mode="fill", fill_value=-1), m.at[i, j].get(mode="clip"))
        return (v, m % 1000), taken

    i, j = rng.integers(-12, 12, (2, _ITERATIONS), np.int32)
    x, v, m = (rng.integers(-50, 50, shape, np.int32) for shape in (_ITERATIONS, 9, (5, 6)))
    _assert_equal(lambda *a: lax.scan(step, a[:2], a[2:]), v, m, i, j, x, context=context)


def test_steps_that_are_none_for_kernels(context: Context, rng: np.random.Generator) -> None:
    """Reductions, products, sorted rows, branches and loops between single points."""

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        total = state.sum() % 97
        grown = lax.fori_loop(0, total % 5, lambda i, t: t * 3 + i, total)
        state = lax.cond(grown % 2 == 0, lambda s: s + grown, lambda s: s[::-1] - x, state)
        return state % 1009, (total, grown, lax.top_k(state, 2)[0], state @ state)

    state, xs = rng.integers(0, 99, 7, np.int32), rng.integers(0, 99, _ITERATIONS, np.int32)
    _assert_equal(lambda *a: lax.scan(step, *a), state, xs, context=context)


@pytest.mark.parametrize("name", ["int8", "int32", "uint64", "bool"])
def test_reductions_of_a_few_elements(name: str, context: Context, rng: np.random.Generator) -> None:
    """One row and several, whole and strided, and what is computed of a row and its reductions."""

    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        if x.dtype == bool:
            return carry ^ x, (x.any(1), carry.all(), (x & carry).any(0), x ^ x.any(1, keepdims=True))
        least, total = x.min(1), x.sum(1, dtype=x.dtype)
        spread = (x - least[:, None]) * total[:, None] + jnp.arange(7, dtype=x.dtype)
        reductions = (least, total, x.max(), x[::-1, ::2].sum(1, dtype=x.dtype), x[0].prod(dtype=x.dtype), x.sum(0))
        return carry + spread, (*reductions, spread.sum(1, dtype=x.dtype), (carry[1] - x[2]).max())

    x = rng.integers(0, 2 if name == "bool" else 100, (_ITERATIONS, 4, 7)).astype(name)
    _assert_equal(lambda x: lax.scan(step, jnp.zeros_like(x[0]), x), x, context=context)


@pytest.mark.parametrize(
    ("name", "tolerance"), [("float32", 1e-5), ("float64", 1e-12), ("bfloat16", 3e-2), ("float16", 4e-3)]
)
@pytest.mark.parametrize("size", [1, 5, 40])
def test_softmax_and_norms(name: str, tolerance: float, size: int, context: Context, rng: np.random.Generator) -> None:
    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        normal = (x - x.mean()) / jnp.sqrt(jnp.square(x - x.mean()).mean() + 1)
        return carry / 2 + normal, (jax.nn.softmax(x), x / (1 + jnp.sqrt(jnp.square(x).sum())), carry.max())

    x = rng.standard_normal((_ITERATIONS, size)).astype(jnp.dtype(name))
    for mine, theirs in _both(lambda x: lax.scan(step, jnp.zeros_like(x[0]), x), x, context=context):
        np.testing.assert_allclose(mine.astype(float), theirs.astype(float), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "tolerance"), [("float32", 1e-5), ("float64", 1e-13)])
def test_products_of_a_few_elements(name: str, tolerance: float, context: Context, rng: np.random.Generator) -> None:
    """Of matrices as they stand, transposed and inside others, and of vectors."""

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        return state / 4 + x @ x.T, (state @ x, state.T @ x, x.T @ state, x[:, 1] @ state, state @ x[:, 2], x[0] @ x[1])

    x = rng.standard_normal((_ITERATIONS, 5, 3)).astype(name)
    start = np.zeros((5, 5), name)
    for mine, theirs in _both(lambda *a: lax.scan(step, *a), start, x, context=context):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=10 * tolerance)


def test_smoothing(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal(1000).astype(np.float32)
    smoothed = lambda x: lax.scan(lambda c, y: (c * 0.9 + y,) * 2, jnp.float32(0), x)[1]  # noqa: E731
    for mine, theirs in _both(smoothed, x, context=context):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
