"""The order of steps that takes the least memory: all that must be kept is, values are those of another compiler, and
neither the schedule nor the plan takes more than in the program's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

from flagos_backend.codegen.triton import schedule
from flagos_backend.compile import accelerator_plan, kernel_candidates
from flagos_backend.compile.dependences import needs_of
from flagos_backend.compile.memory_order import Ordered, ordered_by_memory
from flagos_backend.devices.target import Target
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.importer import import_module
from flagos_backend.ir.effects import Effects
from flagos_backend.ir.hlo import Module
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.loop_ir.flat import FlatComputation, flatten
from flagos_backend.runtime.plan import Plan
from programs import hlo_bytes
from support.live_bytes import run_and_count
from support.passes import for_accelerator

TARGET = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
N = 8
SHAPES = ((N, N), (4 * N, N), (N,))
ARGUMENTS = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]
Function = Callable[..., Any]


def early_and_late(*squares: jax.Array) -> jax.Array:
    """Eight products are made before the first one is used, and each leaves a row."""
    products = [square @ square for square in squares]
    products = lax.optimization_barrier(products)
    return jnp.stack([jnp.sort(product.sum(0)) for product in products])


def module_of(function: Function, *shapes: jax.ShapeDtypeStruct) -> Module:
    return for_accelerator(import_module(hlo_bytes(function, *(shapes or ARGUMENTS))))


def of_chance(rng: np.random.Generator, length: int = 14) -> Function:
    """Values of three shapes, of products, sums of rows, sorts, updates and loops of those before."""
    choices = rng.integers(1 << 30, size=(length, 4))

    def function(square: jax.Array, tall: jax.Array, row: jax.Array) -> Any:
        squares, talls, rows = [square], [tall], [row]
        for kind, a, b, c in choices.tolist():
            s, t, r = squares[a % len(squares)], talls[b % len(talls)], rows[c % len(rows)]
            match kind % 8:
                case 0:
                    talls.append(jnp.tanh(t @ s / N))
                case 1:
                    squares.append(jnp.tanh(t.T @ t / N))
                case 2:
                    rows.append(jnp.tanh((t * r).mean(0)))
                case 3:
                    squares.append(jnp.sort(jnp.sin(s + r)))
                case 4:
                    talls.append(lax.dynamic_update_slice(t, s, (N, 0)))
                case 5:
                    squares.append(lax.fori_loop(0, 3, lambda i, x, s=s: jnp.sin(x @ s / N) + i, s * r))
                case 6:
                    talls.append(jnp.concatenate([s, jnp.sin(s * r), squares[0], squares[-1]]))
                case _:
                    rows.append(jnp.cos(s[3]) * r)
        return talls[-1].sum(1), squares[-1] + rows[-1]

    return function


def in_program_order(flat: FlatComputation, plan: Schedule, inner: Callable[..., int]) -> Ordered:
    return Ordered(plan, 0)


def built(module: Module) -> Plan:
    return accelerator_plan.build(module.entry, (), torch.device("cpu"), TARGET)


@pytest.mark.parametrize("number", range(8))
def test_programs_of_chance(number: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    function = of_chance(rng)
    module = module_of(function)
    ours = built(module)
    with monkeypatch.context() as patched:
        patched.setattr(kernel_candidates, "ordered_by_memory", in_program_order)
        theirs = built(module)
    assert len(ours.steps) == len(theirs.steps)
    assert ours.temporary_bytes <= theirs.temporary_bytes
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(function)(*arrays)
    with torch.inference_mode():
        taken = [torch.empty(array.shape).copy_(torch.from_numpy(array)) for array in arrays]
        found, most = run_and_count(ours, taken)
        unordered = theirs.run(Run(), list(taken))
    assert most <= ours.temporary_bytes
    for result, other, truth in zip(found, unordered, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=0)
        np.testing.assert_allclose(result, truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("number", range(8))
def test_what_is_needed_comes_before(number: int, rng: np.random.Generator) -> None:
    flat = flatten(module_of(of_chance(rng, 60)).entry)
    plan = schedule(flat, TARGET)
    ordered = ordered_by_memory(flat, plan, lambda instruction: 0).schedule
    assert sorted(map(id, ordered.items)) == sorted(map(id, plan.items))
    places = {id(item): place for place, item in enumerate(ordered.items)}
    for item, needed in zip(plan.items, needs_of(flat, plan, Effects()), strict=True):
        assert all(places[id(plan.items[number])] < places[id(item)] for number in needed)
    again = ordered_by_memory(flat, plan, lambda instruction: 0).schedule
    assert [id(item) for item in again.items] == [id(item) for item in ordered.items]


def test_what_is_used_up_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(early_and_late, *[ARGUMENTS[0]] * 8)
    ours = built(module)
    monkeypatch.setattr(kernel_candidates, "ordered_by_memory", in_program_order)
    theirs = built(module)
    assert theirs.temporary_bytes >= 8 * N * N * 4
    assert ours.temporary_bytes <= 4 * N * N * 4 + 8 * N * 4
    assert len(ours.steps) == len(theirs.steps)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Not written over what it reads."""
    return x @ y


def handed_on(iterations: int) -> Function:
    return lambda s: lax.fori_loop(0, iterations, lambda i, x: product(x, s), s + 1).sum(0)


def returned(iterations: int) -> Function:
    return lambda s: lax.fori_loop(0, iterations, lambda i, x: product(x, s), s + 1)


def of_an_argument(s: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 5, lambda i, x: product(x, s), s)


def exchanged(s: jax.Array) -> jax.Array:
    first, second = lax.fori_loop(0, 5, lambda i, x: (x[1], product(x[0], s)), (s + 1, s - 1))
    return product(first, second)


def in_row(s: jax.Array) -> jax.Array:
    """Each value is kept for three iterations."""
    row = lax.fori_loop(0, 7, lambda i, x: (product(x[2], s), x[0], x[1]), (s + 1, s - 1, s * 2))
    return sum(row).sum(0)


def of_data(s: jax.Array) -> jax.Array:
    return lax.while_loop(lambda x: x[0, 0] < 1e3, lambda x: jnp.abs(product(x, s)) * 2 + 1, s + 1).sum(0)


def within(s: jax.Array) -> jax.Array:
    def outer(i: jax.Array, x: jax.Array) -> jax.Array:
        return product(x, lax.fori_loop(0, 3, lambda j, y: product(y, x), s))

    return lax.fori_loop(0, 4, outer, s + 1).sum(0)


def either(s: jax.Array) -> jax.Array:
    taken = lax.cond(s[0, 0] < 0, lambda x: product(product(x, s), s), lambda x: x + 1, s * 2)
    return product(taken, s).sum(0)


@pytest.mark.parametrize(
    "function",
    [
        *map(handed_on, (1, 2, 3, 9)),
        *map(returned, (1, 2, 3, 9)),
        of_an_argument,
        exchanged,
        in_row,
        of_data,
        within,
        either,
    ],
)
def test_what_loops_and_branches_hold_is_counted_exactly(function: Function, rng: np.random.Generator) -> None:
    plan = built(module_of(function, ARGUMENTS[0]))
    square = rng.uniform(-1, -0.1, (N, N)).astype(np.float32)  # both branches and several iterations of data
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(function)(square)
    with torch.inference_mode():
        (found,), most = run_and_count(plan, [torch.empty(N, N).copy_(torch.from_numpy(square))])
    assert plan.temporary_bytes == most
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
