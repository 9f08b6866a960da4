"""Where a program scales its scores, and how it adds, subtracts or masks: each spelling is one call, and its gradients
are one; float64 is the oracle."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from support.matching import (
    assert_as_close_as_the_program,
    errors,
    exact,
    gradient,
    matched,
    run,
    targets,
    weights_like,
)

B, T, H, D = 2, 24, 4, 8
SCALE = D**-0.5


def scores(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k)


def lower():
    return jnp.tril(jnp.ones((T, T), bool))


def slopes(q):
    """A bias that depends on heads and keys."""
    return (jnp.arange(1, H + 1)[:, None, None] * jnp.arange(T) / 20).astype(q.dtype)


#: Scores of query and key as they enter the softmax.
SPELLINGS = {
    "of the query": lambda q, k: scores(q * SCALE, k),
    "of the query, divided": lambda q, k: scores(q / np.sqrt(D), k),
    "of the key": lambda q, k: scores(q, k * SCALE),
    "of both": lambda q, k: scores(q * SCALE**0.5, k * SCALE**0.5),
    "divided": lambda q, k: scores(q, k) / np.sqrt(D),
    "divided by a root": lambda q, k: scores(q, k) / jnp.sqrt(q.shape[-1]).astype(q.dtype),
    "by an inverse root": lambda q, k: scores(q, k) * jax.lax.rsqrt(jnp.float32(D)).astype(q.dtype),
    "in the type of the arguments, then wide": lambda q, k: (scores(q, k) * jnp.asarray(SCALE, q.dtype)).astype(
        jnp.promote_types(q.dtype, jnp.float32)
    ),
    "wide": lambda q, k: scores(q, k).astype(jnp.promote_types(q.dtype, jnp.float32)) * SCALE,
    "twice": lambda q, k: scores(q, k) / 3 * 2,
    "after the mask": lambda q, k: jnp.where(lower(), scores(q, k), -1e30) * SCALE,
    "after an infinite mask": lambda q, k: jnp.where(lower(), scores(q, k), -jnp.inf) * SCALE,
    "negative": lambda q, k: -scores(q, k) * SCALE,
    "after a bias": lambda q, k: (scores(q, k) + slopes(q)) * SCALE,
    "after a bias and a mask": lambda q, k: jnp.where(lower(), scores(q, k) + slopes(q), -jnp.inf) / 3,
    "after a subtracted bias": lambda q, k: (scores(q, k) - slopes(q)) / 3,
    "between two biases": lambda q, k: (scores(q, k) - slopes(q)) * SCALE + slopes(q)[0],
    "a subtracted bias": lambda q, k: scores(q, k) * SCALE - slopes(q),
    "a subtracted mask": lambda q, k: scores(q, k) * SCALE - 1e10 * (1 - jnp.tril(jnp.ones((T, T), q.dtype))),
    "a subtracted mask of another form": lambda q, k: scores(q, k) / 3 - jnp.where(lower(), 0, 1e10),
    "after a low bias": lambda q, k: (scores(q, k) + jnp.where(lower(), 0, -1e10).astype(q.dtype)) * SCALE,
}
#: In half types rounded where the call does not: f16 has no 1e10.
WIDE_ONLY = frozenset({"a subtracted mask", "a subtracted mask of another form", "after a low bias"})
BANDS = WIDE_ONLY | {"after the mask", "after an infinite mask", "after a bias and a mask"}


def attention(name):
    def function(q, k, v):
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(SPELLINGS[name](q, k)).astype(v.dtype), v)

    return function


def arguments(rng, dtype=jnp.float32):
    return [jnp.asarray(rng.standard_normal((B, T, H, D)), dtype) for _ in range(3)]


@pytest.mark.parametrize("name", SPELLINGS)
def test_gradients(rng, name):
    args = arguments(rng)
    function = gradient(attention(name))
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert not weights_like(result.module)
    assert ("upper=0" in result.notes[0]) is (name in BANDS)
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", sorted(SPELLINGS.keys() - WIDE_ONLY))
def test_half_types_are_as_close_as_the_program(rng, name, dtype):
    args = arguments(rng, dtype)
    function = gradient(attention(name))
    module, result = matched(function, *args)
    assert_as_close_as_the_program(function, args, module, result)


@pytest.mark.parametrize("name", ["subtracted", "scaled after", "subtracted and scaled after"])
def test_rows_that_see_no_key(rng, name):
    """They weigh all keys alike, whichever way the mask was added."""
    kept = np.ones((B, 1, 1, T), bool)
    kept[0] = False
    kept[1, ..., :5] = False

    def function(q, k, v, kept):
        logits = {
            "subtracted": lambda x: x * SCALE - 1e10 * (1 - kept.astype(jnp.float32)),
            "scaled after": lambda x: (x + ~kept * -1e9) * SCALE,
            "subtracted and scaled after": lambda x: (x - jnp.where(kept, 0, 1e30)) / 3,
        }[name](scores(q, k))
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    args = [*arguments(rng), kept]
    module, result = matched(gradient(function), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert "mask=b11s" in result.notes[0] and "bias" not in result.notes[0]
    for ours, program in zip(run(result.module, args), run(module, args), strict=True):
        np.testing.assert_allclose(ours, program, rtol=1e-4, atol=2e-5)


def test_what_bf16_makes_of_a_usual_fill_is_a_band(rng):
    args = arguments(rng, jnp.bfloat16)

    def function(q, k, v):
        logits = jnp.where(lower(), scores(q, k) * SCALE, jnp.bfloat16(-1e9))
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    _, result = matched(function, *args)
    assert "upper=0" in result.notes[0] and "mask" not in result.notes[0]


NEAR_MISSES = {
    "call does not give": lambda x: x - x.mean(-1, keepdims=True),
    "another number for each key": lambda x: x * jnp.arange(T),
    "power .* changes the logits|multiply .* changes": lambda x: x * jnp.abs(x),
}


@pytest.mark.parametrize("reason", NEAR_MISSES)
def test_near_misses(rng, reason):
    args = arguments(rng)

    def function(q, k, v):
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(NEAR_MISSES[reason](scores(q, k))), v)

    module, result = matched(function, *args)
    assert result.module is module
    assert len(result.notes) == 1
    assert re.search(reason, result.notes[0]), result.notes
