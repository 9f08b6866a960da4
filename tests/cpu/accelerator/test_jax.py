"""JAX programs on an accelerator, against JAX's own CPU; each runs often enough to be past its first launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import flagos_backend.frontends.jax

flagos_backend.frontends.jax.initialize()

RUNS = 3


@pytest.fixture(scope="module")
def device() -> jax.Device:
    return jax.devices("flagos")[0]


@pytest.fixture(scope="module")
def cpu() -> jax.Device:
    return jax.devices("cpu")[0]


def softmax_gradient(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(x)


def normalised(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.bfloat16)
    return ((x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1)).astype(jnp.float32)


def joined(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x * 2, jnp.sort(x), jnp.pad(x[:, 2:], ((0, 0), (1, 1)))], 0)


def random(x: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.key(3), x.shape) + x


def counted(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 5, lambda i, x: jnp.tanh(x) * 1.01 + i, x)


def until_large(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: jnp.abs(x).sum() < 1e3, lambda x: 2 * x, x)


def scanned(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.scan(lambda carry, row: (carry * 0.5 + row, carry.sum()), jnp.zeros(x.shape[1]), x)


def called_back(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda x: np.asarray(x) * 3, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1


def hidden(x: jax.Array) -> jax.Array:
    """Attention, with its gradient, that leaves the third row no key."""

    def loss(x: jax.Array) -> jax.Array:
        logits = jnp.einsum("td,sd->ts", x, x[::-1]) / 8
        visible = (x[:, :1] > x[:, 1]) & (jnp.arange(6)[:, None] != 2)
        return jnp.mean(jnp.sin(jax.nn.softmax(logits, where=visible) @ jnp.cos(x)))

    return jax.grad(loss)(x)


def tempered(x: jax.Array) -> jax.Array:
    """Attention of two heads with a temperature for each, and its gradients."""

    def loss(x: jax.Array, temperature: jax.Array) -> jax.Array:
        heads = x.reshape(6, 2, 4)
        logits = jnp.einsum("thd,shd->hts", heads, heads[::-1]) / 8 * temperature[:, None, None]
        return jnp.mean(jnp.sin(jnp.einsum("hts,shd->thd", jax.nn.softmax(logits), jnp.cos(heads))))

    gradients = jax.grad(loss, (0, 1))(x, x[0, :2])
    return jnp.concatenate([gradients[0].ravel(), gradients[1]])


def biased(x: jax.Array) -> jax.Array:
    """Gradients of attention with biases from a table, by distance, for all heads alike; one sequence hides keys."""

    def loss(x: jax.Array, table: jax.Array) -> jax.Array:
        heads = jnp.stack([x.reshape(6, 2, 4), jnp.cos(x).reshape(6, 2, 4)])
        bias = table[jnp.arange(6)[:, None] - jnp.arange(6) + 5]
        logits = jnp.einsum("bthd,bshd->bhts", heads, heads[::-1]) / 3 + bias
        logits = jnp.where(jnp.arange(6) < jnp.array([4, 6])[:, None, None, None], logits, -1e9)
        return jnp.mean(jnp.sin(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), heads)))

    gradients = jax.grad(loss, (0, 1))(x, x.ravel()[:11])
    return jnp.concatenate([gradients[0].ravel(), gradients[1]])


def positions(x: jax.Array) -> tuple[jax.Array, ...]:
    """Of rows, columns and all; and a path of the greatest sums, step by step."""
    moves = jnp.sin(jnp.arange(64.0)).reshape(8, 8)

    def step(scores: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = scores[:, None] + moves
        return sums.max(0) + row, jnp.argmax(sums, 0)

    places = jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argmax(x.astype(jnp.bfloat16)), x[jnp.arange(6), jnp.argmin(x, 1)]
    return *places, *jax.lax.scan(step, x[0], x)


@pytest.mark.parametrize(
    "function",
    [
        softmax_gradient,
        normalised,
        joined,
        random,
        counted,
        until_large,
        scanned,
        called_back,
        hidden,
        tempered,
        biased,
        positions,
    ],
    ids=lambda function: function.__name__,
)
def test_as_on_the_cpu(
    function: Callable[..., Any], device: jax.Device, cpu: jax.Device, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((6, 8)).astype(np.float32)
    tolerance = 2e-2 if function is normalised else 1e-5
    compiled = jax.jit(function)
    wanted = jax.tree.leaves(compiled(jax.device_put(x, cpu)))
    for _ in range(RUNS):
        for ours, theirs in zip(jax.tree.leaves(compiled(jax.device_put(x, device))), wanted, strict=True):
            assert ours.devices() == {device}
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=tolerance, atol=1e-6)


def test_training_with_donated_parameters(device: jax.Device, cpu: jax.Device, rng: np.random.Generator) -> None:
    def step(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jax.nn.relu(x @ w) - y) ** 2))(weights)
        return weights - 0.1 * gradient, loss

    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 2), (8, 4), (8, 2))]
    ends = []
    for where in (device, cpu):
        weights, x, y = jax.device_put(arrays, where)
        compiled = jax.jit(step, donate_argnums=0)
        for _ in range(5):
            former = weights
            weights, loss = compiled(former, x, y)
            assert former.is_deleted()
        ends.append((np.asarray(weights), float(loss)))
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-4, atol=1e-6)
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-4)


def test_a_donated_cache_is_updated_step_by_step(device: jax.Device, cpu: jax.Device, rng: np.random.Generator) -> None:
    def step(cache: jax.Array, x: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = jax.lax.dynamic_update_slice(cache, jnp.tanh(x)[:, None], (0, at, 0))
        return cache, jnp.where(jnp.arange(8)[:, None] <= at, cache, 0).sum(1)

    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 8, 3), (2, 3))]
    ends = []
    for where in (device, cpu):
        cache, x = jax.device_put(arrays, where)
        compiled = jax.jit(step, donate_argnums=0)
        for at in (0, 3, -1, 7, 12):
            former = cache
            cache, total = compiled(former, x, np.int32(at))
            assert former.is_deleted()
            x = x + total
        ends.append((np.asarray(cache), np.asarray(x)))
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_arrays_in_host_memory_take_part(device: jax.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    there = jax.device_put(x, SingleDeviceSharding(device, memory_kind="pinned_host"))
    back = jax.jit(lambda x: x * 2, out_shardings=SingleDeviceSharding(device, memory_kind="device"))(there)
    assert (there.sharding.memory_kind, back.sharding.memory_kind) == ("pinned_host", "device")
    np.testing.assert_array_equal(np.asarray(back), x * 2)


def test_an_array_over_two_devices(rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("flagos"))
    x = rng.standard_normal((6, 4)).astype(np.float32)
    split = jax.device_put(x, NamedSharding(mesh, P("d")))
    total = jax.jit(lambda x: x - x.mean(0), out_shardings=NamedSharding(mesh, P("d")))(split)
    np.testing.assert_allclose(np.asarray(total), x - x.mean(0), rtol=1e-5, atol=1e-6)
