"""Programs whose Triton kernels have golden files, and the targets that they are made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from flagos_backend.devices.target import Target

H100 = Target("cuda", "nvidia", "sm_90", multiprocessors=132, shared_memory_bytes=232448, warp_size=32)
NO_DEVICE_LIBRARY = Target("npu", "ascend", "910b", multiprocessors=40)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def s32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * gain + bias


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * gain


def backward(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    return lambda *arguments: jax.vjp(function, *arguments[:-1])[1](arguments[-1])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    wide = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return -(jax.nn.one_hot(labels, logits.shape[-1]) * wide).sum(-1).mean()


def scan_step(xs: jax.Array, ys: jax.Array, h: jax.Array, i: jax.Array) -> tuple[jax.Array, ...]:
    h = jnp.tanh(lax.dynamic_index_in_dim(xs, i, keepdims=False) + h)
    return lax.dynamic_update_slice(ys, h[None], (i, 0, 0)), h, i + 1


CASES: dict[str, tuple[Target, Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    # Positions beside values in one integer, of 32 bits where both fit.
    "argmax_of_narrow_rows": (H100, lambda x: jnp.argmax(x, -1), (bf16(8192, 32000),)),
    "argmax_and_maximum_of_columns": (H100, lambda x: (jnp.argmax(x, 0), x.max(0)), (f32(1024, 1024),)),
    "bfloat16_rounds_each_result": (H100, lambda x, y: x * y + y, (bf16(1000, 768), bf16(1000, 768))),
    "broadcast_of_a_row_and_a_column": (H100, lambda x, r, c: x * r + c, (f32(512, 640), f32(640), f32(512, 1))),
    "column_sum_in_parts": (H100, lambda x: x.sum(0), (f32(16384, 4096),)),
    "complex_numbers": (
        H100,
        lambda z, c: (jnp.where(jnp.abs(z) < 4, z * z + c, z), 1 / z),
        (jax.ShapeDtypeStruct((256, 256), jnp.complex64), jax.ShapeDtypeStruct((256, 256), jnp.complex64)),
    ),
    # Products with 0 or 1 are exact, and positions are compared within a block.
    "cross_entropy_and_gradient": (H100, jax.value_and_grad(cross_entropy), (bf16(8192, 32000), s32(8192))),
    # Whole rows, each loaded while the one before is computed; quotients that a row shares have no branch.
    "softmax_of_long_narrow_rows": (H100, lambda x: jax.nn.softmax(x, -1), (bf16(8192, 32000),)),
    "logsumexp_of_long_rows": (H100, lambda x: jax.nn.logsumexp(x, -1), (f32(4096, 50257),)),
    "dropout_with_random_bits": (
        H100,
        lambda key, x: jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0),
        (jax.ShapeDtypeStruct((2,), np.uint32), f32(4096, 128)),
    ),
    "embedding_and_norm": (
        H100,
        lambda table, gain, ids: rms_norm(table[ids], gain),
        (bf16(50000, 768), bf16(768), s32(8, 1024)),
    ),
    # Of each half the other one is loaded; a roll loads at an index that is chosen.
    "rotary_embedding": (
        H100,
        lambda x, c, s: x * c + jnp.concatenate([-x[..., 64:], x[..., :64]], -1) * s,
        (bf16(4, 2048, 32, 128), bf16(2048, 1, 128), bf16(2048, 1, 128)),
    ),
    "heat_by_rolls": (
        H100,
        lambda x: x + 0.1 * (jnp.roll(x, 1, 0) + jnp.roll(x, -1, 1) - 2 * x),
        (f32(4096, 4096),),
    ),
    "functions_without_a_device_library": (NO_DEVICE_LIBRARY, lambda x: jnp.tanh(x) + jnp.expm1(x), (f32(5000),)),
    "layer_norm": (H100, layer_norm, (f32(8192, 768), f32(768), f32(768))),
    "layer_norm_backward": (H100, backward(layer_norm), (f32(8192, 768), f32(768), f32(768), f32(8192, 768))),
    # Rounded once where a constant is added to a product, and nowhere else.
    "positions_of_16_bits": (
        H100,
        lambda x: (jnp.arange(4096, dtype=np.int16) + x - 3, x.sum(-1, dtype=np.int16)),
        (jax.ShapeDtypeStruct((1000, 4096), np.int16),),
    ),
    "polynomial": (
        H100,
        lambda x, y: (((x - 3) * x + 2) * x + jnp.where(x < 0, 5.0, 7.0), x * y + y),
        (f32(5000),) * 2,
    ),
    "positions_beyond_32_bits": (H100, lambda x: x + 1, (jax.ShapeDtypeStruct((70000, 70000), np.int8),)),
    "scan_step": (H100, scan_step, (f32(512, 64, 1024), f32(512, 64, 1024), f32(64, 1024), s32())),
    "softmax": (H100, lambda x: jax.nn.softmax(x, -1), (f32(16384, 1000),)),
    "sum_of_everything": (H100, lambda x: x.sum(), (f32(4096, 4096),)),
    "transpose": (H100, lambda x: x.T * 2, (f32(4096, 2048),)),
    "unsigned_integers": (H100, lambda x, y: (x >> y) // (y | 1), (jax.ShapeDtypeStruct((777,), np.uint32),) * 2),
}
