"""Attentions with a bias on their logits, and what a program with their gradients asks of the backward call: for the
tests of passes/match."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp

from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.custom_calls.attention import BACKWARD
from support.matching import TOKENS

B, T, H, K, D = 2, TOKENS, 4, 2, 8
EVERY = (0, 1, 2, 3)
OF_HEADS = (H, T, T)


def lower():
    return jnp.tril(jnp.ones((T, T), bool))


def product(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) / 3


def weigh(logits, v):
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits).astype(v.dtype), v)


def added(q, k, v, bias):
    return weigh(product(q, k) + bias, v)


def attend(change):
    return lambda q, k, v, bias: weigh(change(product(q, k), bias), v)


def repeated(q, k, v, bias):
    return added(q, jnp.repeat(k, H // K, axis=2), jnp.repeat(v, H // K, axis=2), bias)


@jax.custom_vjp
def doubled(x):
    return x


doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def arguments(rng, bias, heads=H, dtype=jnp.float32):
    dims = ((B, T, H, D), (B, T, heads, D), (B, T, heads, D), bias)
    return [jnp.asarray(rng.standard_normal(d), dtype) for d in dims]


def backward_of(module):
    (call,) = (
        i
        for computation in module.computations()
        for i in computation.instructions
        if isinstance(i.attributes, CustomCallAttributes) and i.attributes.target == BACKWARD
    )
    return call


def of_bias(call) -> str:
    return json.loads(call.attributes.backend_config)["bias_gradient"]
