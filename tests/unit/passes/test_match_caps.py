"""Attention whose logits have a soft cap before their mask is one call, and its gradients are one; against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
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
CAP = 1.25  # low enough for logits of random arguments to meet it


def lower():
    return jnp.tril(jnp.ones((T, T), bool))


def weighted(logits, v):
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)


def product(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k)


def gemma(q, k, v):
    """As Gemma 2 in Flax."""
    groups = q.shape[2] // k.shape[2]
    logits = jnp.einsum("btkgd,bskd->btkgs", (q / np.sqrt(D)).reshape(B, T, -1, groups, D), k)
    logits = jnp.tanh(logits / CAP) * CAP
    weights = jax.nn.softmax(jnp.where(lower()[None, :, None, None], logits, -2.3819763e38)).astype(k.dtype)
    return jnp.einsum("btkgs,bskd->btkgd", weights, v).reshape(q.shape)


def transformers(q, k, v):
    """As eager_attention_forward of transformers' Gemma 2: an additive mask, softmax in f32."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    logits = (q @ k.swapaxes(2, 3)) * D**-0.5
    logits = jnp.tanh(logits / CAP) * CAP
    logits = logits + jnp.where(lower(), 0, jnp.finfo(q.dtype).min).astype(q.dtype)
    return (jax.nn.softmax(logits.astype(jnp.float32)).astype(q.dtype) @ v).swapaxes(1, 2)


def no_mask(q, k, v):
    return weighted(CAP * jnp.tanh(product(q, k) * (1 / CAP)), v)


def other_slope(q, k, v):
    """The cap is another number than what the logits are divided by."""
    return weighted(3 * jnp.tanh(product(q, k) / CAP), v)


def negative(q, k, v):
    return weighted(-CAP * jnp.tanh(product(q, k) / CAP), v)


def scaled_after(q, k, v):
    return weighted(jnp.where(lower(), jnp.tanh(product(q, k) / CAP), -1e30) * CAP / 2, v)


def window(q, k, v):
    seen = lower() & ~jnp.tril(jnp.ones((T, T), bool), -5)
    return weighted(jnp.where(seen, jnp.tanh(product(q, k) / CAP) * CAP, -jnp.inf), v)


@jax.custom_vjp
def tanh(x):
    return jnp.tanh(x)


def torch_gradient(h, g):
    return (g * (1 - h * h),)


tanh.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), torch_gradient)


def torch_derivative(q, k, v):
    """As PyTorch writes tanh's derivative."""
    return weighted(jnp.where(lower(), tanh(product(q, k) / CAP) * CAP, -1e30), v)


def rematerialized(q, k, v):
    return jax.checkpoint(window)(q, k, v)


def with_bias(q, k, v):
    return weighted(jnp.tanh(product(q, k) / CAP) * CAP + jnp.cos(q[:, :, :, :1]).swapaxes(1, 2), v)


SPELLINGS = {
    f.__name__: f
    for f in (gemma, transformers, no_mask, other_slope, negative, scaled_after, window, torch_derivative, with_bias)
}
GROUPED = (gemma, transformers)


def arguments(rng, function, dtype=jnp.float32):
    heads = K if function in GROUPED else H
    return [jnp.asarray(rng.standard_normal(d), dtype) for d in ((B, T, H, D), (B, T, heads, D), (B, T, heads, D))]


@pytest.mark.parametrize("name", SPELLINGS)
def test_forward(rng, name):
    args = arguments(rng, SPELLINGS[name])
    _, result = matched(SPELLINGS[name], *args)
    assert targets(result.module) == [FORWARD], result.notes
    assert not weights_like(result.module)
    assert "cap=" in result.notes[0]
    assert max(errors(run(result.module, args), exact(SPELLINGS[name], args))) < 2e-6


@pytest.mark.parametrize("name", [name for name in SPELLINGS if name != "with_bias"])
def test_gradients(rng, name):
    args = arguments(rng, SPELLINGS[name])
    function = gradient(SPELLINGS[name])
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert not weights_like(result.module)
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


def test_rematerialized(rng):
    args = arguments(rng, window)
    function = gradient(rematerialized)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", ["gemma", "transformers", "no_mask", "torch_derivative"])
def test_half_types_are_as_close_as_the_program(rng, name, dtype):
    args = arguments(rng, SPELLINGS[name], dtype)
    function = gradient(SPELLINGS[name])
    module, result = matched(function, *args)
    assert_as_close_as_the_program(function, args, module, result)


def test_rows_that_see_no_key(rng):
    args = [*arguments(rng, no_mask), rng.random((B, 1, T, T)) < 0.5]
    args[3][0, 0, 3] = False

    def function(q, k, v, mask):
        return weighted(jnp.where(mask, jnp.tanh(product(q, k) / CAP) * CAP, -1e30), v)

    _, result = matched(gradient(function), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    true = exact(gradient(function), args)
    assert max(errors(run(result.module, args), true)) < 1e-5


def test_infinite_logits_are_the_cap_and_nan_stays(rng):
    args = [np.array(a) for a in arguments(rng, no_mask)]
    args[0][0, 3, 0, 2] = np.inf
    args[0][1, 5, 1, 0] = -np.inf
    args[0][1, 7, 2, 0] = np.nan
    _, result = matched(no_mask, *args)
    assert targets(result.module) == [FORWARD]
    (theirs,) = run_on_xla(hlo_bytes(no_mask, *args), args)
    assert np.isfinite(theirs[0]).all() and np.isnan(theirs).any()
    assert_same(run(result.module, args)[0], theirs, 2e-6)


def after_the_mask(q, k, v):
    return weighted(CAP * jnp.tanh(jnp.where(lower(), product(q, k), -1e30) / CAP), v)


def after_a_bias(q, k, v):
    return weighted(CAP * jnp.tanh(product(q, k) + jnp.cos(jnp.arange(T))), v)


def twice(q, k, v):
    return weighted(CAP * jnp.tanh(jnp.tanh(product(q, k))), v)


def softsign(q, k, v):
    logits = product(q, k)
    return weighted(logits / (1 + jnp.abs(logits) / CAP), v)


def clipped(q, k, v):
    return weighted(jnp.clip(product(q, k), -CAP, CAP), v)


def arctangent(q, k, v):
    return weighted(jnp.arctan(product(q, k)), v)


def learned(q, k, v):
    return weighted(jnp.tanh(product(q, k)) * q[0, 0, 0, 0], v)


def squared(q, k, v):
    return weighted(jnp.tanh(product(q, k)) ** 2, v)


NEAR_MISSES = {
    after_the_mask: "tanh .* caps logits that have a mask",
    after_a_bias: "tanh .* caps logits that have a mask, a bias",
    twice: "tanh .* a cap already",
    softsign: "changes the logits",
    clipped: "changes the logits",
    arctangent: "changes the logits",
    learned: "multiply .* changes the logits",
    squared: "multiply .* is no soft cap",
}


@pytest.mark.parametrize("function", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(rng, function):
    args = arguments(rng, function)
    assert_near_miss(function, args, NEAR_MISSES[function])


OTHER_DERIVATIVES = {
    "none": lambda h, g: (g,),
    "half": lambda h, g: (g * (1 - h),),
    "its square": lambda h, g: (g * (1 - h * h) * (1 - h * h),),
    "of twice the slope": lambda h, g: (2 * g * (1 - h * h),),
}


@pytest.mark.parametrize("name", OTHER_DERIVATIVES)
def test_other_derivatives_are_not_the_calls(rng, name):
    @jax.custom_vjp
    def capped(x):
        return jnp.tanh(x)

    capped.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), OTHER_DERIVATIVES[name])
    args = arguments(rng, no_mask)
    function = gradient(lambda q, k, v: weighted(CAP * capped(product(q, k) / CAP), v), (0,))
    module, result = matched(function, *args)
    assert result.module is module
    assert "call does not give" in result.notes[0]
