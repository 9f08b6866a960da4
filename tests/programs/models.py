"""Control flow, and programs shaped like neural networks and their training. Part of the corpus."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from programs.core import program

# Control flow


@program("s32[]:small", "f32[4]")
def while_counted_and_dynamic(n, x):
    def body(carry):
        i, value = carry
        return i + 1, value * 1.5 - i.astype(np.float32)

    return lax.fori_loop(0, 7, lambda i, v: v + i, x), lax.while_loop(lambda c: c[0] < n, body, (np.int32(0), x))


@program("f32[6,3]", "f32[3]")
def scan_with_outputs(xs, init):
    def body(carry, x):
        carry = jnp.tanh(carry + x)
        return carry, carry * 2

    return lax.scan(body, init, xs), lax.scan(body, init, xs, reverse=True), lax.scan(body, init, xs, unroll=3)


@program("f32[5,3]", "f32[3]")
def scan_gradient(xs, init):
    def loss(init, xs):
        return lax.scan(lambda c, x: (jnp.sin(c * x), c.sum()), init, xs)[1].sum()

    return jax.grad(loss, (0, 1))(init, xs)


@program("pred[]", "s32[]:index3", "f32[4]")
def conditionals(p, i, x):
    branches = [lambda v: v + 1, lambda v: v * 2, lambda v: -v]
    return (
        lax.cond(p, jnp.sin, jnp.cos, x),
        lax.switch(i, branches, x),
        lax.cond(p, lambda v: (v, v.sum()), lambda v: (-v, 1.0), x),
    )


@program("s32[3]:small", "f32[3]")
def while_batched(n, x):
    return jax.vmap(lambda m, v: lax.while_loop(lambda c: c[0] < m, lambda c: (c[0] + 1, c[1] * 2), (np.int32(0), v)))(
        n, x
    )


@program("f32[4,5]", "f32[4,5]")
def composites(x, y):
    gelu = lax.composite(lambda v, *, approximate: jax.nn.gelu(v, approximate), "test.gelu", version=2)
    nested = lax.composite(lambda a, b: gelu(a, approximate=True) + a * b, "test.nested")
    return nested(x, y), gelu(y, approximate=False)


@program("f32[4]")
def nested_calls(x):
    @jax.jit
    def inner(v):
        return v * 2 + 1

    @jax.jit
    def outer(v):
        return inner(v) + inner(-v)

    return outer(x), jax.checkpoint(outer)(x), jax.named_call(inner, name="named")(x)


@program("f32[4]", "s32[]", exact=True)
def optimization_barrier(x, i):
    return lax.optimization_barrier((x * 2, i + 1))


@program("f32[3]", "s32[2]", exact=True)
def passthrough_and_duplicates(x, i):
    return x, x, i, x * 2, (x * 2, i)


@program("f32[3]", "f32[5]", exact=True)
def unused_argument(x, unused):
    del unused
    return x + 1


@program(exact=True)
def no_arguments_no_work():
    return jnp.float32(3), jnp.int32(-1)


@program("f32[4]", exact=True)
def nothing_returned(x):
    del x
    return ()


# Neural-network shaped


@program("f32[4,16]", "f32[16,32]", "f32[32]", "f32[32,8]", "s32[4]:small")
def mlp_loss_and_gradient(x, w1, b1, w2, labels):
    def loss(params):
        w1, b1, w2 = params
        logits = jax.nn.gelu(x @ w1 + b1) @ w2
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    return jax.value_and_grad(loss)((w1 / 8, b1, w2 / 8))


@program("f32[2,6,2,8]", "f32[2,6,2,8]", "f32[2,6,2,8]")
def attention_causal_gradient(q, k, v):
    def attend(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8).astype(np.float32)
        scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return jax.value_and_grad(lambda *a: (attend(*a) ** 2).sum(), (0, 1, 2))(q, k, v)


@program("bf16[4,16]", "f32[16]", "f32[16]")
def layer_norm_mixed(x, scale, bias):
    wide = x.astype(np.float32)
    mean = wide.mean(-1, keepdims=True)
    inverse = lax.rsqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return ((wide - mean) * inverse * scale + bias).astype(jnp.bfloat16)


@program("f32[8,4,4,3]", "f32[3]", "f32[3]")
def batch_norm_by_hand(x, scale, offset):
    def normalize(x, scale, offset):
        mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * lax.rsqrt(variance + 1e-3) * scale + offset

    y, pull = jax.vjp(normalize, x, scale, offset)
    return y, pull(jnp.ones_like(y))


@program("s32[2,8]:small", "f32[8,6]")
def embedding_and_gradient(tokens, table):
    return jax.value_and_grad(lambda t: (t[tokens] ** 3).mean())(table)


@program("f32[4,6]", "f32[4,6]", "f32[4,6]", "f32[4,6]", "s32[]:small")
def adam_update(p, g, m, v, step):
    m = 0.9 * m + 0.1 * g
    v = 0.999 * jnp.abs(v) + 0.001 * g * g
    t = (step + 1).astype(np.float32)
    return p - 1e-3 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v, step + 1


@program("f32[6,3]", "f32[3,16]", "f32[4,16]")
def lstm_scan(xs, w, u):
    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ u, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(cell, (jnp.zeros(4), jnp.zeros(4)), xs)
