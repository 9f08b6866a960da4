"""Attention with a sink, one more logit a row whose weight is dropped, is one call, and its gradients are one, with the
sink's among them; float64 is the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.types import leaves
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same
from support.matching import (
    assert_as_close_as_the_program,
    assert_near_miss,
    errors,
    exact,
    gradient,
    matched,
    run,
    targets,
    weights_like,
)

B, T, H, K, D = 2, 24, 4, 2, 8
EVERY = (0, 1, 2, 3)


def lower():
    return jnp.tril(jnp.ones((T, T), bool))


def product(q, k):
    return jnp.where(lower(), jnp.einsum("bthd,bshd->bhts", q, k) / 3, -1e30)


def column(sinks, logits):
    return jnp.broadcast_to(sinks[None, :, None, None].astype(logits.dtype), (*logits.shape[:3], 1))


def weigh(weights, v):
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def last(q, k, v, sinks):
    logits = product(q, k)
    return weigh(jax.nn.softmax(jnp.concatenate([logits, column(sinks, logits)], -1))[..., :-1], v)


def first(q, k, v, sinks):
    logits = product(q, k)
    return weigh(jax.nn.softmax(jnp.concatenate([column(sinks, logits), logits], -1))[..., 1:], v)


def transformers(q, k, v, sinks):
    """As eager_attention_forward of transformers' gpt-oss: an additive mask, and the maximum taken off twice."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    logits = (q @ k.swapaxes(2, 3)) * D**-0.5
    logits = logits + jnp.where(lower(), 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    both = jnp.concatenate([logits, column(sinks, logits)], -1)
    both = both - jax.lax.stop_gradient(both.max(-1, keepdims=True))
    return (jax.nn.softmax(both)[..., :-1].astype(v.dtype) @ v).swapaxes(1, 2)


def in_float32(q, k, v, sinks):
    """As OpenAI's gpt-oss in JAX: groups have a dimension of their own, the softmax is in f32."""
    groups = q.shape[2] // k.shape[2]
    logits = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, -1, groups, D), k, preferred_element_type=jnp.float32)
    logits = jnp.where(lower(), logits * D**-0.5, -jnp.inf)
    one = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, -1, groups, 1, 1), (*logits.shape[:4], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, one], -1))[..., :-1].astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(q.shape)


def capped(q, k, v, sinks):
    logits = jnp.where(lower(), 2 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) / 2), -1e30)
    return weigh(jax.nn.softmax(jnp.concatenate([logits, column(sinks, logits)], -1))[..., :-1], v)


def rows_without_a_key(q, k, v, sinks):
    """Their weights are all the sink's."""
    seen = (jnp.arange(T)[:, None] % 3 > 0) & (jnp.arange(T)[None, :] % 2 > 0)
    logits = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, k) / 3, -jnp.inf)
    return weigh(jax.nn.softmax(jnp.concatenate([logits, column(sinks, logits)], -1))[..., :-1], v)


def one_for_all(q, k, v, sinks):
    logits = product(q, k)
    return weigh(jax.nn.softmax(jnp.concatenate([logits, jnp.full((B, H, T, 1), sinks[0])], -1))[..., :-1], v)


def rematerialized(q, k, v, sinks):
    return jax.checkpoint(last)(q, k, v, sinks)


FUNCTIONS = (last, first, transformers, in_float32, capped, rows_without_a_key, one_for_all)
SPELLINGS = {f.__name__: f for f in FUNCTIONS}
GROUPED = (transformers, in_float32)


def arguments(rng, function, dtype=jnp.float32):
    heads = K if function in GROUPED else H
    dims = ((B, T, H, D), (B, T, heads, D), (B, T, heads, D), (H,))
    return [jnp.asarray(rng.standard_normal(d), dtype) for d in dims]


def longer_rows(module):
    """Float arrays with the sink's column."""
    return [
        str(instruction)
        for computation in module.computations()
        for instruction in computation.instructions
        for leaf in leaves(instruction.shape)
        if T + 1 in leaf.dims
    ]


@pytest.mark.parametrize("name", SPELLINGS)
def test_forward(rng, name):
    args = arguments(rng, SPELLINGS[name])
    _, result = matched(SPELLINGS[name], *args)
    assert targets(result.module) == [FORWARD], result.notes
    assert not weights_like(result.module) and not longer_rows(result.module)
    assert "sink=" in result.notes[0]
    assert max(errors(run(result.module, args), exact(SPELLINGS[name], args))) < 2e-6


@pytest.mark.parametrize("name", SPELLINGS)
def test_gradients(rng, name):
    args = arguments(rng, SPELLINGS[name])
    function = gradient(SPELLINGS[name], EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert not weights_like(result.module) and not longer_rows(result.module)
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


@pytest.mark.parametrize("wanted", [(3,), (0,), (1, 3), (2,)], ids=str)
def test_some_gradients(rng, wanted):
    args = arguments(rng, last)
    function = gradient(last, wanted)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


def test_rematerialized(rng):
    args = arguments(rng, last)
    function = gradient(rematerialized, EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", ["last", "transformers", "in_float32"])
def test_half_types_are_as_close_as_the_program(rng, name, dtype):
    args = arguments(rng, SPELLINGS[name], dtype)
    function = gradient(SPELLINGS[name], EVERY)
    module, result = matched(function, *args)
    assert_as_close_as_the_program(function, args, module, result)


def test_sinks_that_are_no_numbers(rng):
    """-infinity is no sink, +infinity and NaN leave nothing of a row."""
    args = [np.array(a) for a in arguments(rng, last)]
    args[3][:] = [-np.inf, np.inf, np.nan, 80]
    _, result = matched(last, *args)
    assert targets(result.module) == [FORWARD]
    (theirs,) = run_on_xla(hlo_bytes(last, *args), args)
    assert np.isnan(theirs[:, :, 1:3]).all() and np.isfinite(theirs[:, :, ::3]).all()
    assert_same(run(result.module, args)[0], theirs, 2e-6)


def with_its_weight(q, k, v, sinks):
    logits = product(q, k)
    weights = jax.nn.softmax(jnp.concatenate([logits, column(sinks, logits)], -1))
    return weigh(weights[..., :-1], v), weights[..., -1:]


def with_its_value(q, k, v, sinks):
    logits = product(q, k)
    both = jnp.concatenate([logits, column(sinks, logits)], -1)
    return weigh(jax.nn.softmax(both), jnp.concatenate([v, jnp.cos(v[:, :1])], 1))


def instead_of_the_last_key(q, k, v, sinks):
    """The sink's weight meets a value, and the first key's is dropped."""
    logits = product(q, k)
    return weigh(jax.nn.softmax(jnp.concatenate([logits, column(sinks, logits)], -1))[..., 1:], v)


def two_sinks(q, k, v, sinks):
    logits = product(q, k)
    return weigh(
        jax.nn.softmax(jnp.concatenate([logits, column(sinks, logits), column(2 * sinks, logits)], -1))[..., :-2], v
    )


def one_a_query(q, k, v, sinks):
    logits = product(q, k)
    one = jnp.cos(q[:, :, :, :1]).swapaxes(1, 2)
    return weigh(jax.nn.softmax(jnp.concatenate([logits, one], -1))[..., :-1], v)


def scaled_with_the_logits(q, k, v, sinks):
    logits = product(q, k)
    return weigh(jax.nn.softmax(jnp.concatenate([logits, column(sinks, logits)], -1) / 2)[..., :-1], v)


def one_more_query(q, k, v, sinks):
    """A row of logits, not a column."""
    logits = product(q, k)
    row = jnp.broadcast_to(sinks[None, :, None, None], (B, H, 1, T))
    return weigh(jax.nn.softmax(jnp.concatenate([logits, row], 2))[:, :, :-1], v)


def every_second(q, k, v, sinks):
    logits = product(q, k)
    return weigh(jax.nn.softmax(jnp.concatenate([logits, column(sinks, logits)], -1))[..., :-1:2], v[:, ::2])


NEAR_MISSES = {
    with_its_weight: "call does not give",
    with_its_value: "no values are weighted",
    instead_of_the_last_key: "no values are weighted",
    two_sinks: "concatenate .* changes the logits",
    one_a_query: "another one for each query",
    scaled_with_the_logits: "changes the logits",
    one_more_query: "joins logits along another dimension",
    every_second: "no values are weighted",
}


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(rng, function):
    args = arguments(rng, function)
    assert_near_miss(function, args, NEAR_MISSES[function])


def test_another_gradient_of_the_sink_is_not_the_calls(rng):
    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    args = arguments(rng, last)

    def function(q, k, v, sinks):
        logits = product(q, k)
        both = doubled(jnp.concatenate([logits, column(sinks, logits)], -1))
        return weigh(jax.nn.softmax(both)[..., :-1], v)

    module, result = matched(gradient(function, EVERY), *args)
    assert result.module is module
    assert "call does not give" in result.notes[0]
