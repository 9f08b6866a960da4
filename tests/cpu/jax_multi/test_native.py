"""Programs over eight host devices run natively, each device its share; they meet in library calls."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
Agree = Callable[[Callable[[Mesh], Any]], Any]


def put(array: Any, mesh: Mesh, *spec: Any) -> Any:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def test_training_step(agree: Agree, emitted: Callable[[str], str], rng: np.random.Generator) -> None:
    sizes = (12, 24, 8)
    weights = [rng.standard_normal(shape).astype(np.float32) * 0.3 for shape in pairwise(sizes)]
    x, y = rng.standard_normal((32, 12)).astype(np.float32), rng.integers(0, 8, 32)

    def loss(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.nn.gelu(x @ weights[0]) @ weights[1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    def native_step(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return [w - 0.5 * g for w, g in zip(weights, gradients, strict=True)], value

    def run(mesh: Mesh) -> Any:
        step = jax.jit(native_step, donate_argnums=0)
        state, batch, losses = put(weights, mesh), put((x, y), mesh, ("a", "b")), []
        for _ in range(4):
            state, value = step(state, *batch)
            losses.append(value)
        return state, losses

    _, losses = agree(run)
    assert float(losses[3]) < float(losses[0])
    assert "1 calls" in emitted("jit_native_step")


def test_a_loop_whose_end_all_devices_decide(
    agree: Agree, emitted: Callable[[str], str], rng: np.random.Generator
) -> None:
    x = rng.uniform(0.5, 1, (8, 4)).astype(np.float32)

    def until_large(y: jax.Array) -> jax.Array:
        def small(y: jax.Array) -> jax.Array:
            return lax.psum(y.sum(), ("a", "b")) < 100

        def larger(y: jax.Array) -> jax.Array:
            number = lax.axis_index("a") * 4 + lax.axis_index("b")
            return y * 1.5 + jnp.sin(y) * number + lax.ppermute(y, "b", [(n, (n + 1) % 4) for n in range(4)])

        return lax.while_loop(small, larger, y)

    def run(mesh: Mesh) -> jax.Array:
        spec = P(("a", "b"))
        return jax.jit(jax.shard_map(until_large, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(
            put(x, mesh, ("a", "b"))
        )

    agree(run)
    emitted("jit_until_large")


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lax.linalg.cholesky, id="cholesky"),
        pytest.param(lambda m: jax.nn.softmax(jnp.tanh(m @ m), -1), id="products and softmax"),
    ],
)
def test_shares_of_a_batch_are_what_they_are_on_one_device(
    function: Callable[[jax.Array], jax.Array], devices: list[jax.Device], mesh: Mesh, rng: np.random.Generator
) -> None:
    m = rng.standard_normal((16, 6, 6)).astype(np.float32)
    m = m @ m.swapaxes(1, 2)
    alone = jax.jit(function)(jax.device_put(m, devices[0]))
    np.testing.assert_array_equal(jax.jit(function)(put(m, mesh, ("a", "b"))), alone)
