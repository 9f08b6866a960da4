"""Loops of scalars and small arrays: many iterations, nested loops and branches, all in native code."""

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


def _collatz(n: jax.Array) -> jax.Array:
    """Iterations until 1: as many as the data say."""

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        value, count = state
        return jnp.where(value % 2 == 0, value // 2, 3 * value + 1), count + 1

    return lax.while_loop(lambda state: state[0] != 1, step, (n, jnp.int32(0)))[1]


def _nested(x: jax.Array) -> jax.Array:
    """Two loops and a branch in one another, 90,000 iterations of the innermost body."""

    def inner(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, outer = carry
        total = lax.cond((i + outer) % 3 == 0, lambda t: t * 5 + 1, lambda t: t ^ (i << 3), total)
        return total, outer

    def outer(j: jax.Array, total: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 300, inner, (total, j))[0]

    return lax.fori_loop(0, 300, outer, x)


def _scan(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A scan that keeps an output for each of 5,000 iterations."""
    return lax.scan(lambda carry, y: ((carry * 3 + y) % 1009, carry - y), jnp.int32(7), x)


def _small_array(x: jax.Array) -> jax.Array:
    """A body whose values are too long for scalars and shorter than a tile."""
    return lax.fori_loop(0, 20000, lambda i, v: (v * 3 + i) ^ jnp.roll(v, 1), x)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (_collatz, np.int32(77031)),
        (_nested, np.int32(11)),
        (_scan, np.arange(5000, dtype=np.int32)),
        (_small_array, np.arange(5, dtype=np.uint32)),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_loop_equals_xla(function: Callable[..., Any], argument: Any, context: Context) -> None:
    hlo = hlo_bytes(function, argument)
    message = schema.Program(schema_version=1, producer="tests")
    message.module.MergeFromString(hlo)
    with Executable.compile(context, message.SerializeToString()) as executable:
        assert "runs as native tiles with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        outputs, done = executable.execute([[put(context.devices[0].default_memory, np.asarray(argument))]])
        done[0].wait()
        ours = [get(output) for output in outputs[0]]
    for mine, theirs in zip(ours, run_on_xla(hlo, [argument]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
