"""Gathers before elementwise operations: the program computes what stock XLA does, and gathers from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from programs import hlo_bytes, run_on_xla
from support.passes import simplified


def gathers(function: Callable[..., Any], *arguments: np.ndarray, tolerance: float = 1e-6) -> list[Instruction]:
    """The gathers of the optimized program, which computes the same as stock XLA."""
    hlo = hlo_bytes(function, *arguments)
    module = simplified(import_module(hlo))
    verify(module)
    with torch.inference_mode():
        results = build_plan(module.entry).run(Run(), [torch.from_numpy(a.copy()) for a in arguments])
    for ours, theirs in zip(results, run_on_xla(hlo, arguments), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=tolerance, atol=tolerance)
    return [i for c in module.computations() for i in c.instructions if i.opcode is Opcode.GATHER]


def sources(found: Sequence[Instruction]) -> list[Opcode]:
    return [gather.operands[0].opcode for gather in found]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), labels[..., None], -1).mean()


def cross_entropy_by_rows(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits, -1)[jnp.arange(logits.shape[0]), labels].mean()


def problem(rng: np.random.Generator, *rows: int, classes: int = 50) -> tuple[np.ndarray, np.ndarray]:
    logits = rng.standard_normal((*rows, classes)).astype(np.float32)
    return logits, rng.integers(0, classes, rows).astype(np.int32)


@pytest.mark.parametrize("loss", [cross_entropy, cross_entropy_by_rows])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_labels_choose_from_the_logits(
    loss: Callable[..., jax.Array], with_gradient: bool, rng: np.random.Generator
) -> None:
    function = jax.value_and_grad(loss) if with_gradient else loss
    assert sources(gathers(function, *problem(rng, 7))) == [Opcode.PARAMETER]


def test_several_dimensions_of_rows(rng: np.random.Generator) -> None:
    assert sources(gathers(jax.value_and_grad(cross_entropy), *problem(rng, 3, 5))) == [Opcode.PARAMETER]


def test_labels_out_of_range(rng: np.random.Generator) -> None:
    """They choose NaN, whatever the row holds; negative ones count from the end."""
    logits, labels = problem(rng, 6)
    labels[:4] = [-1, -50, 50, -51]
    assert len(gathers(cross_entropy, logits, labels)) == 1
    assert len(gathers(lambda x, y: jnp.take_along_axis(jnp.exp(x), y[:, None], -1), logits, labels)) == 1


def test_a_bias_of_the_classes_is_an_array_of_its_own(rng: np.random.Generator) -> None:
    """Rows of it would have to be made: it is not the same along the dimension that is chosen in."""
    logits, labels = problem(rng, 6)
    bias = rng.standard_normal(50).astype(np.float32)
    found = gathers(lambda x, y, b: jnp.take_along_axis(jnp.exp(x + b), y[:, None], -1), logits, labels, bias)
    assert sources(found) == [Opcode.EXP]


def test_the_result_of_a_product_is_chosen_from_with_its_epilogue(rng: np.random.Generator) -> None:
    h, w = (rng.standard_normal(dims).astype(np.float32) for dims in ((6, 8), (8, 50)))
    labels = rng.integers(0, 50, 6).astype(np.int32)

    def loss(h: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        logits = (h @ w) * 2
        return cross_entropy(logits, labels)

    (gather,) = gathers(loss, h, w, labels, tolerance=1e-5)
    assert gather.operands[0].opcode is Opcode.MULTIPLY
    assert gather.operands[0].operands[0].opcode is Opcode.DOT


def test_a_sum_of_several_arrays(rng: np.random.Generator) -> None:
    logits, labels = problem(rng, 6)

    def choose(y: jax.Array, *arrays: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.tanh(sum(arrays[1:], arrays[0])), y[:, None], -1)

    arrays = [rng.standard_normal(logits.shape).astype(np.float32) for _ in range(4)]
    assert sources(gathers(choose, labels, *arrays[:3])) == [Opcode.PARAMETER] * 3
    assert sources(gathers(choose, labels, *arrays)) == [Opcode.TANH]


def test_many_elements_are_chosen_from_what_is_made(rng: np.random.Generator) -> None:
    x, indices = rng.standard_normal((6, 50)).astype(np.float32), rng.integers(0, 50, (6, 20)).astype(np.int32)
    assert sources(gathers(lambda x, i: jnp.take_along_axis(jnp.exp(x), i, -1), x, indices)) == [Opcode.EXP]


def test_what_is_gathered_from_twice(rng: np.random.Generator) -> None:
    """The second gather's labels are what the first one chose."""
    x = rng.integers(0, 50, (6, 50)).astype(np.int32)

    def function(x: jax.Array, first: jax.Array) -> jax.Array:
        second = jnp.take_along_axis(x * 3 % 50, first[:, None], -1)
        return jnp.take_along_axis(x * 7 - 1, second, -1)

    assert sources(gathers(function, x, rng.integers(0, 50, 6).astype(np.int32))) == [Opcode.PARAMETER] * 2


CLASSES = 1500


def chosen_by_sum(x: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.where(labels[..., None] == jnp.arange(x.shape[-1]), x, 0).sum(-1)


def loss_by_sum(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -chosen_by_sum(jax.nn.log_softmax(logits, -1), labels).mean()


@pytest.mark.parametrize("rows", [(7,), (3, 5), ()])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_sum_that_chooses_one(rows: tuple[int, ...], with_gradient: bool, rng: np.random.Generator) -> None:
    function = jax.value_and_grad(loss_by_sum) if with_gradient else loss_by_sum
    assert sources(gathers(function, *problem(rng, *rows, classes=CLASSES))) == [Opcode.PARAMETER]


def test_a_sum_that_chooses_one_of_each_column(rng: np.random.Generator) -> None:
    logits, labels = problem(rng, 6, classes=CLASSES)

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(y == jnp.arange(CLASSES)[:, None], jnp.exp(x), 0).sum(0)

    assert sources(gathers(function, logits.T.copy(), labels)) == [Opcode.PARAMETER]


def test_sums_that_choose_none(rng: np.random.Generator) -> None:
    """Labels that are no position, rows that are left out, and what is not finite beside what is chosen."""
    logits, labels = problem(rng, 9, classes=CLASSES)
    labels[:4] = [-1, CLASSES, -(2**31), 2**31 - 1]
    logits[5, (labels[5] + 1) % CLASSES], logits[6, labels[6]], logits[7, labels[7]] = np.nan, np.inf, -0.0

    def function(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        hit = y[:, None] == jnp.arange(CLASSES)
        some = hit & (y % 2 == 0)[:, None]
        add = jax.lax.add
        found = jnp.where(hit, jnp.tanh(x), 0)
        both = jnp.where(some, x * 2, 0).sum(1), found.sum(1)
        return (
            *both,
            jax.lax.reduce(found, np.float32(-0.0), add, (1,)),
            jax.lax.reduce(found, np.float32(2), add, (1,)),
        )

    assert sources(gathers(function, logits, labels)) == [Opcode.PARAMETER]
    hlo = hlo_bytes(function, logits, labels)
    module = simplified(import_module(hlo))
    assert not any(i.opcode is Opcode.REDUCE for i in module.entry.instructions)
    with torch.inference_mode():
        results = build_plan(module.entry).run(Run(), [torch.from_numpy(a.copy()) for a in (logits, labels)])
    for ours, theirs in zip(results, run_on_xla(hlo, (logits, labels)), strict=True):
        np.testing.assert_array_equal(np.signbit(ours.numpy()), np.signbit(theirs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: jnp.where(y[:, None] == jnp.arange(CLASSES), jnp.exp(x), 1).sum(1),
        lambda x, y: jnp.where(y[:, None] < jnp.arange(CLASSES), jnp.exp(x), 0).sum(1),
        lambda x, y: jnp.where(y[:, None] == jnp.arange(CLASSES), jnp.exp(x), 0).max(1),
        lambda x, y: jnp.where(y[:, None] == jnp.arange(CLASSES), jnp.exp(x), 0).sum(0),
        lambda x, y: jnp.where(y[:, None] == jnp.arange(CLASSES), jnp.cumsum(x, 1) + 1, 0).sum(1),  # would be made
        lambda x, y: chosen_by_sum(jnp.exp(x[:, :1000]), y),  # short
    ],
)
def test_sums_that_stay(function: Callable[..., jax.Array], rng: np.random.Generator) -> None:
    assert not gathers(function, *problem(rng, 6, classes=CLASSES), tolerance=1e-4)


def test_more_operations_than_calls_can_be_deep(rng: np.random.Generator) -> None:
    def function(logits: jax.Array, labels: jax.Array) -> jax.Array:
        for _ in range(1200):
            logits = -jnp.abs(logits)
        return jnp.take_along_axis(logits, labels[:, None], -1)

    assert sources(gathers(function, *problem(rng, 7))) != [Opcode.PARAMETER]
