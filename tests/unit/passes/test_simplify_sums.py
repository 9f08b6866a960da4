"""Sums of multiples of one-hot rows, against stock XLA on the program as it was, and sums that only look like them."""

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
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same, run_module
from support.passes import simplified

LABELS = np.array([3, 0, 6, 7, -1, 5, -(2**31), 2**31 - 1], np.int32)
FACTORS = np.array([1.5, -2, np.inf, np.inf, np.nan, -0.0, -np.inf, 4], np.float32)


def sums(function: Callable[..., Any], *arguments: np.ndarray) -> int:
    """How many sums are left; the results are those of XLA, signs of zeros included."""
    hlo = hlo_bytes(function, *arguments)
    module = simplified(import_module(hlo))
    verify(module)
    for a, b in zip(run_module(module, arguments), run_on_xla(hlo, arguments), strict=True):
        assert_same(a, b, None)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))
    return _count(module)


def _count(module: Module) -> int:
    return sum(i.opcode is Opcode.REDUCE for i in module.entry.instructions)


def one_hot(labels: jax.Array, axis: int = -1, dtype: Any = jnp.float32) -> jax.Array:
    return jax.nn.one_hot(labels, 7, axis=axis, dtype=dtype)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_multiple_by_a_constant(axis: int, dtype: Any) -> None:
    assert sums(lambda i: (one_hot(i, axis, dtype) * 0.75).sum(axis), LABELS) == 0
    assert sums(lambda i: (-(one_hot(i, axis, dtype) * -0.3)).sum(axis), LABELS) == 0
    assert sums(lambda i: one_hot(i, axis, dtype).sum(axis), LABELS) == 0


def test_a_multiple_of_each_row() -> None:
    """What is not finite makes NaN of the zeros."""
    assert sums(lambda i, f: (f[:, None] * one_hot(i)).sum(1), LABELS, FACTORS) == 0
    assert sums(lambda i, f: (-(one_hot(i) * 2) * f[:, None]).sum(1), LABELS, FACTORS) == 0


def test_a_choice_where_the_label_is() -> None:
    """What is chosen elsewhere is a zero, also beside what is not finite."""

    def chosen(i: jax.Array, f: jax.Array, other: float = 0.0) -> jax.Array:
        return jnp.where(i[:, None] == jnp.arange(7), f[:, None], other)

    assert sums(lambda i, f: chosen(i, f).sum(1), LABELS, FACTORS) == 0
    assert sums(lambda i, f: (-chosen(i, f) * 2).sum(1), LABELS, FACTORS) == 0
    assert sums(lambda i, f: (chosen(i, f) * f[:, None]).sum(1), LABELS, FACTORS) == 0
    assert sums(lambda i, f: chosen(i, f, 1.0).sum(1), LABELS, FACTORS) == 1
    assert sums(lambda i, f: jnp.where(i[:, None] == jnp.arange(7), 0.0, f[:, None]).sum(1), LABELS, FACTORS) == 1


def test_a_choice_in_some_of_the_rows() -> None:
    some = np.arange(8) % 3 != 0

    def chosen(i: jax.Array, f: jax.Array, some: jax.Array) -> jax.Array:
        hit = (i[:, None] == jnp.arange(7)) & some[:, None]
        return jnp.where(hit, f[:, None], 0.0).sum(1), (hit * f[:, None]).sum(1)

    assert sums(chosen, LABELS, FACTORS, some) == 0
    assert (
        sums(lambda i, f, s: jnp.where(s & (i[:, None] == jnp.arange(7)), 2.0, 0).sum(1), LABELS, FACTORS, some[:7])
        == 1
    )


def test_rows_in_the_middle() -> None:
    labels = np.stack([LABELS, LABELS[::-1], LABELS * 0 + 2])
    assert sums(lambda i, f: (one_hot(i, 1) * f[:, None, None]).sum(1), labels, FACTORS[:3]) == 0


def test_an_initial_value() -> None:
    add = jax.lax.add
    assert sums(lambda i, x: jax.lax.reduce(one_hot(i) * 0.5, x[0], add, (1,)), LABELS, FACTORS[1:2]) == 0
    assert sums(lambda i: jax.lax.reduce(one_hot(i) * -0.5, np.float32(-0.0), add, (1,)), LABELS) == 0


def test_positions_of_64_bits() -> None:
    with jax.enable_x64(True):
        labels = LABELS.astype(np.int64) + np.array([0, 0, 0, 0, 0, 0, 2**40, 2**32])
        assert sums(lambda i: (one_hot(i) * 0.5).sum(1), labels) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda i, x: (one_hot(i) * x).sum(1),  # varies along the row
        lambda i, x: (one_hot(i) + 1).sum(1),
        lambda i, x: (one_hot(i) * 2).max(1),
        lambda i, x: (one_hot(i) * 2).sum(0),
        lambda i, x: (one_hot(i) * 2).sum(),
        lambda i, x: ((i[:, None] < jnp.arange(7)) * 2.0).sum(1),
        lambda i, x: (one_hot(i, dtype=jnp.int32) * 2).sum(1),
        lambda i, x: (jax.nn.one_hot(i, 1) * 2).sum(1),
        lambda i, x: ((i[:, None] == 2 * jnp.arange(7)) * 2.0).sum(1),
    ],
)
def test_what_stays(function: Callable[..., Any], rng: np.random.Generator) -> None:
    assert sums(function, LABELS, rng.standard_normal((8, 7), np.float32)) == 1


def test_chains_longer_than_calls_can_be_deep() -> None:
    """Of products and of conditions, of one-hot rows and of others."""
    x, signs = np.arange(24, dtype=np.float32).reshape(8, 3), np.where(np.arange(8) % 3, 1, -1).astype(np.float32)

    def products(x: jax.Array, signs: jax.Array) -> jax.Array:
        for _ in range(1100):
            x = x * signs[:, None]
        return x.sum(1)

    assert sums(products, x, signs) == 1
    assert sums(lambda i, signs: products(one_hot(i), signs), LABELS, signs) == 0

    def conditions(hit: jax.Array, x: jax.Array, signs: jax.Array) -> jax.Array:
        for _ in range(1100):
            hit = hit & (signs > 0)[:, None]
        return jnp.where(hit, x, 0).sum(1)

    def chosen(labels: jax.Array, signs: jax.Array) -> jax.Array:
        return conditions(labels[:, None] == jnp.arange(3, dtype=np.int32), signs[:, None], signs)

    assert sums(lambda x, signs: conditions(x > 4, x, signs), x, signs) == 1
    assert sums(chosen, LABELS % 3, signs) == 0
