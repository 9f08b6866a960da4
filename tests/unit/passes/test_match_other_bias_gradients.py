"""What looks like the gradient of a bias, and is another array than the backward call gives: the program stays as it
is, and the notes say why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from support.biases import EVERY, OF_HEADS, B, H, T, arguments, attend, clipped, doubled, lower, product, weigh
from support.matching import assert_near_miss, errors, exact, gradient, matched, run


def hidden_before(q, k, v, bias):
    """In a row that sees no key the bias's gradient is NaN, where a call's is zero."""
    return weigh(jnp.where(lower(), product(q, k), -jnp.inf) + bias, v)


def with_weights(q, k, v, bias):
    weights = jax.nn.softmax(product(q, k) + bias)
    return jnp.einsum("bhts,bshd->bthd", weights, v) + weights.sum() / T


def of_the_logits(q, k, v, bias):
    logits = product(q, k)
    return weigh(logits + bias * jnp.tanh(logits), v)


NEAR_MISSES = {
    "hidden before": (hidden_before, OF_HEADS, "call does not give"),
    "the weights are wanted": (with_weights, OF_HEADS, "no values are weighted|call does not give"),
    "clipped before it is summed": (
        attend(lambda x, b: x + clipped(jnp.broadcast_to(b, x.shape))),
        OF_HEADS,
        "call does not give",
    ),
    "doubled after the bias": (attend(lambda x, b: doubled(x + b)), OF_HEADS, "call does not give"),
    "made of the logits": (of_the_logits, OF_HEADS, "changes the logits|call does not give|no softmax"),
}


@jax.custom_vjp
def beside(x, other):
    """With the gradient of ``x``, summed over batches, for ``other`` as well."""
    return x


beside.defvjp(lambda x, other: (x, None), lambda _, g: (g, g.sum(0)))


def test_a_sum_with_that_of_a_sink_is_not_the_calls(rng):
    args = arguments(rng, (H, T, T + 1))

    def function(q, k, v, bias):
        logits = product(q, k) + jnp.cos(jnp.arange(T))
        both = beside(jnp.concatenate([logits, jnp.zeros((B, H, T, 1))], -1), bias)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(both)[..., :-1], v)

    assert_near_miss(gradient(function, EVERY), args, "call does not give")


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(rng, name):
    function, bias, reason = NEAR_MISSES[name]
    args = arguments(rng, bias)
    function = gradient(function, EVERY)
    assert_near_miss(function, args, reason)
    module, _ = matched(function, *args)
    assert max(errors(run(module, args), exact(function, args))) < 2e-5
