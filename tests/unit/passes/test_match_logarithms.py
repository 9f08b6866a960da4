"""Weights that are exponentials of log_softmax are those of a softmax; float64 is the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.kernels.attention import BACKWARD, FORWARD
from support.matching import assert_near_miss, errors, exact, matched, run, targets, weights_like

B, T, H, K, D = 2, 24, 4, 2, 8


def lower():
    return jnp.tril(jnp.ones((T, T), bool))


def attend(logarithms, q, k, v, mask, bias, temperature):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    weights = jnp.exp(logarithms(jnp.einsum("bthd,bshd->bhts", q, k) / 3, mask, bias, temperature)).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


LOGITS = {
    "plain": lambda x, mask, bias, temperature: x,
    "causal": lambda x, mask, bias, temperature: jnp.where(lower(), x, -jnp.inf),
    "mask": lambda x, mask, bias, temperature: jnp.where(mask, x, -1e9),
    "mask, bias": lambda x, mask, bias, temperature: jnp.where(mask, x + bias, -1e30),
    "cap": lambda x, mask, bias, temperature: 1.5 * jnp.tanh(x / 1.5),
    "temperature": lambda x, mask, bias, temperature: x * temperature[:, None, None],
}


def arguments(rng, heads, dtype=jnp.float32):
    dims = ((B, T, H, D), (B, T, heads, D), (B, T, heads, D), (B, T, H, D))
    arrays = [jnp.asarray(rng.standard_normal(d), dtype) for d in dims]
    mask = rng.random((B, 1, T, T)) < 0.6
    mask[0, 0, ::5] = False  # rows that see no key
    return [*arrays, mask, jnp.asarray(rng.standard_normal((H, 1, T)), dtype), jnp.asarray(rng.uniform(1, 3, H), dtype)]


def with_gradients(change):
    def both(q, k, v, g, mask, bias, temperature):
        def logarithms(x, *rest):
            return jax.nn.log_softmax(change(x, *rest))

        output, pullback = jax.vjp(lambda *qkv: attend(logarithms, *qkv, mask, bias, temperature), q, k, v)
        return output, *pullback(g)

    return both


def truth(function, args):
    """Numbers in float64, the mask as it is."""
    mask = args[4]
    rest = [a for i, a in enumerate(args) if i != 4]
    return exact(lambda q, k, v, g, bias, temperature: function(q, k, v, g, mask, bias, temperature), rest)


@pytest.mark.parametrize("heads", [H, K])
@pytest.mark.parametrize("name", LOGITS)
def test_spellings(rng, name, heads):
    args = arguments(rng, heads)
    both = with_gradients(LOGITS[name])
    true = truth(both, args)
    for function, calls in ((lambda *args: both(*args)[:1], [FORWARD]), (both, [FORWARD, BACKWARD])):
        _, result = matched(function, *args)
        assert targets(result.module) == calls, result.notes
        assert not weights_like(result.module)
        assert max(errors(run(result.module, args), true[: len(calls) ** 2])) < 4e-6


@pytest.mark.parametrize("name", ["causal", "mask", "temperature"])
def test_bfloat16(rng, name):
    args = arguments(rng, H, jnp.bfloat16)
    function = with_gradients(LOGITS[name])
    module, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    true = truth(function, args)
    ours, program = (errors(run(m, args), true) for m in (result.module, module))
    for error, before in zip(ours, program, strict=True):
        assert error <= 1.5 * before + 0.005


def test_a_sink(rng):
    args = arguments(rng, H)

    def function(q, k, v, g, mask, bias, temperature):
        logits = jnp.where(lower(), jnp.einsum("bthd,bshd->bhts", q, k), -1e30)
        column = jnp.broadcast_to(temperature[:, None, None], (B, H, T, 1))
        weights = jnp.exp(jax.nn.log_softmax(jnp.concatenate([logits, column], -1)))
        return jnp.einsum("bhts,bshd->bthd", weights[..., :-1], v)

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD] and "sink=h" in result.notes[0]
    assert max(errors(run(result.module, args), truth(function, args))) < 4e-6


def maximum_of_logarithms(x):
    """Not zero: what is taken off once more changes the weights."""
    return jax.nn.log_softmax(x) - jax.nn.log_softmax(x).max(-1, keepdims=True)


def flattened(x):
    return jax.nn.log_softmax(x) * 0.5


def of_other_rows(x):
    return x - x.max(-1, keepdims=True) - jnp.log(jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True) + 1)


@pytest.mark.parametrize("change", [maximum_of_logarithms, flattened, of_other_rows])
def test_near_misses(rng, change):
    args = arguments(rng, H)

    def function(q, k, v, g, mask, bias, temperature):
        return attend(lambda x, *rest: change(x), q, k, v, mask, bias, temperature)

    assert_near_miss(function, args, "no values are weighted by the softmax")


def test_a_row_whose_mask_is_infinite_is_no_number(rng):
    args = arguments(rng, H)
    function = with_gradients(lambda x, mask, bias, temperature: jnp.where(mask, x, -jnp.inf))
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    output = run(result.module, args)[0]
    assert np.isnan(output[0, ::5]).all() and np.isfinite(output[1]).all()
    np.testing.assert_array_equal(np.isnan(output), np.isnan(truth(function, args)[0]))
