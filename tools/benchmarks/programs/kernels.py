"""Single kernels as JAX users write them: chains, norms, losses, products, attention, sorting, random numbers, loops.

Shape suffixes: B batch, T and S positions of queries and keys, N heads, K heads of keys, H width of a head, D width of
the model, M rows, C columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .program import Arguments, Program

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


# Numbers that one thread draws at a time.
_PART = 1 << 22


def normal(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Standard normal numbers, drawn side by side."""
    result = np.empty(shape, dtype)
    parts = np.array_split(result.reshape(-1), -(-result.size // _PART))

    def fill(part: np.ndarray, generator: np.random.Generator) -> None:
        part[:] = generator.standard_normal(part.size, np.float32)

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, parts, random.spawn(len(parts))))
    return result


def normals(*shapes: tuple[int, ...], dtype: np.dtype = F32) -> Callable[[np.random.Generator], Arguments]:
    """Arguments of standard normal numbers."""
    return lambda random: tuple(normal(random, shape, dtype) for shape in shapes)


def chain(x: jax.Array) -> jax.Array:
    """Twelve elementwise operations."""
    y = x * 1.5 + 0.25
    y = jnp.maximum(y, -3.0) * jax.nn.sigmoid(y)
    y = y + jnp.tanh(x) * 0.5
    return jnp.where(x > 0, y, -y) * jax.lax.rsqrt(1.0 + x * x)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Over the last dimension, in float32."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype) * scale + bias


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Over the last dimension, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def gradient(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The gradients for all arguments but the last, which is the cotangent."""
    return lambda *arguments: jax.vjp(function, *arguments[:-1])[1](arguments[-1])


def cross_entropy(logits_MV: jax.Array, labels_M: jax.Array) -> jax.Array:
    """Mean over the rows, in float32."""
    logits = logits_MV.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels_M[:, None], axis=-1)[:, 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()


def attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """Causal, written naively: scores of all pairs, a mask, a softmax in float32."""
    groups = q_BTNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (jnp.repeat(x, groups, axis=2) if groups > 1 else x for x in (k_BSKH, v_BSKH))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH).astype(jnp.float32) * q_BTNH.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(q_BTNH.dtype)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v_BSNH)


def cudnn_attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """The same as one call, which asks XLA for cuDNN."""
    return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation="cudnn")


def loop(x: jax.Array) -> jax.Array:
    """Ten thousand short iterations, each depending on the one before."""
    return jax.lax.fori_loop(0, 10_000, lambda _, y: y * 0.999 + 0.001 * jnp.sin(y), x)


def _rows(rows: int, columns: int, dtype: np.dtype) -> list[Program]:
    shape, width, size = (rows, columns), (columns,), f"{rows}x{columns}"
    found = []

    def add(name: str, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        arguments = normals(*shapes, dtype=dtype)
        found.append(Program(f"{name} {size}", function, arguments))

    add("softmax", lambda x: jax.nn.softmax(x.astype(jnp.float32), axis=-1).astype(x.dtype), shape)
    add("layer norm", layer_norm, shape, width, width)
    add("layer norm gradient", gradient(layer_norm), shape, width, width, shape)
    add("RMS norm", rms_norm, shape, width)
    add("RMS norm gradient", gradient(rms_norm), shape, width, shape)
    return found


def _cross_entropy(rows: int, vocabulary: int, dtype: np.dtype) -> Program:
    def arguments(random: np.random.Generator) -> Arguments:
        logits = normal(random, (rows, vocabulary), dtype)
        return logits, random.integers(vocabulary, size=rows, dtype=np.int32)

    function = jax.value_and_grad(cross_entropy)
    return Program(f"cross-entropy and gradient {rows}x{vocabulary}", function, arguments)


def _product(name: str, dims: tuple[int, int, int], batch: int, dtype: np.dtype) -> Program:
    m, k, n = dims
    lead = (batch,) if batch > 1 else ()
    arguments = normals((*lead, m, k), (*lead, k, n), dtype=dtype)
    size = f"{f'{batch}x' if batch > 1 else ''}{m}x{k}x{n}"
    return Program(f"{name} {size}", jnp.matmul, arguments, 2.0 * batch * m * k * n)


def _attention(batch: int, length: int, heads: int, kv_heads: int, width: int, dtype: np.dtype) -> list[Program]:
    query, key = (batch, length, heads, width), (batch, length, kv_heads, width)
    forward, backward = normals(query, key, key, dtype=dtype), normals(query, key, key, query, dtype=dtype)
    flops = 2.0 * batch * heads * length * length * width  # two products, half of it masked
    size = f"{batch}x{length}x{heads}x{width}" + (f" on {kv_heads}" if kv_heads < heads else "")
    both, cudnn = gradient(attention), cudnn_attention if dtype == BF16 else None
    return [
        Program(f"attention {size}", attention, forward, flops, asking=cudnn),
        Program(f"attention gradient {size}", both, backward, 3.5 * flops, asking=gradient(cudnn) if cudnn else None),
    ]


def host() -> list[Program]:
    """Kernels that take a host with a few cores milliseconds."""
    big = normals((2048, 2048))
    return [
        Program("elementwise chain 2048x2048", chain, big),
        *_rows(4096, 1024, F32),
        _cross_entropy(512, 8192, F32),
        _product("product", (512, 512, 512), 1, F32),
        _product("skinny product", (16, 1024, 4096), 1, F32),
        _product("batched product", (128, 64, 128), 64, F32),
        *_attention(1, 512, 8, 8, 64, F32),
        *_shared(1 << 20, (256, 4096), F32),
    ]


def accelerator() -> list[Program]:
    """Kernels that take an accelerator a good part of a millisecond or more."""
    big = normals((16384, 8192), dtype=BF16)
    lengths = ((8, 1024, 32), (4, 4096, 32), (1, 16384, 4))
    return [
        Program("elementwise chain 16384x8192", chain, big),
        *_rows(16384, 8192, BF16),
        _cross_entropy(8192, 32000, BF16),
        _product("product", (8192, 8192, 8192), 1, BF16),
        _product("product", (1024, 1024, 1024), 1, BF16),
        _product("skinny product", (16, 4096, 11008), 1, BF16),
        _product("batched product", (1024, 128, 1024), 128, BF16),
        *(
            program
            for batch, length, heads in lengths
            for program in _attention(batch, length, heads, heads, 128, BF16)
        ),
        *_attention(4, 4096, 32, 8, 128, BF16),
        *_shared(1 << 26, (4096, 16384), F32),
    ]


def _shared(numbers: int, rows: tuple[int, int], dtype: np.dtype) -> list[Program]:
    """What differs between the scales in size only."""

    def random_normal(key: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.wrap_key_data(key), (numbers,))

    def key(random: np.random.Generator) -> Arguments:
        return (random.integers(1 << 32, size=2, dtype=np.uint32),)

    def top_k(x: jax.Array) -> Sequence[jax.Array]:
        return jax.lax.top_k(x, 16)

    table, small, size = normals(rows, dtype=dtype), normals((128,)), f"{rows[0]}x{rows[1]}"
    return [
        Program(f"threefry normal {numbers}", random_normal, key, precision=1e-5),
        Program(f"sort {size}", jnp.sort, table, precision=0.0),
        Program(f"top-16 {size}", top_k, table, precision=0.0),
        Program("loop of 10,000", loop, small, precision=1e-4),
    ]
