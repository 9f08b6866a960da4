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


def counted(plan: Plan, run: Run, arguments: list[torch.Tensor]) -> tuple[list[Any], int]:
    """The results, and the most bytes that were there at once, of ``plan`` alone, beside arguments, constants and
    results."""
    values = plan.initial.copy()
    for slot, argument in zip(plan.parameters, arguments, strict=True):
        values[slot] = argument
    known = {v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor)}
    alive: list[dict[int, int]] = []
    for kernel, operands, result, frees in plan._compiled:
        if operands is None:
            kernel(run, values)
        else:
            values[result] = kernel(run, *[values[slot] for slot in operands])
        storages = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
        alive.append({storage._cdata: storage.nbytes() for storage in storages if storage.data_ptr() not in known})
        for slot in frees:
            values[slot] = None
    results = [values[slot] for slot in plan.results]
    returned = {result.untyped_storage()._cdata for result in results}
    return results, max(sum(n for key, n in at.items() if key not in returned) for at in alive)


def handed_over(plan: Plan) -> int:
    """Bytes of what an iteration of a loop may leave beside what it was given: neither the order nor the plan counts
    results of bodies."""
    bodies = (body for step in plan.steps for body in step.nested)
    return max((sum(shape.num_bytes for shape in body.result_shapes) for body in bodies), default=0)


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
        found, most = counted(ours, Run(), list(taken))
        unordered = theirs.run(Run(), list(taken))
    assert most <= ours.temporary_bytes + handed_over(ours)
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
