"""Choices between arrays and their updates: stock XLA computes the same of the rewritten program, and no array is
chosen as a whole; what is no such choice stays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.importer import export_module, import_module
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from programs import hlo_bytes, run_on_xla
from support.passes import simplified

Program = Callable[..., Any]


def whole_choices(module: Module, shape: tuple[int, ...]) -> int:
    """How many arrays of ``shape`` are chosen from two."""
    instructions = [i for c in module.computations() for i in c.instructions if i.opcode is Opcode.SELECT]
    return sum(isinstance(i.shape, ArrayShape) and i.shape.dims == shape for i in instructions)


@functools.lru_cache(maxsize=1)
def _rewritten(hlo: bytes) -> tuple[Module, bytes]:
    """The program after all passes. What differs in its arguments alone is rewritten once."""
    module = simplified(import_module(hlo))
    return module, export_module(module)


def optimized(program: Program, *arguments: Any) -> Module:
    """The program after all passes, of which stock XLA computes what it computes of the program."""
    hlo = hlo_bytes(program, *arguments)
    module, exported = _rewritten(hlo)
    for ours, theirs in zip(run_on_xla(exported, arguments), run_on_xla(hlo, arguments), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return module


def row(p: Any, x: Any, u: Any, i: Any) -> Any:
    return jnp.where(p, x.at[i].set(u), x)


def row_if_not(p: Any, x: Any, u: Any, i: Any) -> Any:
    return jnp.where(p, x, x.at[i].add(u, mode="drop"))


def window(p: Any, x: Any, u: Any, i: Any) -> Any:
    return jnp.where(p, lax.dynamic_update_slice(x, u[None, :3], (i, i)), x)


def one_or_the_other(p: Any, x: Any, u: Any, i: Any) -> Any:
    return jnp.where(p, x.at[i].set(u), x.at[i - 1].set(-u))


def several(p: Any, x: Any, u: Any, i: Any) -> Any:
    """Over each other, and one that both have."""
    x = x.at[2].set(u * 3)
    return jnp.where(p, x.at[i].set(u).at[i, 2].add(1).at[i + 1].multiply(u), x.at[i].set(-u))


def rows(p: Any, x: Any, u: Any, i: Any) -> Any:
    return jnp.where(p, x.at[jnp.stack([i, i - 2, i])].add(u), x)


def in_iterations(p: Any, x: Any, u: Any, i: Any) -> Any:
    """As a search writes what it finds."""

    def iteration(k: Any, x: Any) -> Any:
        return jnp.where((u[k] > 0) ^ p, x.at[(i + k) % 7].set(x[k] + u), x)

    return lax.fori_loop(0, 6, iteration, x)


def nested(p: Any, x: Any, u: Any, i: Any) -> Any:
    return jnp.where(p, jnp.where(u[0] > 0, x.at[i].set(u), x.at[i].add(u)), x)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("place", [0, 6, 7, -1, -9])
@pytest.mark.parametrize(
    "program",
    [row, row_if_not, window, one_or_the_other, several, rows, in_iterations, nested],
    ids=lambda f: f.__name__,
)
def test_only_what_is_written_is_chosen(program: Program, place: int, taken: bool, rng: np.random.Generator) -> None:
    x, u = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(-9, 9, 8).astype(np.float32)
    module = optimized(program, np.bool_(taken), x, u, np.int32(place))
    assert whole_choices(module, (7, 8)) == 0


def element_by_element(p: Any, x: Any, u: Any, i: Any) -> Any:
    return jnp.where(u > 0, x.at[i].set(u), x)


def of_different_arrays(p: Any, x: Any, u: Any, i: Any) -> Any:
    return jnp.where(p, x.at[i].set(u), x + 1)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("program", [element_by_element, of_different_arrays], ids=lambda f: f.__name__)
def test_other_choices_stay(program: Program, taken: bool, rng: np.random.Generator) -> None:
    x, u = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(-9, 9, 8).astype(np.float32)
    assert whole_choices(optimized(program, np.bool_(taken), x, u, np.int32(3)), (7, 8)) == 1


def test_a_thousand_updates(rng: np.random.Generator) -> None:
    """Are chosen as a whole, and are no depth of calls."""

    def program(p: Any, x: Any) -> Any:
        y = x
        for k in range(1000):
            y = lax.dynamic_update_slice(y, x[k : k + 1] + k, (2 * k + 1,))
        return jnp.where(p, y, x)

    module = import_module(hlo_bytes(program, np.bool_(True), np.zeros(2048, np.float32)))
    assert whole_choices(simplified(module), (2048,)) == 1


def two(x: Any, value: Any, i: Any) -> Any:
    """The second window overlaps the first one at times."""
    x = lax.dynamic_update_slice(x, jnp.full((2, 8), value, x.dtype), (i, 0))
    return lax.dynamic_update_slice(x, x[:1] + value, (i + 1, 0))


def by_number(k: Any, x: Any) -> Any:
    return lax.switch(
        k, [lambda x: x, lambda x: two(x, 1, k), lambda x: two(x, 3, k + 2), lambda x: two(x, 5, k - 1)], x
    )


def else_if(k: Any, x: Any) -> Any:
    inner = lambda x: lax.cond(k == 1, lambda x: two(x, 3, k + 1), lambda x: x, x)  # noqa: E731
    return lax.cond(k == 0, lambda x: two(x, 1, k), inner, x)


def else_if_of_rows(k: Any, x: Any) -> Any:
    inner = lambda x: lax.cond(k == 1, lambda x: x.at[k].set(3).at[k + 2].add(1), lambda x: x, x)  # noqa: E731
    return lax.cond(k == 0, lambda x: x.at[k].set(1).at[k + 1].set(2), inner, x)


def else_if_by_where(k: Any, x: Any) -> Any:
    return jnp.where(k == 0, two(x, 1, k), jnp.where(k == 1, two(x, 3, k + 1), x))


@pytest.mark.parametrize(
    ("program", "updates"),
    [(by_number, 6), (else_if, 4), (else_if_of_rows, 4), (else_if_by_where, 4)],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_each_update_is_made_once(program: Program, updates: int, rng: np.random.Generator) -> None:
    """Whatever decides about it: of an array that is also kept as it was, a loop would copy all."""
    x = rng.integers(-9, 9, (7, 8)).astype(np.float32)
    for k in range(4):
        optimized(program, np.int32(k), x)
    module = optimized(lambda x: lax.fori_loop(0, 9, lambda i, x: program(i % 4, x), x), x)
    instructions = [i for c in module.computations() for i in c.instructions]
    assert sum(i.opcode is Opcode.DYNAMIC_UPDATE_SLICE for i in instructions) == updates
    assert whole_choices(module, (7, 8)) == 0 and not any(i.opcode is Opcode.CONDITIONAL for i in instructions)


def test_what_draws_is_not_drawn_twice() -> None:
    """The second window of an update that two choices decide about is drawn below what the first one wrote."""

    def function(p: Any, x: Any, u: Any) -> Any:
        y = lax.dynamic_update_slice(x, u, (1, 0))
        y = lax.dynamic_update_slice(y, lax.rng_uniform(0.0, y[0, 0], (1, 8)), (2, 0))
        return jnp.where(p == 0, x.at[0].set(1), jnp.where(p == 1, y, x))

    module = import_module(hlo_bytes(function, np.int32(1), np.ones((7, 8), np.float32), np.ones((1, 8), np.float32)))
    instructions = [i for c in simplified(module).computations() for i in c.instructions]
    assert sum(i.opcode is Opcode.RNG for i in instructions) == 1


def sums_of_choices(x: Any) -> Any:
    y, total = x, 0.0
    for k in range(60):
        y = lax.dynamic_update_slice(y, x[k : k + 1] * k, (k + 5,))
        total = total + jnp.where(x[k] > 0, y, x)[k + 6]
    return total


def against_the_first(x: Any) -> Any:
    y = x
    for k in range(60):
        y = jnp.where(x[k] > 0, lax.dynamic_update_slice(y, x[k : k + 1], (k + 5,)), x)
    return y


@pytest.mark.parametrize("program", [sums_of_choices, against_the_first], ids=lambda f: f.__name__)
def test_programs_do_not_grow_with_the_square_of_their_choices(program: Program, rng: np.random.Generator) -> None:
    module = optimized(program, rng.integers(-9, 9, 128).astype(np.float32))
    assert sum(len(c.instructions) for c in module.computations()) < 60 * 80


def test_gradients(rng: np.random.Generator) -> None:
    x, u = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(-9, 9, 8).astype(np.float32)
    program = jax.grad(lambda x, p, u, i: (in_iterations(p, x, u, i) ** 2).sum())
    optimized(lambda p, x, u, i: program(x, p, u, i), np.bool_(True), x, u, np.int32(1))


def test_unsigned_indices(rng: np.random.Generator) -> None:
    """None of their numbers is outside of every array: several windows are chosen with the array."""
    x, u = rng.integers(-9, 9, (7, 8)).astype(np.float32), rng.integers(-9, 9, (2, 8)).astype(np.float32)
    i = np.array([3, 9], np.uint32)
    program = jax.jit(lambda p, x, u, i: jnp.where(p, lax.scatter(x, i[:, None], u, _ROWS, mode="drop"), x))
    for taken in (False, True):
        assert whole_choices(optimized(program, np.bool_(taken), x, u, i), (7, 8)) == 1


_ROWS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
