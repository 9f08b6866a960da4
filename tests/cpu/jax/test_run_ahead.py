"""A loop that drops its results needs the memory of a few of them, however long it is; and it comes to an end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

N = 2_000_000
MARGIN = 64 << 20


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@jax.jit
def scale(x: jax.Array) -> jax.Array:
    return x * 0.5 + 1


def chained(x: jax.Array, _: int) -> jax.Array:
    return scale(scale(x))


def converted(x: jax.Array, i: int) -> jax.Array:
    return x + i


def made(_: jax.Array, i: int) -> jax.Array:
    return jnp.ones(N) + i


def uploaded(_: jax.Array, i: int) -> jax.Array:
    return scale(jnp.array(np.full(N, i, np.float32)))


LAST = {chained: 1.75, converted: 101, made: 101, uploaded: 51}


@pytest.mark.parametrize("step", LAST, ids=lambda step: step.__name__)
def test_dropped_results_do_not_pile_up(step: Callable[[jax.Array, int], jax.Array]) -> None:
    x = jnp.ones(N)
    step(x, 0).block_until_ready()
    before, most = resident(), 0
    for i in range(101):
        y = step(x, i)
        most = max(most, resident() - before)
    np.testing.assert_array_equal(y, np.full(N, LAST[step], np.float32))
    # What is in flight at once, in 8 MB arrays, and no more once all is done.
    assert most < 128 << 20
    del y
    assert resident() - before < MARGIN


def test_callbacks_that_compute_do_not_meet_the_bound() -> None:
    """Each callback dispatches more than may be in flight, while other threads do the same."""
    shape = jax.ShapeDtypeStruct((4,), np.float32)

    def host(x: np.ndarray) -> np.ndarray:
        y = jnp.asarray(x)
        for _ in range(100):
            y = scale(y)
        return np.asarray(y)

    @jax.jit
    def calls(x: jax.Array) -> jax.Array:
        return jax.pure_callback(host, shape, x) * 2

    results: list[np.ndarray] = []

    def work() -> None:
        x = jnp.zeros(4)
        for _ in range(3):
            x = calls(x)
            for _ in range(50):
                x = scale(x)
        results.append(np.asarray(x))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [result.tolist() for result in results] == [[2, 2, 2, 2]] * 3
