"""Attention whose hidden weights are set to zero, as softmax's ``where`` does: a row that sees no key gives zeros and
has no gradients. It is one call each way beside a choice of rows; dense float64, written out here, is the oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.opcode import Opcode
from support.matching import assert_as_close, assert_near_miss, errors, matched, run, targets, weights_like

B, T, K, G, D, E = 2, 24, 2, 2, 8, 6  # weights_like looks for two dimensions of 24
H = K * G


def oracle(q, k, v, g, visible, bias=0.0, cap=None):
    """Output and gradients of query, key and value; ``visible`` and ``bias`` over [B, H, T, S]."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    groups = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, groups, 2) for x in (k, v))
    logits = np.einsum("bthd,bshd->bhts", q, keys) / 3
    slope = 1.0
    if cap is not None:
        slope = 1 - np.tanh(logits / cap) ** 2
        logits = cap * np.tanh(logits / cap)
    visible = np.broadcast_to(visible, logits.shape)
    logits = np.where(visible, logits + np.asarray(bias, np.float64), -np.inf)
    greatest = logits.max(-1, keepdims=True)
    exponentials = np.where(visible, np.exp(logits - np.where(np.isfinite(greatest), greatest, 0)), 0)
    weights = exponentials / np.maximum(exponentials.sum(-1, keepdims=True), 1e-300)
    of_weights = np.einsum("bthe,bshe->bhts", g, values)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True)) * slope / 3
    of_keys = np.einsum("bhts,bthd->bshd", of_logits, q)
    of_values = np.einsum("bhts,bthe->bshe", weights, g)
    shared = [x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3) for x in (of_keys, of_values)]
    return [
        np.einsum("bhts,bshe->bthe", weights, values),
        np.einsum("bhts,bshd->bthd", of_logits, keys),
        *shared,
    ]


def where(logits, mask):
    return jax.nn.softmax(logits, where=mask)


def after(logits, mask, fill=-1e30):
    return jnp.where(mask, jax.nn.softmax(jnp.where(mask, logits, fill)), 0)


def written_out(logits, mask):
    logits = jnp.where(mask, logits, -jnp.inf)
    exponentials = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    exponentials = jnp.where(mask, exponentials, 0)
    return jnp.where(mask, exponentials / exponentials.sum(-1, keepdims=True), 0)


def chosen_last(logits, mask):
    """The choice is the other way around, and the maximum has a gradient."""
    logits = jnp.where(~mask, -1e30, logits)
    exponentials = jnp.exp(logits - logits.max(-1, keepdims=True))
    return jnp.where(~mask, 0, exponentials / exponentials.sum(-1, keepdims=True))


SOFTMAXES = {
    "where": where,
    "after": after,
    "after infinity": partial(after, fill=-jnp.inf),
    "written out": written_out,
    "chosen last": chosen_last,
}


def attend(softmax, change, q, k, v, mask):
    weights = softmax(change(jnp.einsum("bthd,bshd->bhts", q, k) / 3), mask).astype(v.dtype)
    return jnp.einsum("bhts,bshe->bthe", weights, v)


def repeated(softmax, change, q, k, v, mask):
    groups = q.shape[2] // k.shape[2]
    return attend(softmax, change, q, jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2), mask)


def grouped(softmax, change, q, k, v, mask):
    """Groups have a dimension of their own."""
    groups = q.shape[2] // k.shape[2]
    logits = jnp.einsum("btkgd,bskd->bkgts", q.reshape(*q.shape[:2], -1, groups, D), k) / 3
    weights = softmax(change(logits), mask[:, :, None]).astype(v.dtype)
    return jnp.einsum("bkgts,bske->btkge", weights, v).reshape(*q.shape[:3], v.shape[-1])


def same(logits):
    return logits


def draw_arrays(rng, heads=H, queries=T, dtype=jnp.float32):
    dims = ((B, queries, H, D), (B, T, heads, D), (B, T, heads, E), (B, queries, H, E))
    return [jnp.asarray(rng.standard_normal(d), dtype) for d in dims]


def draw_mask(rng, *dims):
    """Some rows see no key, and the second sequence none at all."""
    mask = rng.random(dims) < 0.6
    mask[0, ..., :3, :] = mask[0, ..., :3, :] & (dims[-2] == 1)
    mask[1] = False
    return mask


def with_gradients(function):
    def both(q, k, v, g, *rest):
        output, pullback = jax.vjp(lambda q, k, v: function(q, k, v, *rest), q, k, v)
        return output, *pullback(g)

    return both


def assert_calls(function, args, true, tolerance=2e-6):
    """Forward alone, and with gradients."""
    for whole, calls, wanted in (
        (lambda q, k, v, g, *rest: function(q, k, v, *rest), [FORWARD], true[:1]),
        (with_gradients(function), [FORWARD, BACKWARD], true),
    ):
        _, result = matched(whole, *args)
        assert targets(result.module) == calls, result.notes
        assert "zero where a row sees no key" in result.notes[0]
        assert not weights_like(result.module)
        assert max(errors(run(result.module, args), wanted)) < tolerance


@pytest.mark.parametrize("name", SOFTMAXES)
def test_spellings(rng, name):
    args = [*draw_arrays(rng), draw_mask(rng, B, 1, T, T)]
    assert_calls(partial(attend, SOFTMAXES[name], same), args, oracle(*args))


def test_the_derivative_that_jax_has_of_its_own(rng):
    args = [*draw_arrays(rng), draw_mask(rng, B, 1, T, T)]
    before = jax.config.jax_softmax_custom_jvp
    jax.config.update("jax_softmax_custom_jvp", not before)
    try:
        assert_calls(partial(attend, where, same), args, oracle(*args))
    finally:
        jax.config.update("jax_softmax_custom_jvp", before)


MASKS = {
    "of each head": (B, H, T, T),
    "of keys": (B, 1, 1, T),
    "of queries": (B, 1, T, 1),
    "of sequences": (B, 1, 1, 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(rng, name):
    args = [*draw_arrays(rng), draw_mask(rng, *MASKS[name])]
    if name == "of sequences":
        args[-1][0] = True

    def function(q, k, v, mask):
        return attend(where, same, q, k, v, jnp.broadcast_to(mask, (B, H, T, T)))

    assert_calls(function, args, oracle(*args))


BANDS = {"causal": (0, None), "window": (1, 4), "late": (-2, None), "early": (None, -3)}


@pytest.mark.parametrize("name", BANDS)
def test_bands_and_padding(rng, name):
    """Of the keys that a band leaves a row a mask may hide all."""
    upper, lower = BANDS[name]
    args = [*draw_arrays(rng), draw_mask(rng, B, 1, 1, T)]
    args[-1][0, ..., :4] = False
    ahead = np.arange(T) - np.arange(T)[:, None]
    inside = (ahead <= (T if upper is None else upper)) & (ahead >= -(T if lower is None else lower))

    def function(q, k, v, mask):
        t, s = jnp.arange(T)[:, None], jnp.arange(T)
        band = True if upper is None else s <= t + upper
        band = band if lower is None else band & (s >= t - lower)
        return attend(where, same, q, k, v, mask & band)

    true = oracle(*args[:-1], args[-1] & inside)
    assert_calls(function, args, true)
    _, result = matched(function, *args[:3], args[-1])
    assert ("upper=" in result.notes[0] or "lower=" in result.notes[0]) is (name in ("causal", "window"))


@pytest.mark.parametrize("name", ["late", "early"])
def test_a_band_alone_that_leaves_rows_no_key(rng, name):
    upper, lower = BANDS[name]
    args = draw_arrays(rng)
    ahead = np.arange(T) - np.arange(T)[:, None]
    inside = ahead <= upper if lower is None else ahead >= -lower

    def function(q, k, v):
        ahead = jnp.arange(T) - jnp.arange(T)[:, None]
        return attend(where, same, q, k, v, ahead <= upper if lower is None else ahead >= -lower)

    assert_calls(function, args, oracle(*args, inside))


def test_a_band_that_leaves_every_row_a_key_needs_no_choice_of_rows(rng):
    args = draw_arrays(rng)
    causal = np.tril(np.ones((T, T), bool))

    def function(q, k, v):
        return attend(where, same, q, k, v, jnp.tril(jnp.ones((T, T), bool)))

    _, result = matched(with_gradients(function), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert "upper=0" in result.notes[0] and "mask" not in result.notes[0] and "no key" not in result.notes[0]
    assert Opcode.SELECT not in {i.opcode for i in result.module.entry.instructions}
    assert max(errors(run(result.module, args), oracle(*args, causal))) < 2e-6


def test_weights_over_the_sum_of_those_that_are_left_are_a_softmax_where_every_row_sees_a_key(rng):
    args = draw_arrays(rng)
    causal = np.tril(np.ones((T, T), bool))

    def function(q, k, v):
        return attend(zero_over_zero, same, q, k, v, jnp.tril(jnp.ones((T, T), bool)))

    _, result = matched(with_gradients(function), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert "upper=0" in result.notes[0] and "mask" not in result.notes[0]
    assert max(errors(run(result.module, args), oracle(*args, causal))) < 2e-6


def test_two_masks(rng):
    """A row whose keys one of two masks hides each; only together they leave it none."""
    first, second = rng.random((B, 1, T, T)) < 0.5, rng.random((B, H, 1, T)) < 0.5
    first[0, 0, 5], second[1, 2] = ~second[0, 1, 0], False
    args = [*draw_arrays(rng), first, second]

    def function(q, k, v, first, second):
        def softmax(logits, _):
            return where(jnp.where(first, logits, -jnp.inf), second)

        def again(logits, _):
            return jnp.where(first, softmax(logits, None), 0)

        return attend(again, same, q, k, v, None)

    assert_calls(function, args, oracle(*args[:4], first & second))


@pytest.mark.parametrize("form", [repeated, grouped])
def test_groups(rng, form):
    args = [*draw_arrays(rng, heads=K), draw_mask(rng, B, 1, T, T)]
    assert_calls(partial(form, where, same), args, oracle(*args))
    _, result = matched(with_gradients(partial(form, where, same)), *args)
    forward = next(i for i in result.module.entry.instructions if getattr(i.attributes, "target", "") == FORWARD)
    assert [operand.shape.dims for operand in forward.operands[1:3]] == [(B, T, K, D), (B, T, K, E)]


@pytest.mark.parametrize("softmax", [where, partial(after, fill=-jnp.inf)])
def test_a_bias(rng, softmax):
    """Also one of -infinity: at visible keys, and in a row of which the mask hides every key."""
    bias = rng.standard_normal((B, H, T, T)).astype(np.float32)
    args = [*draw_arrays(rng), draw_mask(rng, B, 1, T, T), bias]
    args[-2][0, 0, 7, :2] = True
    bias[0, :, 7, 0], bias[1, :, 3] = -np.inf, -np.inf

    def function(q, k, v, mask, bias):
        return attend(softmax, lambda x: x + bias, q, k, v, mask)

    true = oracle(*args)
    for whole, calls, wanted in (
        (lambda q, k, v, g, *rest: function(q, k, v, *rest), [FORWARD], true[:1]),
        (with_gradients(function), [FORWARD, BACKWARD], true),
    ):
        _, result = matched(whole, *args)
        assert targets(result.module) == calls, result.notes
        assert max(errors(run(result.module, args), wanted)) < 2e-6


def test_a_cap(rng):
    args = [*draw_arrays(rng), draw_mask(rng, B, 1, T, T)]
    true = oracle(*args, cap=1.5)
    assert_calls(partial(attend, where, lambda x: 1.5 * jnp.tanh(x / 1.5)), args, true)


def test_one_query(rng):
    args = [*draw_arrays(rng, heads=K, queries=1), draw_mask(rng, B, 1, 1, T)]
    assert_calls(partial(grouped, where, same), args, oracle(*args))


def test_float64(rng):
    with jax.enable_x64(True):
        args = [*draw_arrays(rng, dtype=jnp.float64), draw_mask(rng, B, 1, T, T)]
        assert_calls(partial(attend, where, same), args, oracle(*args), tolerance=1e-14)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("form", [attend, repeated])
def test_half_types(rng, dtype, form):
    """Programs round weights and products where the calls do not: these are as close to the truth."""
    heads = H if form is attend else K
    args = [*draw_arrays(rng, heads=heads, dtype=dtype), draw_mask(rng, B, 1, T, T)]
    module, result = matched(with_gradients(partial(form, where, same)), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert_as_close(run(result.module, args), run(module, args), oracle(*args))
    assert not np.asarray(run(result.module, args)[0][1], np.float64).any()


@pytest.mark.parametrize("arguments", [(0,), (1,), (1, 2)])
def test_some_gradients(rng, arguments):
    """Alone: the program has no use for the output."""
    args = [*draw_arrays(rng), draw_mask(rng, B, 1, T, T)]

    def function(q, k, v, g, mask):
        gradients = jax.vjp(lambda *arrays: attend(where, same, *arrays, mask), q, k, v)[1](g)
        return tuple(gradients[i] for i in arguments)

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    true = oracle(*args)[1:]
    assert max(errors(run(result.module, args), [true[i] for i in arguments])) < 2e-6


def test_rematerialized(rng):
    args = [*draw_arrays(rng), draw_mask(rng, B, 1, T, T)]
    _, result = matched(with_gradients(jax.checkpoint(partial(attend, where, same))), *args)
    assert targets(result.module) == [FORWARD, FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), oracle(*args))) < 2e-6


def zero_over_zero(logits, mask):
    """The weights of a row that sees no key are NaN."""
    hidden = jnp.where(mask, logits, -jnp.inf)
    exponentials = jnp.where(mask, jnp.exp(hidden - hidden.max(-1, keepdims=True)), 0)
    return exponentials / exponentials.sum(-1, keepdims=True)


def other_mask(logits, mask):
    return jnp.where(jnp.roll(mask, 1, -1), jax.nn.softmax(jnp.where(mask, logits, -1e30)), 0)


def beside_a_sink(logits, mask):
    hidden = jnp.where(mask, logits, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([hidden, jnp.zeros((*logits.shape[:3], 1))], -1))[..., :-1]
    return jnp.where(mask, weights, 0)


def low_bias(logits, mask):
    return after(logits + jnp.where(jnp.arange(T) < 3, -1e30, 0) * mask[..., :1], mask, fill=-1e30)


NEAR_MISSES = {
    "zero over zero": (zero_over_zero, "set to zero in one place and not in another"),
    "a fill that counts": (partial(after, fill=-50.0), "set to zero, though hidden logits are -50"),
    "another mask": (other_mask, "no values are weighted"),
    "a sink": (beside_a_sink, "set to zero beside a sink"),
    "a bias that hides": (low_bias, "a bias may hide as much as the mask"),
}


@pytest.mark.parametrize("differentiate", [False, True])
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(rng, name, differentiate):
    softmax, reason = NEAR_MISSES[name]
    function = partial(attend, softmax, same)
    args = [*draw_arrays(rng), draw_mask(rng, B, 1, T, T)]
    if differentiate:
        assert_near_miss(with_gradients(function), args, reason)
    else:
        assert_near_miss(lambda q, k, v, g, mask: function(q, k, v, mask), args, reason)
