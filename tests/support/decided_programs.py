"""JAX programs in which data decides how often what runs, and arguments with which it decides differently. What they
decide by is exact, so that every device decides alike."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def newton(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Square roots, until none changes by a hundredth."""

    def iteration(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        root, _, iterations = state
        better = 0.5 * (root + x / root)
        return better, jnp.abs(better - root), iterations + 1

    state = x, jnp.abs(x - 1), jnp.int32(0)
    root, _, iterations = jax.lax.while_loop(lambda state: state[1].max() > 0.01, iteration, state)
    return root, iterations


def fibonacci(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What an iteration makes changes places with what it was made of."""
    return jax.lax.while_loop(lambda ab: ab[1].sum() < 1000, lambda ab: (ab[1], ab[0] + ab[1]), (x, x))


def doubled_until(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loop in each iteration of a loop."""

    def iteration(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, iterations = state
        limit = 5 * y.max()
        y, inner = jax.lax.while_loop(lambda s: s[0].max() < limit, lambda s: (2 * s[0], s[1] + 1), (y, jnp.int32(0)))
        return jnp.sort(y, axis=1)[:, ::-1] + 1, iterations + inner

    return jax.lax.while_loop(lambda state: state[0].sum() < 1e5, iteration, (x, jnp.int32(0)))


def collatz(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A branch in each iteration of a loop."""

    def iteration(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        n, seen = state
        n = jax.lax.cond(n % 2 == 0, lambda n: n // 2, lambda n: 3 * n + 1, n)
        return n, jnp.roll(seen, 1).at[0].set(n.astype(seen.dtype))

    return jax.lax.while_loop(lambda state: state[0] != 1, iteration, (x.reshape(-1)[0].astype(jnp.int32), x))


def one_of_two(x: jax.Array) -> jax.Array:
    index = x.reshape(-1)[0].astype(jnp.int32) - 1
    y = jnp.sort(x, axis=1)
    return jax.lax.switch(index, [lambda y: y @ y.T @ y, lambda y: y * 2 + x], y) + y


def choice(x: jax.Array) -> jax.Array:
    return x.reshape(-1)[0].astype(jnp.int32)


def one_of_five(x: jax.Array) -> jax.Array:
    branches = [
        lambda y: y * 2 + x,
        lambda y: jnp.sort(y, axis=1)[:, ::-1],
        lambda y: y @ x.T @ x,
        lambda y: jnp.cumsum(y, axis=0).T.reshape(6, 8),
        lambda y: x,
    ]
    return jax.lax.switch(choice(x), branches, jnp.sort(x, axis=0))


def branch_in_a_branch(x: jax.Array) -> jax.Array:
    def above(y: jax.Array) -> jax.Array:
        return jax.lax.cond(choice(y) > 20, lambda y: jnp.sort(y, axis=1)[:, ::-1], lambda y: jnp.cumsum(y, axis=1), y)

    return jax.lax.cond(choice(x) > 10, above, lambda y: y + 1, x)


def branch_in_counted_iterations(x: jax.Array) -> jax.Array:
    """Branches that a launch takes in one iteration, if at all."""

    def iteration(i: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.cond(choice(y) % 10 == 9, lambda y: jnp.roll(jnp.sort(y, axis=1), 1, axis=0), lambda y: y + 1, y)

    return jax.lax.fori_loop(0, 5, iteration, x)


def loop_in_a_branch(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """On zeros it would never end."""

    def grown(y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.while_loop(lambda s: s[0].max() < 1000, lambda s: (s[0] * 2, s[1] + 1), (y, jnp.int32(0)))

    return jax.lax.cond(choice(x) > 10, grown, lambda y: (y, jnp.int32(-1)), x)


def branch_in_a_loop(x: jax.Array) -> jax.Array:
    """Of a loop without iterations."""

    def iteration(y: jax.Array) -> jax.Array:
        return jax.lax.cond(choice(y) % 2 == 0, lambda y: y + 7, lambda y: jnp.sort(2 * y, axis=0), y)

    return jax.lax.while_loop(lambda y: choice(y) < 100, iteration, x)


def no_iteration(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return fibonacci(x)


def no_iteration_in_an_iteration(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return doubled_until(x)


State = tuple[jax.Array, jax.Array, jax.Array]


def guarded_step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    """Training that leaves its state as it is where the gradient is no number."""
    weights, mean, steps = state
    gradient = 2 * (weights - x)
    finite = jnp.isfinite(gradient).all()

    def updated(weights: jax.Array, mean: jax.Array, steps: jax.Array) -> State:
        mean = 0.5 * mean + gradient
        return weights - 0.125 * mean, mean, steps + 1

    return jax.lax.cond(finite, updated, lambda *state: state, weights, mean, steps), finite


# Of each program the values of its argument in the first two runs, and in later ones, which from one_of_five on take
# ways that were not taken before. What is 1,000 or more makes no iteration, but in newton.
PROGRAMS: dict[str, tuple[Callable[[jax.Array], object], tuple[int, int], tuple[int, ...]]] = {
    "newton": (newton, (4, 9), (1, 100, 25)),
    "fibonacci": (fibonacci, (1, 2), (1000, 3, 1, 300)),
    "doubled_until": (doubled_until, (1, 2), (100_000, 3, 1, 900)),
    "collatz": (collatz, (6, 3), (1, 7, 27, 2)),
    "one_of_two": (one_of_two, (1, 2), (3, 1, 2, 9)),
    "one_of_five": (one_of_five, (0, 0), (3, 1, 2, 9, 0)),
    "branch_in_a_branch": (branch_in_a_branch, (1, 2), (12, 30, 3, 15)),
    "branch_in_counted_iterations": (branch_in_counted_iterations, (1, 2), (5, 9, 6, 0)),
    "loop_in_a_branch": (loop_in_a_branch, (1, 2), (15, 3, 200)),
    "branch_in_a_loop": (branch_in_a_loop, (1000, 2000), (7, 1000, 40, 3)),
    "no_iteration": (no_iteration, (1000, 2000), (3, 1000, 1)),
    "no_iteration_in_an_iteration": (no_iteration_in_an_iteration, (100_000, 200_000), (3, 100_000, 1)),
}


def argument(value: int, rng: np.random.Generator) -> np.ndarray:
    """Small numbers above ``value``, which is the first of them: sums and products of a few of them are exact."""
    array = value + rng.integers(0, 4, (6, 8)).astype(np.float32)
    array[0, 0] = value
    return array
