"""Attention that looks at its logits for rows of -infinity alone and gives these weights of zero, as PyTorch's
``scaled_dot_product_attention`` does with a mask that is added. NumPy's float64, written out here, is the oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from programs import hlo_bytes, run_on_xla
from support.biases import B, D, H, K, T, lower, product
from support.matching import assert_as_close, assert_near_miss, errors, matched, run, targets


def oracle(q, k, v, bias, g, slope=1.0):
    """Output, and gradients of all arguments but g; ``bias`` over [B or 1, H, T, T]."""
    q, k, v, bias, g = (np.asarray(x, np.float64) for x in (q, k, v, bias, g))
    groups = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, groups, 2) for x in (k, v))
    logits = np.einsum("bthd,bshd->bhts", q, keys) / 3 + bias
    greatest = logits.max(-1, keepdims=True)
    exponentials = np.exp(logits - np.where(greatest > -np.inf, greatest, 0))
    weights = exponentials / np.maximum(exponentials.sum(-1, keepdims=True), 1e-300)
    of_weights = np.einsum("bthd,bshd->bhts", g, values)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    of_keys = np.einsum("bhts,bthd->bshd", of_logits, q) / 3
    of_values = np.einsum("bhts,bthd->bshd", weights, g)
    shared = [x.reshape(B, T, -1, groups, D).sum(3) for x in (of_keys, of_values)]
    return [
        np.einsum("bhts,bshd->bthd", weights, values),
        np.einsum("bhts,bshd->bthd", of_logits, keys) / 3,
        *shared,
        of_logits.sum(0, keepdims=True) if bias.shape[0] == 1 else of_logits,
    ]


def softmax(logits):
    exponentials = jnp.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def all_infinite(logits):
    return jnp.where((logits == -jnp.inf).all(-1, keepdims=True), 0, softmax(logits))


def none_finite(logits):
    return jnp.where((logits != -jnp.inf).any(-1, keepdims=True), softmax(logits), 0)


def by_the_maximum(logits):
    return jnp.where(logits.max(-1, keepdims=True) == -jnp.inf, 0, softmax(logits))


SPELLINGS = {"all": all_infinite, "any": none_finite, "by the maximum": by_the_maximum}


def safe(spelling):
    """Its gradient is made of its result, as PyTorch's is."""

    @jax.custom_vjp
    def function(logits):
        return spelling(logits)

    def backward(weights, g):
        return (weights * g - weights * (weights * g).sum(-1, keepdims=True),)

    function.defvjp(lambda logits: (weights := function(logits), weights), backward)
    return function


def attend(weigh, q, k, v, bias):
    return jnp.einsum("bhts,bshd->bthd", weigh(product(q, k) + bias).astype(v.dtype), v)


def repeated(weigh, q, k, v, bias):
    groups = q.shape[2] // k.shape[2]
    return attend(weigh, q, jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2), bias)


def with_gradients(function):
    def both(q, k, v, bias, g):
        output, pullback = jax.vjp(function, q, k, v, bias)
        return output, *pullback(g)

    return both


def draw(rng, batches=1, heads=H, dtype=jnp.float32):
    """Biases of -infinity here and there, in some rows everywhere, of the second batch in most."""
    q, k, v, g = (rng.standard_normal((B, T, n, D)) for n in (H, heads, heads, H))
    bias = rng.standard_normal((batches, H, T, T))
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[:, :, rng.random(T) < 0.3] = -np.inf
    bias[-1, 1, 2:] = -np.inf
    return [jnp.asarray(x, dtype) for x in (q, k, v, bias, g)]


def assert_calls(function, args, true, tolerance=2e-6):
    """Forward alone, and with gradients."""
    for whole, calls, wanted in (
        (lambda q, k, v, bias, g: function(q, k, v, bias), [FORWARD], true[:1]),
        (with_gradients(function), [FORWARD, BACKWARD], true),
    ):
        _, result = matched(whole, *args)
        assert targets(result.module) == calls, result.notes
        assert "zero where every logit is -infinity" in result.notes[0]
        ours = run(result.module, args)
        assert max(errors(ours, wanted)) < tolerance
        fully_masked = np.asarray(args[3] == -np.inf).all(-1)
        assert fully_masked.any() and not ours[0].swapaxes(1, 2)[np.broadcast_to(fully_masked, (B, H, T))].any()


@pytest.mark.parametrize("batches", [1, B])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(rng, name, batches):
    args = draw(rng, batches)
    assert_calls(partial(attend, safe(SPELLINGS[name])), args, oracle(*args))


def test_groups(rng):
    args = draw(rng, heads=K)
    assert_calls(partial(repeated, safe(all_infinite)), args, oracle(*args))


def test_causal(rng):
    """What a band leaves a row a bias may hide."""
    args = draw(rng)
    true = oracle(*args[:3], np.where(np.tril(np.ones((T, T), bool)), args[3], -np.inf), args[4])

    def function(q, k, v, bias):
        weights = safe(all_infinite)(jnp.where(lower(), product(q, k) + bias, -jnp.inf))
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    _, result = matched(with_gradients(function), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert "upper=0" in result.notes[0]
    assert max(errors(run(result.module, args), true)) < 2e-6


def test_a_mask(rng):
    args = draw(rng)
    kept = rng.random((B, 1, T, T)) < 0.6
    kept[0, :, 3] = False
    whole = np.where(kept, np.asarray(args[3], np.float64), -np.inf)
    true = oracle(*args[:3], whole, args[4])
    true[-1] = true[-1].sum(0, keepdims=True)

    def function(q, k, v, bias):
        weights = safe(all_infinite)(jnp.where(kept, product(q, k) + bias, -jnp.inf))
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    _, result = matched(with_gradients(function), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert "mask=" in result.notes[0]
    assert max(errors(run(result.module, args), true)) < 2e-6


def test_float64(rng):
    with jax.enable_x64(True):
        args = draw(rng, dtype=jnp.float64)
        assert_calls(partial(attend, safe(all_infinite)), args, oracle(*args), tolerance=1e-14)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_types(rng, dtype):
    """Programs round weights and products where the calls do not: these are as close to the truth."""
    args = draw(rng, dtype=dtype)
    module, result = matched(with_gradients(partial(attend, safe(all_infinite))), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert_as_close(run(result.module, args), run(module, args), oracle(*args))


@pytest.mark.parametrize("place", range(5), ids=["q", "k", "v", "bias", "g"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_none(rng, place, number):
    """The program has NaN where the calls have, and no row of -infinity is one beside a NaN."""
    args = [np.array(a) for a in draw(rng)]
    args[place][tuple(int(rng.integers(size)) for size in args[place].shape)] = number
    function = with_gradients(partial(attend, safe(all_infinite)))
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    for ours, program in zip(run(result.module, args), run_on_xla(hlo_bytes(function, *args), args), strict=True):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(program))
        both = np.isfinite(ours)
        assert np.abs(ours[both] - program[both]).max() < 1e-4


def test_a_bias_of_rows(rng):
    """The same for all keys: its gradient is zero, also of rows that it makes -infinity."""
    args = draw(rng)
    args[3] = args[3][..., :1]
    _, result = matched(with_gradients(partial(attend, safe(all_infinite))), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    whole = [*args[:3], np.broadcast_to(np.asarray(args[3]), (1, H, T, T)), args[4]]
    ours, true = run(result.module, args), oracle(*whole)
    assert max(errors(ours[:-1], true[:-1])) < 2e-6
    assert not ours[-1].any() and np.abs(true[-1].sum(-1)).max() < 1e-9


def other_logits(logits):
    return jnp.where((jnp.abs(logits) == jnp.inf).all(-1, keepdims=True), 0, softmax(logits))


def another_number(logits):
    return jnp.where((logits == jnp.finfo(jnp.float32).min).all(-1, keepdims=True), 0, softmax(logits))


def any_infinite(logits):
    """Rows of which one logit is -infinity."""
    return jnp.where((logits == -jnp.inf).any(-1, keepdims=True), 0, softmax(logits))


def along_queries(logits):
    return jnp.where((logits == -jnp.inf).all(-2, keepdims=True), 0, softmax(logits))


def filled_otherwise(logits):
    return jnp.where((logits == -jnp.inf).all(-1, keepdims=True), 1 / T, softmax(logits))


def beside_a_sink(logits):
    whole = jnp.concatenate([logits, jnp.zeros((*logits.shape[:3], 1))], -1)
    return jnp.where((whole == -jnp.inf).all(-1, keepdims=True), 0, softmax(whole))[..., :-1]


NEAR_MISSES = {
    "other logits": other_logits,
    "another number": another_number,
    "any": any_infinite,
    "along queries": along_queries,
    "filled otherwise": filled_otherwise,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(rng, name):
    function = partial(attend, NEAR_MISSES[name])
    assert_near_miss(lambda q, k, v, bias, g: function(q, k, v, bias), draw(rng), "no values are weighted")


def test_a_sink_is_a_near_miss(rng):
    function = partial(attend, beside_a_sink)
    assert_near_miss(lambda q, k, v, bias, g: function(q, k, v, bias), draw(rng), "is -infinity, beside a sink")


def test_a_gradient_that_is_not_set_to_zero(rng):
    """JAX's own is NaN in such rows, as zero times NaN is."""
    function = with_gradients(partial(attend, all_infinite))
    args = draw(rng)
    assert_near_miss(function, args, "no values|in one place and not in another|call does not give")
    module, _ = matched(function, *args)
    assert np.isnan(run(module, args)[1]).any()
