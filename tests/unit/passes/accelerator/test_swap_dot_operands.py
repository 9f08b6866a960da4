"""Transposes of dots as dots of the operands in the other order, against stock XLA on the program as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.accelerator.swap_dot_operands import swap_dot_operands
from programs import hlo_bytes, run_on_xla
from support.against_xla import run_module
from support.passes import simplified

# Of [2,3,4,5] by [2,5,6,7] with a batch: the result is [2,3,4,6,7].
SWAPPED, OTHERS = (0, 3, 4, 1, 2), [(0, 3, 4, 2, 1), (0, 1, 2, 4, 3), (1, 0, 2, 3, 4), (3, 4, 0, 1, 2)]


def product(a: Any, b: Any) -> Any:
    return jax.lax.dot_general(a, b, (((3,), (1,)), ((0,), (0,))))


def swapped(function: Callable[..., Any], *shapes: tuple[int, ...], rng: np.random.Generator) -> Module:
    """What the pass makes, whose results are XLA's."""
    arguments = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    hlo = hlo_bytes(function, *arguments)
    module = swap_dot_operands(simplified(import_module(hlo)))
    verify(module)
    for ours, theirs in zip(run_module(module, arguments), run_on_xla(hlo, arguments), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    return module


def transposes(module: Module) -> int:
    return sum(i.opcode is Opcode.TRANSPOSE for c in module.computations() for i in c.instructions)


def made_dots(module: Module) -> int:
    # Of the dots that are left dead nothing is run.
    return sum(i.opcode is Opcode.DOT for c in module.computations() for i in c.instructions)


def test_rows_behind_columns(rng: np.random.Generator) -> None:
    module = swapped(lambda a, b: jnp.transpose(product(a, b), SWAPPED), (2, 3, 4, 5), (2, 5, 6, 7), rng=rng)
    assert transposes(module) == 0


@pytest.mark.parametrize(
    ("spec", "lhs", "rhs"),
    [("ij,jk->ki", (3, 5), (5, 4)), ("td,tec->ecd", (6, 5), (6, 2, 3)), ("ecd,ecf->efd", (2, 5, 3), (2, 5, 4))],
)
def test_sums_of_einstein(spec: str, lhs: tuple[int, ...], rhs: tuple[int, ...], rng: np.random.Generator) -> None:
    assert transposes(swapped(lambda a, b: jnp.einsum(spec, a, b), lhs, rhs, rng=rng)) == 0


@pytest.mark.parametrize("order", OTHERS, ids=str)
def test_other_orders_stay(order: tuple[int, ...], rng: np.random.Generator) -> None:
    module = swapped(lambda a, b: jnp.transpose(product(a, b), order), (2, 3, 4, 5), (2, 5, 6, 7), rng=rng)
    assert transposes(module) == 1


def test_a_dot_that_is_needed_as_it_is_stays(rng: np.random.Generator) -> None:
    def both(a: Any, b: Any) -> tuple[Any, Any]:
        found = a @ b
        return found, found.T

    module = swapped(both, (3, 5), (5, 4), rng=rng)
    assert transposes(module) == 1 and made_dots(module) == 1


def test_gradients_of_experts_have_no_transposes(rng: np.random.Generator) -> None:
    def loss(w: Any, x: Any) -> Any:
        return (jnp.einsum("ecd,edf->ecf", x, w) ** 2).sum()

    assert transposes(swapped(jax.grad(loss), (2, 5, 3), (2, 4, 5), rng=rng)) == 0


def test_in_a_loop(rng: np.random.Generator) -> None:
    def steps(a: Any, b: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda i, x: (b @ jnp.sin(x)).T, a)

    assert transposes(swapped(steps, (5, 5), (5, 5), rng=rng)) == 0
