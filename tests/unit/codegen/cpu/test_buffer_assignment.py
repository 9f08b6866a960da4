"""Which arrays of native programs are changed where they stand: such need no scratch memory."""

from __future__ import annotations

import struct
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import lax

from flagos_backend.codegen.cpu.emitter import emit
from flagos_backend.importer import import_module
from flagos_backend.passes.pipelines import optimize
from programs import hlo_bytes

_ARRAY = np.zeros((500, 40), np.int32)


def _scratch_bytes(function: Callable[[jax.Array], jax.Array]) -> int:
    """Where the argument may be written over."""
    code = emit(optimize(import_module(hlo_bytes(function, _ARRAY))), [0])
    return int(struct.unpack_from("<6q", code.bytecode)[5])


def _updates(x: jax.Array) -> jax.Array:
    return x.at[3].set(1).at[4].add(2)


def _loop(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 5, lambda i, x: x.at[i].set(i), x)


def _two_updates_in_nested_loops(x: jax.Array) -> jax.Array:
    def iteration(i: jax.Array, x: jax.Array) -> jax.Array:
        x = x.at[i].set(i)
        return x.at[i + 1].add(x[i, 3])

    return lax.fori_loop(0, 5, lambda j, x: lax.fori_loop(0, 9, lambda i, x: iteration(i + j, x), x), x)


def _conditional(x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] == 0, _updates, lambda x: x, x)


def _loop_in_a_branch(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 5, lambda i, x: lax.cond(i % 2 == 0, _loop, _updates, x), x)


def _read_later(x: jax.Array) -> jax.Array:
    return _conditional(x) + x


@pytest.mark.parametrize("function", [_updates, _loop, _two_updates_in_nested_loops, _conditional, _loop_in_a_branch])
def test_arrays_are_changed_where_they_stand(function: Callable[[jax.Array], jax.Array]) -> None:
    assert _scratch_bytes(function) < _ARRAY.nbytes


def test_what_is_read_later_stays() -> None:
    assert _scratch_bytes(_read_later) >= _ARRAY.nbytes
