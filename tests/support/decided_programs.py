"""JAX programs in which data decides how often what runs, and arguments with which it decides differently. What they
decide by is exact, so that every device decides alike."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def newton(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Square roots, until none changes by a hundredth."""

    def turn(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        root, _, turns = state
        better = 0.5 * (root + x / root)
        return better, jnp.abs(better - root), turns + 1

    state = x, jnp.abs(x - 1), jnp.int32(0)
    root, _, turns = jax.lax.while_loop(lambda state: state[1].max() > 0.01, turn, state)
    return root, turns


def fibonacci(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a turn makes changes places with what it was made of."""
    return jax.lax.while_loop(lambda ab: ab[1].sum() < 1000, lambda ab: (ab[1], ab[0] + ab[1]), (x, x))


def doubled_until(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loop in each turn of a loop."""

    def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, turns = state
        limit = 5 * y.max()
        y, inner = jax.lax.while_loop(lambda s: s[0].max() < limit, lambda s: (2 * s[0], s[1] + 1), (y, jnp.int32(0)))
        return jnp.sort(y, axis=1)[:, ::-1] + 1, turns + inner

    return jax.lax.while_loop(lambda state: state[0].sum() < 1e5, turn, (x, jnp.int32(0)))


def collatz(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A branch in each turn of a loop."""

    def turn(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        n, seen = state
        n = jax.lax.cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n)
        return n, jnp.roll(seen, 1).at[0].set(n.astype(seen.dtype))

    return jax.lax.while_loop(lambda state: state[0] != 1, turn, (x.reshape(-1)[0].astype(jnp.int32), x))


def one_of_two(x: jax.Array) -> jax.Array:
    index = x.reshape(-1)[0].astype(jnp.int32) - 1
    y = jnp.sort(x, axis=1)
    return jax.lax.switch(index, [lambda y: y @ y.T @ y, lambda y: y * 2 + x], y) + y


# Of each program the values of its argument in the first two runs, by which all of it must have run, and in later ones.
# What is 1,000 or more makes no turn, but in newton.
PROGRAMS: dict[str, tuple[Callable[[jax.Array], object], tuple[int, int], tuple[int, ...]]] = {
    "newton": (newton, (4, 9), (1, 100, 25)),
    "fibonacci": (fibonacci, (1, 2), (1000, 3, 1, 300)),
    "doubled_until": (doubled_until, (1, 2), (100_000, 3, 1, 900)),
    "collatz": (collatz, (6, 3), (1, 7, 27, 2)),
    "one_of_two": (one_of_two, (1, 2), (3, 1, 2, 9)),
}


def argument(value: int, rng: np.random.Generator) -> np.ndarray:
    """Small numbers above ``value``, which is the first of them: sums and products of a few of them are exact."""
    array = value + rng.integers(0, 4, (6, 8)).astype(np.float32)
    array[0, 0] = value
    return array
