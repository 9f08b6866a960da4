"""Whole JAX programs: what they compute, and into how few kernels they fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from cpu.triton.harness import run_both
from flagos_backend.codegen.triton import RegionKernel
from flagos_backend.importer import import_module
from programs import hlo_bytes
from support.against_xla import hlo_of_text
from support.passes import for_accelerator

BF16 = ml_dtypes.bfloat16


def check(function: Callable[..., Any], *arguments: Any, rtol: float = 1e-4, atol: float = 1e-5) -> list[RegionKernel]:
    """Compares with the reference; returns the kernels."""
    arrays = [np.asarray(a) for a in arguments]
    computation = for_accelerator(import_module(hlo_bytes(function, *arrays))).entry
    ours, theirs, made = run_both(computation, arrays)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=rtol, atol=atol)
    return made


def f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * gain + bias


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * gain


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(logits, -1)
    return -(jax.nn.one_hot(labels, logits.shape[-1]) * log_probabilities).sum(-1).mean()


def backward(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The gradients of all arguments but the last, which is the result's."""
    return lambda *arguments: jax.vjp(function, *arguments[:-1])[1](arguments[-1])


@pytest.mark.parametrize("shape", [(70, 33), (3, 7, 64), (1, 1), (5, 1000)])
def test_softmax_is_one_kernel(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = f32(rng, *shape)
    assert len(check(lambda x: jax.nn.softmax(x, -1), x)) == 1
    assert len(check(backward(lambda x: jax.nn.softmax(x, -1)), x, f32(rng, *shape))) == 1


def test_softmax_of_infinite_and_undefined_rows(rng: np.random.Generator) -> None:
    x = f32(rng, 6, 40)
    x[0], x[1, 3], x[2, 4], x[3, 5] = -np.inf, np.nan, np.inf, -np.inf
    check(lambda x: jax.nn.softmax(x, -1), x)


def test_layer_norm_is_one_kernel(rng: np.random.Generator) -> None:
    x, gain, bias = f32(rng, 70, 33), f32(rng, 33), f32(rng, 33)
    assert len(check(layer_norm, x, gain, bias)) == 1
    (kernel,) = check(backward(layer_norm), x, gain, bias, f32(rng, 70, 33))
    assert len(kernel.launches) == 2, "rows and columns: the sums over rows leave partial results"


def test_layer_norm_of_a_batch_of_sequences(rng: np.random.Generator) -> None:
    x, gain, bias = f32(rng, 4, 9, 48), f32(rng, 48), f32(rng, 48)
    assert len(check(backward(layer_norm), x, gain, bias, f32(rng, 4, 9, 48))) == 1


def test_rms_norm_in_bfloat16_is_one_kernel(rng: np.random.Generator) -> None:
    x, gain, gradient = (f32(rng, *s).astype(BF16) for s in ((50, 96), (96,), (50, 96)))
    assert len(check(rms_norm, x, gain, rtol=1e-2, atol=1e-2)) == 1
    assert len(check(backward(rms_norm), x, gain, gradient, rtol=1e-2, atol=6e-2)) == 1


def test_cross_entropy_is_one_kernel_and_the_mean(rng: np.random.Generator) -> None:
    logits, labels = f32(rng, 70, 33), rng.integers(0, 33, 70).astype(np.int32)
    assert len(check(cross_entropy, logits, labels)) == 2
    assert len(check(jax.value_and_grad(cross_entropy), logits, labels)) == 2


@pytest.mark.parametrize("columns", [20000, 16384])
def test_labels_that_are_no_positions_in_long_rows(columns: int, rng: np.random.Generator) -> None:
    """Positions are compared block by block; a label may be any number."""
    labels = np.array([0, columns - 1, columns, -1, 8191, 8192, -(2**31), 2**31 - 1, -8192], np.int32)
    check(jax.value_and_grad(cross_entropy), f32(rng, labels.size, columns), labels)
    check(
        lambda x, i: jnp.where(i[:, None] != jnp.arange(columns), x, 0.0).max(1), f32(rng, labels.size, columns), labels
    )


def test_masked_softmax_reads_the_mask_where_it_is_broadcast(rng: np.random.Generator) -> None:
    scores, mask = f32(rng, 2, 3, 9, 16), rng.integers(0, 2, (2, 1, 9, 16)).astype(bool)
    assert len(check(lambda s, m: jax.nn.softmax(jnp.where(m, s, -1e9), -1), scores, mask)) == 1


def test_normalization_over_the_first_dimension(rng: np.random.Generator) -> None:
    def batch_norm(x: jax.Array) -> jax.Array:
        return (x - x.mean(0)) * lax.rsqrt(((x - x.mean(0)) ** 2).mean(0) + 1e-5)

    assert len(check(batch_norm, f32(rng, 70, 33))) == 1


def test_channels_in_the_middle(rng: np.random.Generator) -> None:
    x = f32(rng, 4, 6, 5, 7)
    check(lambda x: (x - x.mean((0, 2, 3), keepdims=True)) / x.std((0, 2, 3), keepdims=True), x)


def test_values_that_are_wanted_are_stored_beside_what_they_go_into(rng: np.random.Generator) -> None:
    def function(x: jax.Array) -> tuple[jax.Array, ...]:
        y = jnp.exp(x)
        return y, y.sum(-1), y * 2, (y * 2).max(-1)

    (kernel,) = check(function, f32(rng, 20, 30))
    assert len(kernel.outputs) == 4


def test_siblings_that_read_the_same_are_one_kernel(rng: np.random.Generator) -> None:
    assert len(check(lambda x: (x.sum(), x.max(), (x * x).mean()), f32(rng, 30, 40))) == 1
    assert len(check(lambda x: (x.sum(0), x.max(0), jnp.tanh(x)), f32(rng, 30, 40))) == 1


def test_a_region_does_not_swallow_what_others_between_need(rng: np.random.Generator) -> None:
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.exp(x)
        return y + (y @ w)  # the product needs y before the sum can run

    assert len(check(function, f32(rng, 12, 12), f32(rng, 12, 12))) == 2


def test_optimizer_step_is_one_kernel(rng: np.random.Generator) -> None:
    def adam(p: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        return p - 0.01 * (m / 0.1) / (jnp.sqrt(v / 0.001) + 1e-8), m, v

    p, g, m = (f32(rng, 40, 50) for _ in range(3))
    assert len(check(adam, p, g, m, m * m)) == 1


def test_random_bits_are_computed_in_the_kernel_that_uses_them() -> None:
    made = check(lambda key: jax.random.uniform(key, (1000,)) < 0.3, jax.random.key_data(jax.random.key(3)))
    assert len(made) <= 2


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.T + 1,
        lambda x: x[1:31:2, ::-1] * 2,
        lambda x: x.reshape(4, 8, 40).transpose(1, 2, 0) + 1,
        lambda x: x.reshape(-1)[3:1003] + 1,
        lambda x: jnp.concatenate([x, x * 2, x[:, :3]], 1) + 1,
        lambda x: lax.pad(x + 1, -3.0, ((1, 2, 1), (0, 3, 0))),
        lambda x: x[None, :, None, :] + jnp.arange(3)[:, None, None, None],
        lambda x: jnp.broadcast_to(x[:, None, :], (32, 3, 40)).reshape(96, 40) - 1,
        lambda x: x.T * x.sum(1),
        lambda x: x.reshape(32, 4, 10).sum(1) + x.reshape(32, 4, 10).max(0).sum(),
    ],
)
def test_data_movement(move: Callable[..., Any], rng: np.random.Generator) -> None:
    check(move, f32(rng, 32, 40))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (1, 1025), (4097,)])
def test_odd_shapes(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    check(lambda x: (x * 2 + 1, jnp.sum(x), jnp.ravel(x) + 1, jnp.tanh(x) * x.max(initial=0)), f32(rng, *shape))


@pytest.mark.parametrize("dtype", [np.complex64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, bool, np.uint16])
def test_types_that_are_only_moved(dtype: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((24, 36)).astype(dtype)
    check(lambda x: (x.T, x[::2, 3:], jnp.concatenate([x, x], 1)), x)


def test_nothing_is_read_of_empty_arrays(rng: np.random.Generator) -> None:
    """They lie nowhere: reading one element of them ends a process, or a device's context."""
    text = """ENTRY main {
      x = f32[2,1,0] parameter(0)
      y = f32[] parameter(1)
      t = f32[1,0,2] transpose(x), dimensions={1,2,0}
      r = f32[1,0] reshape(t)
      ROOT p = f32[1,3] pad(r, y), padding=0_0_0x0_3_3
    }"""
    computation = for_accelerator(import_module(hlo_of_text(text))).entry
    ours, _, (padded,) = run_both(computation, [f32(rng, 2, 1, 0), np.asarray(np.float32(3))])
    np.testing.assert_array_equal(ours[0], np.full((1, 3), 3, np.float32))
    assert padded.inputs == (computation.parameters[1],)


def test_a_chain_of_random_operations_on_a_shared_value(rng: np.random.Generator) -> None:
    """Diamonds: whatever joins, each value is computed once and no cycle arises."""
    steps: list[Callable[..., Any]] = [
        lambda a, b: a + jnp.tanh(b),
        lambda a, b: a * b.sum(-1, keepdims=True) * 0.01,
        lambda a, b: jnp.maximum(a, b.T.T) - b.mean(0),
        lambda a, b: jax.nn.softmax(a, -1) + b,
        lambda a, b: a[::-1] + b,
    ]

    def function(x: jax.Array) -> list[jax.Array]:
        values = [x, x * 0.5]
        for pick, first, second in picks:
            values.append(steps[pick](values[first % len(values)], values[second % len(values)]))
        return values[-4:]

    for _ in range(6):
        picks = [tuple(int(n) for n in row) for row in rng.integers(0, 1000, (9, 3)) % [len(steps), 1000, 1000]]
        check(function, f32(rng, 12, 18), rtol=1e-3, atol=1e-3)
