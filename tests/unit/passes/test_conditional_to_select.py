"""Conditionals whose branches cost less than a branch become selects with XLA's results; all others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.devices.target import Target
from flagos_backend.importer import export_module, import_module
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.conditional_to_select import convert_conditionals_to_selects
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same, hlo_of_text
from support.passes import simplified

H100 = Target("cuda", "nvidia", "sm_90", multiprocessors=132, shared_memory_bytes=232448, warp_size=32)


def conditionals(module: Module) -> int:
    return sum(i.opcode is Opcode.CONDITIONAL for c in module.computations() for i in c.instructions)


def assert_selected(hlo: bytes, arguments: list[Any]) -> None:
    """Nothing is left to branch on, and stock XLA computes the same from that."""
    before = import_module(hlo)
    after = simplified(before)
    assert conditionals(before) and not conditionals(after)
    results = run_on_xla(export_module(after), arguments), run_on_xla(hlo, arguments)
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs, 1e-5)


def scalar(p: Any, x: Any) -> Any:
    return lax.cond(p, lambda x: jnp.sin(x) + 1, lambda x: x * 2, x)


def pair(p: Any, x: Any) -> Any:
    """Results of several types; one branch hands on what it is given."""
    return lax.cond(p, lambda x: (x.sum(), x > 0, x), lambda x: (x.max(), x < 1, x[::-1]), x)


def dividing(p: Any, x: Any) -> Any:
    """What is not taken divides by zero, and is no number."""
    n = x.astype(jnp.int32)
    return lax.cond(p, lambda n, x: (n, x), lambda n, x: (n // (n - n), jnp.log(-jnp.abs(x) - 1)), n, x)


def nested(p: Any, x: Any) -> Any:
    return lax.cond(p, lambda x: lax.cond(x.sum() > 0, jnp.cos, jnp.tanh, x), lambda x: x - 1, x)


def windows(p: Any, x: Any) -> Any:
    start = p.astype(jnp.int32) + 1
    return lax.cond(p, lambda x: lax.dynamic_slice(x, (start,), (2,)), lambda x: x.at[start].set(7.0)[:2], x)


def in_iterations(p: Any, x: Any) -> Any:
    def iteration(i: Any, x: Any) -> Any:
        return lax.cond((i % 3 == 0) ^ p, lambda x: x * 0.5 + 1, jnp.sin, x)

    return lax.fori_loop(0, 10, iteration, x)


def gradient(p: Any, x: Any) -> Any:
    return jax.grad(lambda x: lax.cond(p, lambda x: (x * x).sum(), lambda x: jnp.exp(x).sum(), x))(x)


def complex_numbers(p: Any, x: Any) -> Any:
    return lax.cond(p, lambda z: z * 2, lambda z: z.conj() * 1j, x + 1j)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("program", [scalar, dividing, nested, in_iterations, gradient, complex_numbers])
def test_branches_are_selected(program: Callable[..., Any], count: int, taken: bool, rng: np.random.Generator) -> None:
    arguments = [np.bool_(taken), rng.standard_normal(count).astype(np.float32)]
    hlo = hlo_bytes(program, *arguments)
    assert_selected(hlo, arguments)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("program", [pair, windows])
def test_branches_with_other_shapes_inside(program: Callable[..., Any], taken: bool, rng: np.random.Generator) -> None:
    arguments = [np.bool_(taken), rng.standard_normal(6).astype(np.float32)]
    hlo = hlo_bytes(program, *arguments)
    assert_selected(hlo, arguments)


@pytest.mark.parametrize("index", [-5, -1, 0, 1, 2, 3, 100, -(2**31), 2**31 - 1])
def test_numbers_out_of_range_take_the_last_branch(index: int, rng: np.random.Generator) -> None:
    """JAX clamps them before; HLO itself is what is compared."""
    text = """
    one { p = f32[5] parameter(0)
      ROOT r = f32[5] negate(p) }
    two { p = f32[5] parameter(0)
      ROOT r = f32[5] sine(p) }
    three { p = f32[5] parameter(0)
      ROOT r = f32[5] add(p, p) }
    ENTRY main { i = s32[] parameter(0)
      x = f32[5] parameter(1)
      ROOT c = f32[5] conditional(i, x, x, x), branch_computations={one, two, three} }"""
    assert_selected(hlo_of_text(text), [np.int32(index), rng.standard_normal(5).astype(np.float32)])


def test_what_a_host_branches_around_an_accelerator_computes() -> None:
    hlo = hlo_bytes(scalar, np.bool_(True), np.ones(4096, np.float32))
    assert conditionals(simplified(import_module(hlo))) == 1
    assert conditionals(simplified(import_module(hlo), H100)) == 0
    hlo = hlo_bytes(scalar, np.bool_(True), np.ones(1 << 22, np.float32))
    assert conditionals(simplified(import_module(hlo), H100)) == 1


def test_large_results_that_are_handed_on_count() -> None:
    hlo = hlo_bytes(lambda p, x: lax.cond(p, lambda x: x, jnp.zeros_like, x), np.bool_(True), np.ones(200, np.float32))
    assert conditionals(convert_conditionals_to_selects(import_module(hlo), 200)) == 0
    assert conditionals(convert_conditionals_to_selects(import_module(hlo), 199)) == 1


def written(p: Any, x: Any, i: Any) -> Any:
    return lax.cond(p, lambda x: x.at[i].set(1.0), lambda x: x, x)


def written_either_way(p: Any, x: Any, i: Any) -> Any:
    """With another result, and what is read of the array before."""
    return lax.cond(
        p,
        lambda x: (x.at[i].add(x[i + 1]).at[:9, 2].multiply(2), i + 1),
        lambda x: (lax.dynamic_update_slice(x, x[:2] + 1, (i, 0)), i),
        x,
    )


def written_by_number(p: Any, x: Any, i: Any) -> Any:
    branches = [lambda x: x.at[i].set(1.0), lambda x: x, lambda x: x.at[jnp.stack([i, i - 1])].add(x[:2])]
    return lax.switch(i + p, branches, x)


def written_in_iterations(p: Any, x: Any, i: Any) -> Any:
    return lax.fori_loop(0, 9, lambda k, x: lax.cond(p ^ (k % 2 == 0), lambda x: x.at[k].add(k), lambda x: x, x), x)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("place", [0, 1, 511, 512, -1])
@pytest.mark.parametrize("program", [written, written_either_way, written_by_number, written_in_iterations])
def test_updates_cost_what_they_write(
    program: Callable[..., Any], place: int, taken: bool, rng: np.random.Generator
) -> None:
    """Not the array, of 4,096 elements."""
    arguments = [np.bool_(taken), rng.standard_normal((512, 8)).astype(np.float32), np.int32(place)]
    assert_selected(hlo_bytes(program, *arguments), arguments)


@pytest.mark.parametrize(
    "branch",
    [
        lambda x, y: x.at[:].set(1.0),
        lambda x, y: y.at[0].set(1.0),
        lambda x, y: x.at[0].set(1.0) + 1,
        lambda x, y: x.at[0].set(1.0).at[1].set(x.at[0].set(1.0).sum()),
    ],
    ids=["all of it", "another array", "and computed", "and read"],
)
def test_what_is_not_only_updated_costs_all_of_it(branch: Callable[..., Any], rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 64, 64)).astype(np.float32)
    hlo = hlo_bytes(lambda p, x, y: lax.cond(p, branch, lambda x, y: x, x, y), np.bool_(True), x, y)
    assert conditionals(simplified(import_module(hlo))) == 1


def looping(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x)


def longest(x: jax.Array) -> jax.Array:
    for _ in range(65):
        x = jnp.sin(x) + 1
    return x


@pytest.mark.parametrize("branch", [looping, longest, jnp.sort, jnp.cumprod, lambda x: jnp.outer(x, x) @ x])
def test_branches_stay(branch: Callable[[jax.Array], jax.Array]) -> None:
    """Loops may not end; sorts and products are kernels of their own."""
    hlo = hlo_bytes(lambda p, x: lax.cond(p, branch, lambda x: x, x), np.bool_(True), np.ones(3, np.float32))
    module = simplified(import_module(hlo))
    verify(module)
    assert conditionals(module) == 1
