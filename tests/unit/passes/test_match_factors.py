"""Logits times an array that is the same for all keys, a temperature that is learned for each head say, are those of
queries times it; its gradient is made of theirs. Dense float64, written out here, is the oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from support.matching import assert_as_close, assert_near_miss, errors, matched, run, targets, weights_like

B, T, K, G, D, E = 2, 24, 2, 2, 8, 6  # weights_like looks for two dimensions of 24
H = K * G


def oracle(q, k, v, g, factor, visible=True, bias=0.0, cap=None, divides=False):
    """Output and gradients of query, key, value and factor, which is over [B, H, T, S] with sizes of one."""
    q, k, v, g, factor = (np.asarray(x, np.float64) for x in (q, k, v, g, factor))
    groups = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, groups, 2) for x in (k, v))
    products = np.einsum("bthd,bshd->bhts", q, keys) / 3
    used = 1 / factor if divides else factor
    logits, slope = products * used, 1.0
    if cap is not None:
        slope = 1 - np.tanh(logits / cap) ** 2
        logits = cap * np.tanh(logits / cap)
    logits = np.where(visible, logits + np.asarray(bias, np.float64), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("bthe,bshe->bhts", g, values)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * slope
    of_keys = np.einsum("bhts,bthd->bshd", of_logits * used, q) / 3
    of_values = np.einsum("bhts,bthe->bshe", weights, g)
    of_factor = of_logits * products * (-1 / factor**2 if divides else 1)
    reduced = tuple(d for d in range(4) if factor.shape[d] == 1)
    return [
        np.einsum("bhts,bshe->bthe", weights, values),
        np.einsum("bhts,bshd->bthd", of_logits * used, keys) / 3,
        *(x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3) for x in (of_keys, of_values)),
        of_factor.sum(reduced, keepdims=True),
    ]


def attend(change, q, k, v, factor):
    weights = jax.nn.softmax(change(jnp.einsum("bthd,bshd->bhts", q, k) / 3, factor)).astype(v.dtype)
    return jnp.einsum("bhts,bshe->bthe", weights, v)


def repeated(change, q, k, v, factor):
    groups = q.shape[2] // k.shape[2]
    return attend(change, q, jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2), factor)


def grouped(change, q, k, v, factor):
    """Groups have a dimension of their own."""
    groups = q.shape[2] // k.shape[2]
    logits = jnp.einsum("btkgd,bskd->bkgts", q.reshape(*q.shape[:2], -1, groups, D), k) / 3
    weights = jax.nn.softmax(change(logits, factor.reshape(-1, groups, 1, 1)))
    return jnp.einsum("bkgts,bske->btkge", weights, v).reshape(*q.shape[:3], v.shape[-1])


def lower():
    return jnp.tril(jnp.ones((T, T), bool))


def times(x, factor):
    return x * factor


def draw_arrays(rng, heads=H, factor=(1, H, 1, 1), dtype=jnp.float32):
    dims = ((B, T, H, D), (B, T, heads, D), (B, T, heads, E), (B, T, H, E))
    arrays = [rng.standard_normal(d) for d in dims]
    return [jnp.asarray(x, dtype) for x in (*arrays, rng.uniform(0.5, 3, factor))]


def with_gradients(function):
    def both(q, k, v, g, factor):
        output, pullback = jax.vjp(function, q, k, v, factor)
        return output, *pullback(g)

    return both


def assert_calls(function, args, true, tolerance=4e-6, biased=False):
    """Forward alone, and with gradients. The factor's may cancel: its errors are relative to what it sums."""
    summed = float(np.abs(np.asarray(args[0], np.float64) * true[1]).sum()) / true[-1].size
    for whole, calls, wanted in (
        (lambda q, k, v, g, factor: function(q, k, v, factor), [FORWARD], true[:1]),
        (with_gradients(function), [FORWARD, BACKWARD], true),
    ):
        _, result = matched(whole, *args)
        assert targets(result.module) == calls, result.notes
        assert "queries " in result.notes[0]
        assert biased or not weights_like(result.module)
        assert max(errors(run(result.module, args), wanted, [0.0] * 4 + [summed])) < tolerance


FACTORS = {
    "of heads": (1, H, 1, 1),
    "of sequences": (B, 1, 1, 1),
    "of both": (B, H, 1, 1),
    "of queries": (1, 1, T, 1),
    "of all": (1, 1, 1, 1),
    "of rows": (B, H, T, 1),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors(rng, name):
    args = draw_arrays(rng, factor=FACTORS[name])
    assert_calls(partial(attend, times), args, oracle(*args))


@pytest.mark.parametrize("name", ["of heads", "of rows"])
def test_divisors(rng, name):
    args = draw_arrays(rng, factor=FACTORS[name])
    assert_calls(partial(attend, lambda x, f: x / f), args, oracle(*args, divides=True))


def test_vectors(rng):
    args = draw_arrays(rng)
    true = oracle(*args)
    args[-1], true[-1] = args[-1].reshape(H), true[-1].reshape(H)
    assert_calls(partial(attend, lambda x, f: x * f[:, None, None]), args, true)


def test_a_factor_that_the_program_computes(rng):
    """As Swin v2: queries and keys of length one, a logarithm that is clipped."""
    args = draw_arrays(rng)
    args[0], args[1] = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in args[:2])
    true = oracle(*args[:-1], np.exp(np.minimum(np.asarray(args[-1], np.float64), 2.0)))
    true[-1] = true[-1] * np.where(np.asarray(args[-1]) < 2, np.exp(np.asarray(args[-1], np.float64)), 0)
    assert_calls(partial(attend, lambda x, f: x * jnp.exp(jnp.minimum(f, 2.0))), args, true)


CHANGES = {
    "causal": (lambda x, f: jnp.where(lower(), x * f, -1e30), {"visible": np.tril(np.ones((T, T), bool))}),
    "causal, -inf": (lambda x, f: jnp.where(lower(), f * x, -jnp.inf), {"visible": np.tril(np.ones((T, T), bool))}),
    "where": (times, {"visible": np.tril(np.ones((T, T), bool))}),
    "cap": (lambda x, f: 1.5 * jnp.tanh(x * f / 1.5), {"cap": 1.5}),
    "scaled twice": (lambda x, f: x * 2 * f * 0.5, {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_beside_what_else_changes_logits(rng, name):
    change, of = CHANGES[name]
    args = draw_arrays(rng)

    def function(q, k, v, factor):
        if name != "where":
            return attend(change, q, k, v, factor)
        weights = jax.nn.softmax(change(jnp.einsum("bthd,bshd->bhts", q, k) / 3, factor), where=lower())
        return jnp.einsum("bhts,bshe->bthe", weights, v)

    assert_calls(function, args, oracle(*args, **of))


def test_masks_and_biases(rng):
    mask, bias = rng.random((B, 1, T, T)) < 0.6, rng.standard_normal((H, T, T)).astype(np.float32)
    mask[..., 0] = True
    args = draw_arrays(rng)
    true = oracle(*args, visible=mask, bias=bias)
    function = partial(attend, lambda x, f: jnp.where(mask, x * f + bias, -1e30))
    assert_calls(function, args, true, biased=True)


def test_rows_that_see_no_key(rng):
    """They have no weights, so that nothing of them is in the factor's gradient."""
    mask = rng.random((B, 1, T, T)) < 0.6
    mask[..., 0] = True
    args = draw_arrays(rng)
    seen = np.arange(T) % 5 > 0
    kept = [*args[:3], jnp.where(seen[:, None, None], args[3], 0), args[4]]
    true = oracle(*kept, visible=mask)
    true[0] = true[0] * seen[:, None, None]

    def function(q, k, v, factor):
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / 3 * factor
        weights = jax.nn.softmax(logits, where=mask & seen[:, None])
        return jnp.einsum("bhts,bshe->bthe", weights, v)

    assert_calls(function, args, true)


@pytest.mark.parametrize("form", [repeated, grouped])
def test_groups(rng, form):
    args = draw_arrays(rng, heads=K)
    assert_calls(partial(form, times), args, oracle(*args))


def test_two_factors(rng):
    """The gradient of one has the other as a factor."""
    args = draw_arrays(rng)
    other = jnp.asarray(rng.uniform(0.5, 3, (B, 1, T, 1)), jnp.float32)
    true = oracle(*args[:-1], np.float64(args[-1]) * np.float64(other))
    true[-1] = (true[-1] * np.float64(other)).sum((0, 2), keepdims=True)
    assert_calls(partial(attend, lambda x, f: x * f * other), args, true)


def test_one_query(rng):
    args = draw_arrays(rng, heads=K)
    args[0], args[3] = args[0][:, :1], args[3][:, :1]
    assert_calls(partial(grouped, times), args, oracle(*args))


@pytest.mark.parametrize("arguments", [(0,), (3,), (1, 3), (0, 2)])
def test_some_gradients(rng, arguments):
    args = draw_arrays(rng)

    def function(q, k, v, g, factor):
        output, pullback = jax.vjp(partial(attend, times), q, k, v, factor)
        gradients = pullback(g)
        return output, *(gradients[i] for i in arguments)

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert not weights_like(result.module)
    true = oracle(*args)
    assert max(errors(run(result.module, args), [true[0], *(true[1 + i] for i in arguments)])) < 4e-6


def test_float64(rng):
    with jax.enable_x64(True):
        args = draw_arrays(rng, dtype=jnp.float64)
        assert_calls(partial(attend, times), args, oracle(*args), tolerance=1e-13)


@pytest.mark.parametrize("form", [attend, repeated])
def test_bfloat16(rng, form):
    """Queries are rounded with their factor, as the program rounds logits."""
    args = draw_arrays(rng, heads=H if form is attend else K, dtype=jnp.bfloat16)
    module, result = matched(with_gradients(partial(form, times)), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert_as_close(run(result.module, args), run(module, args), oracle(*args))


def wide(q, k, v, factor):
    logits = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * factor
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(logits).astype(v.dtype), v)


NEAR_MISSES = {
    "of keys": (lambda x, f: x * jnp.cos(jnp.arange(T)) * f, jnp.float32, "another number for each key"),
    "over a bias": (lambda x, f: (x + jnp.sin(f)) * f, jnp.float32, "multiply %.* changes the logits"),
    "over a mask": (lambda x, f: jnp.where(lower(), x, -1e30) * f, jnp.float32, "multiply %.* changes the logits"),
    "over a cap": (lambda x, f: jnp.tanh(x) * f, jnp.float32, "multiply %.* changes the logits"),
    "in f16": (times, jnp.float16, "queries of f16 would be rounded"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(rng, name):
    change, dtype, reason = NEAR_MISSES[name]
    args = draw_arrays(rng, dtype=dtype)
    assert_near_miss(lambda q, k, v, g, f: attend(change, q, k, v, f.astype(dtype)), args, reason)


def test_logits_that_are_wider_than_queries(rng):
    args = draw_arrays(rng, dtype=jnp.bfloat16)
    assert_near_miss(lambda q, k, v, g, f: wide(q, k, v, f), args, "queries of bf16 would be rounded")


def test_a_gradient_of_weights_that_is_not_for_all_keys(rng):
    """Dropout's factor is no temperature."""
    args = draw_arrays(rng)

    def function(q, k, v, g, factor):
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * factor)
        return jnp.einsum("bhts,bshe->bthe", weights * factor, v)

    assert_near_miss(function, args, "no values are weighted")
