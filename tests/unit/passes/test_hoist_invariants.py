"""What a loop computes anew in each iteration is computed before it, if it costs a kernel; everything else stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.passes.accelerator.contracting_dims_minor import contracting_dimensions_minor
from flagos_backend.passes.dce import eliminate_dead_code
from flagos_backend.passes.hoist_invariants import hoist_invariants
from flagos_backend.passes.inline_calls import inline_calls
from flagos_backend.passes.simplify import simplify
from flagos_backend.passes.trip_count import find_trip_counts
from programs import hlo_bytes
from support.against_xla import from_storage, to_storage

N = 6
H100 = Target("cuda", "nvidia", "sm_90", multiprocessors=132, shared_memory_bytes=232448, warp_size=32)
A100 = Target("cuda", "nvidia", "sm_80", multiprocessors=108, shared_memory_bytes=166912, warp_size=32)


def in_loops(module: Module) -> list[Opcode]:
    """The opcodes of all loops' bodies and conditions."""
    return [i.opcode for c in module.computations() if c is not module.entry for i in c.instructions]


def hoisted(function: Callable[..., Any], arguments: list[np.ndarray]) -> tuple[Module, Module]:
    before = eliminate_dead_code(simplify(inline_calls(import_module(hlo_bytes(function, *arguments)))))
    after = eliminate_dead_code(hoist_invariants(before))
    verify(after)
    for ours, theirs in zip(run(after, arguments), run(before, arguments), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    return before, after


def run(module: Module, arguments: list[np.ndarray]) -> list[np.ndarray]:
    tensors = [to_storage(a, p.shape) for a, p in zip(arguments, module.entry.parameters, strict=True)]
    plan = build_plan(module.entry)
    return [from_storage(t, s) for t, s in zip(plan.run(Run(), tensors), plan.result_shapes, strict=True)]


def square(rng: np.random.Generator) -> np.ndarray:
    return (rng.standard_normal((N, N)) / 3).astype(np.float32)


def test_a_product_of_what_stays_leaves_the_loop(rng: np.random.Generator) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ (w @ w.T + i.astype(w.dtype) * 0)), x)

    before, after = hoisted(f, [square(rng), square(rng)])
    assert in_loops(before).count(Opcode.DOT) == 2
    assert in_loops(after).count(Opcode.DOT) == 1


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(lambda w, m: w * m, id="masked"),
        pytest.param(lambda w, m: (w * m).T, id="transposed"),
        pytest.param(lambda w, m: jnp.where(m > 0, w, 0), id="chosen"),
        pytest.param(lambda w, m: w / jnp.sqrt((w * w).sum(0)), id="normalized"),
        pytest.param(lambda w, m: (w + m).reshape(N // 2, 2, N).reshape(N, N), id="reshaped"),
    ],
)
def test_what_a_product_reads_is_written_once(weights: Callable[..., jax.Array], rng: np.random.Generator) -> None:
    def f(x: jax.Array, w: jax.Array, m: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ weights(w, m)), x)

    _, after = hoisted(f, [square(rng), square(rng), square(rng)])
    left = {*in_loops(after)} & {Opcode.MULTIPLY, Opcode.SELECT, Opcode.DIVIDE, Opcode.TRANSPOSE, Opcode.REDUCE}
    assert not left


def test_a_product_converts_by_itself(rng: np.random.Generator) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ w.astype(jnp.float32)), x)

    before, after = hoisted(f, [square(rng), square(rng).astype(jnp.bfloat16)])
    assert in_loops(after) == in_loops(before)


def test_what_it_is_made_of_leaves_with_it(rng: np.random.Generator) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x.sum() < 50, lambda x: x + jnp.abs(x * jnp.exp(w)).sum() * 0 + w.max() ** 2, x)

    before, after = hoisted(f, [square(rng), square(rng) + 2])
    assert Opcode.REDUCE in in_loops(before)
    left = in_loops(after)
    assert left.count(Opcode.REDUCE) == in_loops(before).count(Opcode.REDUCE) - 1
    assert Opcode.EXP in left


def test_weights_are_narrowed_once(rng: np.random.Generator) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype), x)

    before, after = hoisted(f, [square(rng), square(rng)])
    assert in_loops(after).count(Opcode.CONVERT) == in_loops(before).count(Opcode.CONVERT) - 1


def test_out_of_nested_loops_at_once(rng: np.random.Generator) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        def inner(x: jax.Array) -> jax.Array:
            return lax.fori_loop(0, 2, lambda _, x: jnp.sin(x + jnp.sort(w)), x)

        return lax.while_loop(lambda x: jnp.abs(x).sum() < 0, inner, inner(x))

    before, after = hoisted(f, [square(rng), square(rng)])
    assert in_loops(before).count(Opcode.SORT) == 2
    assert Opcode.SORT not in in_loops(after)


def test_a_loop_without_iterations(rng: np.random.Generator) -> None:
    def f(x: jax.Array, w: jax.Array, n: jax.Array) -> jax.Array:
        return lax.fori_loop(0, n, lambda _, x: x @ jnp.sort(w), x)

    _, after = hoisted(f, [square(rng), square(rng), np.zeros((), np.int32)])
    assert Opcode.SORT not in in_loops(after)


def reads_a_counter(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda i, x: x + jnp.sort(w + i), x)


def spreads(x: jax.Array, w: jax.Array) -> jax.Array:
    """Free in a kernel that reads a row; as an array it would be read whole."""
    return lax.fori_loop(0, 3, lambda _, x: x * 0.5 + (w[:1] * jnp.sin(w[:, :1])).astype(jnp.float16), x)


def runs_another_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    """Which may not end, and an iteration may not come."""

    def step(x: jax.Array) -> jax.Array:
        return x + lax.while_loop(lambda w: w.sum() < 10, lambda w: w + 1.0, w)

    return lax.while_loop(lambda x: x.sum() < 100, step, x)


def is_pointwise(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, x: x * jnp.exp(w) + jnp.abs(w), x)


@pytest.mark.parametrize("function", [reads_a_counter, spreads, runs_another_loop, is_pointwise])
def test_everything_else_stays(function: Callable[..., jax.Array], rng: np.random.Generator) -> None:
    arguments = [square(rng), square(rng)]
    before = eliminate_dead_code(simplify(inline_calls(import_module(hlo_bytes(function, *arguments)))))
    assert hoist_invariants(before) is before


def recurrence(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda h, row: (jnp.tanh((row + h) @ w + h.max()), None), jnp.zeros_like(x[0]), x)[0]


def contracted_dimensions(module: Module) -> list[tuple[int, int]]:
    """Of each product, those of its operands, counted from the last."""
    found = []
    for computation in module.computations():
        for i in computation.instructions:
            if i.opcode is Opcode.DOT:
                a = i.attributes_as(DotAttributes)
                shapes = [operand.shape for operand in i.operands]
                assert all(isinstance(shape, ArrayShape) for shape in shapes)
                lhs, rhs = (shape.rank for shape in shapes if isinstance(shape, ArrayShape))
                found.append((lhs - a.lhs_contracting[0], rhs - a.rhs_contracting[0]))
    return found


def laid_out(function: Callable[..., Any], arguments: list[np.ndarray], target: Target) -> tuple[Module, Module]:
    before = eliminate_dead_code(simplify(inline_calls(import_module(hlo_bytes(function, *arguments)))))
    after = eliminate_dead_code(hoist_invariants(contracting_dimensions_minor(before, target)))
    verify(after)
    for ours, theirs in zip(run(after, arguments), run(before, arguments), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    return before, after


def test_the_weights_of_a_recurrence_are_laid_out_once(rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((8, 3, N)).astype(np.float32), square(rng)
    before, after = laid_out(recurrence, [x, w], H100)
    assert contracted_dimensions(before) == [(1, 2)]
    assert contracted_dimensions(after) == [(1, 1)]
    assert Opcode.TRANSPOSE not in in_loops(after)


def test_batches_stay_in_front(rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 2, 3, N), (2, N, N)))
    before, after = laid_out(recurrence, [x, w / 3], H100)
    assert contracted_dimensions(before) == [(1, 2)]
    assert contracted_dimensions(after) == [(1, 1)]


def both_change(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda h, row: (h @ row, None), w, x)[0]


def precisely(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        return recurrence(x, w)


def briefly(x: jax.Array, w: jax.Array) -> jax.Array:
    return recurrence(x[:2], w)


@pytest.mark.parametrize(
    ("function", "target"),
    [(both_change, H100), (precisely, H100), (briefly, H100), (recurrence, A100)],
    ids=["both change", "not rounded", "two iterations", "no need"],
)
def test_other_products_stay(function: Callable[..., jax.Array], target: Target, rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((8, N, N)).astype(np.float32), square(rng)
    before = eliminate_dead_code(simplify(inline_calls(import_module(hlo_bytes(function, x, w)))))
    before = find_trip_counts(before)
    assert contracting_dimensions_minor(before, target) is before
