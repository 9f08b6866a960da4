"""A thousand runs of programs whose kernels add in a fixed order give the same bits, step by step or replayed."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

RUNS = 1000


def attention(x: jax.Array) -> jax.Array:
    """Eight causal heads that are their own queries, keys and values."""
    heads = x.reshape(-1, 8, 64)
    scores = jnp.einsum("qhd,khd->hqk", heads, heads) / 8
    scores = jnp.where(jnp.tri(x.shape[0], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), heads).reshape(x.shape)


def normalized(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def trained(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss of a block of attention and of its gradient."""

    def loss(x: jax.Array) -> jax.Array:
        x = x + attention(normalized(x))
        x = x + jax.nn.gelu(normalized(x) @ x.T @ x / x.size)
        return jnp.square(x).mean() + jax.nn.logsumexp(x)

    return jax.value_and_grad(loss)(x)


def ordered(x: jax.Array) -> tuple[jax.Array, ...]:
    rounded = jnp.round(x * 8)  # with ties
    return *jax.lax.sort_key_val(rounded, jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape)), *jax.lax.top_k(rounded, 9)


def repeated(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loop of known length, and one whose length depends on the data, from which the program is segments."""
    x = jax.lax.fori_loop(0, 30, lambda _, x: normalized(jnp.sin(x) + jnp.cumsum(x, 1) / 32), x)
    return jax.lax.while_loop(lambda s: s[1].max() < 1e4, lambda s: (s[0] + 1, s[1] * 1.7 + s[1].sum(0)), (0, abs(x)))


def drawn(x: jax.Array) -> tuple[jax.Array, ...]:
    key = jax.random.key((x[0, 0] * 1000).astype(jnp.int32))
    return jax.random.normal(key, x.shape) @ x.T, jax.random.permutation(key, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("function", [trained, ordered, repeated, drawn])
def test_the_bits_stay(
    function: Callable[[jax.Array], object],
    dtype: jnp.dtype,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLAGOS_PREFER", "triton|vendor")  # gradients of libraries' attention may add in any order
    device = jax.devices("flagos")[0]
    x = jax.device_put(rng.standard_normal((256, 512)).astype(np.float32), device).astype(dtype)
    run = jax.jit(function)

    @jax.jit
    def count(seen: jax.Array, results: list[jax.Array], expected: list[jax.Array]) -> jax.Array:
        return seen + sum(jnp.sum(bits(a) != bits(b), dtype=np.int32) for a, b in zip(results, expected, strict=True))

    expected = jax.tree.leaves(run(x))
    differing = jax.device_put(np.int32(0), device)
    for _ in range(RUNS):
        differing = count(differing, jax.tree.leaves(run(x)), expected)
    assert int(differing) == 0
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in expected)


def bits(x: jax.Array) -> jax.Array:
    return x.view(f"u{x.dtype.itemsize}")
