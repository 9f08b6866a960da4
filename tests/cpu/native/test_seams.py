"""Concatenates, pads and rolls that loops read where their operands stand, against stock XLA: along each dimension, to
both sides, of each type, in loops and before reductions. What is read so is never written."""

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

_TYPES = ("bool", "int8", "uint16", "int32", "uint64", "float16", "bfloat16", "float32", "float64", "complex64")


def _check(context: Context, function: Callable[..., Any], *arguments: np.ndarray, tolerance: float | None) -> str:
    """What the program says of itself."""
    with jax.enable_x64(True):
        ours, text = run_function(context, function, *arguments)
        theirs = run_on_xla(hlo_bytes(function, *arguments), arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same(mine, np.asarray(other), tolerance)
    return text


def _is_read_in_place(text: str) -> bool:
    written = ("native loop concatenate", "native loop pad", ": copy")
    return "with 0 library calls" in text and not any(words in text for words in written)


def _numbers(rng: np.random.Generator, dtype: str, *dims: int) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if kind == np.bool_ or kind.kind in "iu":
        return rng.integers(0, 2 if kind == np.bool_ else 100, dims).astype(kind)
    values = rng.standard_normal(dims)
    return (values + 1j * rng.standard_normal(dims) if kind.kind == "c" else values).astype(kind)


def _roll(x: jax.Array) -> jax.Array:
    return x - jnp.roll(x, 3, 1)


def _roll_of_rows(x: jax.Array) -> jax.Array:
    return x - jnp.roll(x, -5, 0) * jnp.roll(x, 1, 0)


def _roll_of_both(x: jax.Array) -> jax.Array:
    return x + jnp.roll(x, (2, -7), (0, 1))


def _pad_beyond(x: jax.Array) -> jax.Array:
    """More on one side, less on the other."""
    return lax.pad(x, np.float32(2), ((-3, 5, 0), (4, -9, 0)))[:, 1:] * 2


def _stencil(x: jax.Array) -> jax.Array:
    p = jnp.pad(x, 1)
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * x


def _padded(mode: str) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jnp.pad(x, ((2, 3), (4, 1)), mode=mode) * 2 + 1


def _backwards(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, x[:, ::-1]], 1)[::-1, ::-1] * 3


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, x[:7]], 0).T * 2


def _sums(x: jax.Array) -> jax.Array:
    return (x + jnp.roll(x, 4, 0)).sum(1)


def _softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x * jnp.roll(x, 4, 0), 1)


def _strided(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x, x[:, 9:]], 1)[::2, 5::3] + 1


@pytest.mark.parametrize(
    "function",
    (
        *(_roll, _roll_of_rows, _roll_of_both, _pad_beyond, _stencil, _backwards, _transposed, _sums, _softmax),
        *(_strided, *map(_padded, ("constant", "edge", "reflect", "symmetric", "wrap"))),
    ),
)
def test_operands_are_read_where_they_stand(
    function: Callable[[jax.Array], jax.Array], context: Context, rng: np.random.Generator
) -> None:
    rows, columns = (int(n) for n in rng.integers(150, 400, 2))
    text = _check(context, function, _numbers(rng, "float32", rows, columns), tolerance=1e-5)
    assert _is_read_in_place(text), text


@pytest.mark.parametrize("dtype", _TYPES)
def test_types(dtype: str, context: Context, rng: np.random.Generator) -> None:
    def function(x: jax.Array, y: jax.Array, p: jax.Array) -> jax.Array:
        z = jnp.concatenate([x, y, x[:, :9]], 1)
        return jnp.where(p, z, jnp.roll(z, 40, 0))

    x, y = _numbers(rng, dtype, 201, 140), _numbers(rng, dtype, 201, 110)
    _check(context, function, x, y, _numbers(rng, "bool", 201, 259), tolerance=None)


@pytest.mark.parametrize("axis", (0, 1, 2))
def test_many_operands(axis: int, context: Context, rng: np.random.Generator) -> None:
    """Some of them without elements, of all sizes down to one."""

    def function(*operands: jax.Array) -> jax.Array:
        return jnp.concatenate(operands, axis) * 2 + 1

    sizes = (0, 1, 60, 0, 33, 90)
    operands = [_numbers(rng, "float32", *(n if d == axis else 60 for d in range(3))) for n in sizes]
    text = _check(context, function, *operands, tolerance=None)
    assert axis == 2 or _is_read_in_place(text), text


def test_nothing(context: Context, rng: np.random.Generator) -> None:
    def function(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.roll(x, 1, 0) + x, jnp.concatenate([x, x], 1) * 2, jnp.concatenate([y, y[:, :0]], 1) + 1

    _check(context, function, _numbers(rng, "float32", 7, 0), _numbers(rng, "float32", 0, 5), tolerance=None)


def test_carried(context: Context, rng: np.random.Generator) -> None:
    """A loop writes over what it has read: no box may read what another one wrote."""

    def function(x: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        def step(_: int, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, v = carried
            v = v * 0.5 + jnp.roll(x, 1, 0) - jnp.roll(x, -1, 1)
            return x * 0.5 + jnp.roll(v, 2, 1), v

        return lax.fori_loop(0, 5, step, (x, v))

    arguments = _numbers(rng, "float32", 170, 200), _numbers(rng, "float32", 170, 200)
    _check(context, function, *arguments, tolerance=1e-5)


@pytest.mark.parametrize("donated", (False, True))
def test_result_in_place_of_an_argument(donated: bool, context: Context, rng: np.random.Generator) -> None:
    """What only the last box reads is not yet overwritten by the first."""
    function = jax.jit(
        lambda x, y: x + jnp.concatenate([y, x[60:]], 0) * jnp.pad(x[1:], ((0, 1), (0, 0))),
        donate_argnums=(0,) if donated else (),
    )
    x, y = _numbers(rng, "float32", 150, 300), _numbers(rng, "float32", 60, 300)
    _check(context, function, x, y, tolerance=1e-5)


def test_indices_of_gathers(context: Context, rng: np.random.Generator) -> None:
    """Gathers of what is put together, in and out of range, and with indices that are."""

    def function(x: jax.Array, i: jax.Array) -> tuple[jax.Array, ...]:
        both = jnp.concatenate([x, x[:50] * 2])
        return both.at[i].get(mode="clip") + 1, x.at[jnp.roll(i, 999)].get(mode="fill") * 2

    x = _numbers(rng, "float32", 20000)
    _check(context, function, x, rng.integers(-30000, 30000, 40000).astype(np.int32), tolerance=None)


def test_short_rows_are_written(context: Context, rng: np.random.Generator) -> None:
    """Rows of a few elements cost a loop more in pieces than their array does."""
    x = _numbers(rng, "float32", 5000, 8)
    text = _check(context, lambda x: x * 2 + jnp.roll(x, 1, 1), x, tolerance=1e-6)
    assert not _is_read_in_place(text), text
