"""One element a row: the rewritten program computes what stock XLA computes of the scatter; others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from programs import hlo_bytes, run_on_xla
from support.passes import simplified


def scatters_left(function: Callable[..., Any], *arguments: np.ndarray) -> int:
    """How many scatters the optimized program has, which computes the same as stock XLA."""
    hlo = hlo_bytes(function, *arguments)
    module = simplified(import_module(hlo))
    verify(module)
    with torch.inference_mode():
        results = build_plan(module.entry).run(Run(), [torch.from_numpy(a.copy()) for a in arguments])
    for ours, theirs in zip(results, run_on_xla(hlo, arguments), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    return sum(i.opcode is Opcode.SCATTER for c in module.computations() for i in c.instructions)


def gradient_of_choice(x: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.grad(lambda x: (jnp.take_along_axis(x, labels[..., None], -1)[..., 0] * 3).sum())(x)


def test_gradient_of_a_choice_of_labels(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6, 9)).astype(np.float32)
    assert scatters_left(gradient_of_choice, x, rng.integers(0, 9, (4, 6)).astype(np.int32)) == 0


def test_labels_out_of_range_choose_nothing(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 5)).astype(np.float32)
    labels = np.array([-9, -1, 0, 4, 5, 6, 2**31 - 1, -(2**31)], np.int32)
    dropped = jax.lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))

    def function(x: jax.Array, labels: jax.Array) -> jax.Array:
        mode = jax.lax.GatherScatterMode.FILL_OR_DROP
        return jax.lax.scatter_add(jnp.zeros_like(x), labels[:, None], x[:, 0], dropped, mode=mode)

    assert scatters_left(function, x, labels) == 0


@pytest.mark.parametrize("combine", ["scatter", "scatter_add", "scatter_mul", "scatter_max"])
def test_each_way_to_combine(combine: str, rng: np.random.Generator) -> None:
    updates, labels = rng.standard_normal(7).astype(np.float32), rng.integers(-2, 12, 7).astype(np.int32)
    numbers = jax.lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))

    def function(updates: jax.Array, labels: jax.Array) -> jax.Array:
        return getattr(jax.lax, combine)(jnp.full((7, 10), 1.5, jnp.float32), labels[:, None], updates, numbers)

    assert scatters_left(function, updates, labels) == 0


def test_several_elements_for_a_row_stay_a_scatter(rng: np.random.Generator) -> None:
    x, labels = rng.standard_normal((4, 3)).astype(np.float32), rng.integers(0, 9, (4, 3)).astype(np.int32)
    assert scatters_left(lambda x, i: jax.vmap(lambda x, i: jnp.zeros(9).at[i].add(x))(x, i), x, labels) == 1


def test_scatters_into_computed_arrays_and_of_windows_stay(rng: np.random.Generator) -> None:
    x, labels = rng.standard_normal((4, 9)).astype(np.float32), rng.integers(0, 9, 4).astype(np.int32)
    assert scatters_left(lambda x, i: jax.vmap(lambda x, i: x.at[i].add(1.0))(x, i), x, labels) == 1
    assert scatters_left(lambda x, i: jnp.zeros((9, 9)).at[i].set(x), x, labels) == 1
