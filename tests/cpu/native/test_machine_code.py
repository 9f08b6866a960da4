"""Loops of small steps, which are compiled: every kind of step, alone and together, against XLA."""

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

_ITERATIONS = 11


def _both(function: Callable[..., Any], *arguments: Any, context: Context) -> list[tuple[np.ndarray, np.ndarray]]:
    """What we, with a loop that is machine code, and XLA make of a program."""
    flat = jax.tree.leaves(arguments)
    with jax.enable_x64(any(a.dtype.itemsize == 8 for a in flat)):
        hlo = hlo_bytes(function, *arguments)
    message = schema.Program(schema_version=1, producer="tests")
    message.module.MergeFromString(hlo)
    memory = context.devices[0].default_memory
    with Executable.compile(context, message.SerializeToString()) as executable:
        text = executable.artifact(Artifact.EXPLANATION).decode()
        assert any("native loop" in line and "times, compiled" in line for line in text.splitlines()), text
        outputs, done = executable.execute([[put(memory, np.asarray(a)) for a in flat]])
        done[0].wait()
        ours = [get(output) for output in outputs[0]]
    return list(zip(ours, run_on_xla(hlo, flat), strict=True))


def _assert_close(function: Callable[..., Any], *arguments: Any, context: Context, rtol: float = 0.0) -> None:
    for mine, theirs in _both(function, *arguments, context=context):
        wide = mine.dtype if mine.dtype.kind in "iub" else np.float64
        mine, theirs = mine.astype(wide), theirs.astype(wide)
        if rtol == 0 or (wide is mine.dtype and wide.kind in "iub"):
            np.testing.assert_array_equal(mine, theirs)
        else:
            np.testing.assert_allclose(
                mine, theirs, rtol=rtol, atol=rtol * np.abs(theirs[np.isfinite(theirs)]).max(initial=1)
            )


def _repeated(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step(state, i, *rest)`` again and again, keeping each state."""

    def function(state: Any, *rest: Any) -> Any:
        def iteration(state: Any, i: jax.Array) -> Any:
            after = step(state, i, *rest)
            return after, after

        return lax.scan(iteration, state, jnp.arange(_ITERATIONS, dtype=jnp.int32))

    return function


@pytest.mark.parametrize("index", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("name", ["float32", "int8", "uint16", "float64"])
def test_gathers_and_scatters(name: str, index: str, context: Context, rng: np.random.Generator) -> None:
    """Indices of every type, inside and outside; windows of rows; sums, maxima and assignments."""
    state = rng.integers(0, 100, (6, 5)).astype(name)
    limits = np.iinfo(index)
    at = np.concatenate([rng.integers(0, 6, 4), [limits.min, limits.max, max(limits.min, -2)]]).astype(index)
    updates = rng.integers(0, 50, (len(at), 5)).astype(name)

    def step(x: jax.Array, i: jax.Array, at: jax.Array, updates: jax.Array) -> jax.Array:
        taken = x.at[at].get(mode="clip") + jnp.take(x[:, 0], at, mode="fill", fill_value=3)[:, None]
        x = x.at[at].add(updates + (taken // 7).astype(x.dtype), mode="drop")
        x = x.at[at, i % 5].max(updates[:, 0], mode="drop").at[i % 6, 2].set(updates[i % 7, 1])
        return (x % 97).astype(x.dtype)

    _assert_close(_repeated(step), state, at, updates, context=context)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["float32", "float64", "int32", "uint8", "int64"])
def test_argmin_and_argmax(name: str, axis: int, context: Context, rng: np.random.Generator) -> None:
    state = rng.integers(0, 5, (7, 4)).astype(name)
    if state.dtype.kind == "f":
        state[rng.integers(0, 7), 1], state[2, 3] = np.nan, -np.inf

    def step(x: jax.Array, i: jax.Array) -> jax.Array:
        most, least = jnp.argmax(x, axis), jnp.argmin(x, axis)
        moved = jnp.roll(x, 1, axis)
        extra = (most * 3 + least).astype(x.dtype)
        return jnp.where(moved < 90, moved + jnp.expand_dims(extra, axis) % 5, moved)

    _assert_close(_repeated(step), state, context=context)


@pytest.mark.parametrize("name", ["float32", "float64", "int32"])
@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("ij,jk->ik", (5, 7), (7, 6)),
        ("ij,kj->ik", (5, 7), (6, 7)),
        ("ji,jk->ik", (7, 5), (7, 6)),
        ("ij,j->i", (5, 7), (7,)),
        ("j,jk->k", (7,), (7, 6)),
        ("bij,bjk->bik", (3, 2, 4), (3, 4, 5)),
        ("bij,bkj->bki", (3, 2, 4), (3, 5, 4)),
        ("i,i->", (9,), (9,)),
        ("i,j->ij", (4,), (3,)),
    ],
)
def test_products(
    name: str, equation: str, left: tuple[int, ...], right: tuple[int, ...], context: Context, rng: np.random.Generator
) -> None:
    """Of whole numbers, whose sums are exact in every order."""
    a, b = (rng.integers(-4, 5, shape).astype(name) for shape in (left, right))

    def step(state: Any, i: jax.Array, b: jax.Array) -> Any:
        a, _ = state
        product = jnp.einsum(equation, a, b)
        return jnp.clip(jnp.flip(a) + i.astype(a.dtype) % 3, -4, 4).astype(a.dtype), product

    _assert_close(_repeated(step), (a, np.einsum(equation, a, b)), b, context=context)


@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "int16", "uint64", "bool"])
def test_reductions_and_what_follows_them(name: str, context: Context, rng: np.random.Generator) -> None:
    """Softmax, norms, and reductions along each dimension, of rows and of columns."""
    dtype = jnp.dtype(name)
    state = (rng.normal(size=(4, 3, 5)) * 2).astype(dtype) if name != "bool" else rng.random((4, 3, 5)) < 0.5

    def of_floats(x: jax.Array, i: jax.Array) -> jax.Array:
        soft = jax.nn.softmax(x, -1) + jax.nn.softmax(x, 0)
        centred = (x - x.mean((0, 2), keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + dtype.type(0.5))
        return (soft + centred * dtype.type(0.25) + x.max((1, 2), keepdims=True) * dtype.type(0.125)).astype(dtype)

    def of_integers(x: jax.Array, i: jax.Array) -> jax.Array:
        reduced = x.sum((0, 2), keepdims=True, dtype=dtype) ^ x.max(1, keepdims=True)
        return reduced ^ jnp.bitwise_and.reduce(x, 2, keepdims=True) ^ x.min((0, 1, 2)) ^ (x == x.min(0)).astype(dtype)

    if dtype.kind in "iub":
        _assert_close(_repeated(of_integers), state, context=context)
    else:
        rtol = {2: 0.05, 4: 2e-5, 8: 1e-12}[dtype.itemsize]
        _assert_close(_repeated(of_floats), state, context=context, rtol=rtol)


def test_loops_and_branches_inside(context: Context, rng: np.random.Generator) -> None:
    """Loops as long as a condition holds, conditionals of predicates and of numbers, also out of range."""

    def step(state: Any, i: jax.Array, table: jax.Array) -> Any:
        x, total, big = state
        x, rounds = lax.while_loop(lambda s: (s[0].sum() < 50) & (s[1] < 9), lambda s: (s[0] * 2 + i, s[1] + 1), (x, 0))
        x = lax.cond(rounds > 3, lambda x: x[::-1] % 7, lambda x: x % 11 + rounds, x)
        branches = [lambda x, b: (x, b), lambda x, b: (x + b[0], b.at[1].add(x[0])), lambda x, b: (b[:3], b[::-1])]
        x, big = lax.switch(i - 2, branches, x, big)
        nested = lax.fori_loop(0, 3, lambda j, t: lax.fori_loop(0, j, lambda k, u: u * 3 + k + table[j % 2], t), total)
        return x % 13, nested % 1009, big % 101

    state = (np.array([1, 2, 3], np.int32), np.int32(5), rng.integers(0, 9, 600).astype(np.int32))
    _assert_close(_repeated(step), state, np.array([3, 4], np.int32), context=context)


@pytest.mark.parametrize("size", [1, 3, 700, 4000])
def test_carried_values_that_change_places(size: int, context: Context, rng: np.random.Generator) -> None:
    """In registers, on the stack, and in memory; unchanged, swapped, overwritten, and repeated."""
    a, b, c = (rng.integers(0, 100, size).astype(np.int32) for _ in range(3))

    def step(state: Any, i: jax.Array) -> Any:
        a, b, c, count = state
        return b, a + c[0], c, count + (b > a).sum(dtype=jnp.int32)

    _assert_close(_repeated(step), (a, b, c, np.int32(0)), context=context)


def test_a_loop_of_no_iteration(context: Context, rng: np.random.Generator) -> None:
    def function(n: jax.Array, x: jax.Array) -> Any:
        counted = lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 2 + s[0]), (jnp.int32(0), x))
        return counted, lax.fori_loop(0, 20, lambda i, y: y + i, x)

    for n in (-3, 0, 5):
        _assert_close(function, np.int32(n), rng.integers(0, 9, 4).astype(np.int32), context=context)


def test_functions_that_are_not_compiled_run_all_the_same(
    context: Context, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("FLAGOS_MACHINE_CODE", "0")
    x = rng.integers(0, 9, 4).astype(np.int32)
    with pytest.raises(AssertionError):
        _assert_close(_repeated(lambda x, i: x + i), x, context=context)
