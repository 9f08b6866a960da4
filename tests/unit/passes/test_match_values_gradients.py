"""The values' gradient without the output: the weights' product over queries, for which a program has no values. It is
the backward call's, with values of zero. float64 is the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from programs import hlo_bytes, run_on_xla
from support.matching import assert_as_close, assert_near_miss, errors, exact, matched, run, targets, weights_like
from support.seeds import fresh

B, T, H, K, D = 2, 24, 4, 2, 8
MASK = fresh(__name__).random((B, 1, T, T)) < 0.6
MASK[0, 0, ::5] = False  # rows that see no key


def exponentials(x):
    return jnp.exp(x - x.max(-1, keepdims=True))


WEIGHTS = {
    "softmax": jax.nn.softmax,
    "causal": lambda x: jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), x, -jnp.inf)),
    "mask": lambda x: jax.nn.softmax(jnp.where(MASK, x, -1e9)),
    "where": lambda x: jax.nn.softmax(x, where=MASK),
    "logarithms": lambda x: jnp.exp(jax.nn.log_softmax(x, where=MASK)),
    "cap": lambda x: jax.nn.softmax(1.5 * jnp.tanh(x / 1.5)),
    "bounded": lambda x: exponentials(x) / jnp.maximum(exponentials(x).sum(-1, keepdims=True), 1e-6),
}


def gradient_of_values(weigh):
    def function(q, k, v, g):
        def attend(v):
            keys, values = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (k, v))
            weights = weigh(jnp.einsum("bthd,bshd->bhts", q, keys) / 3)
            return jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), values)

        return jax.vjp(attend, v)[1](g)

    return function


def draw(rng, heads=H, dtype=jnp.float32):
    return [jnp.asarray(rng.standard_normal((B, T, n, D)), dtype) for n in (H, heads, heads, H)]


def assert_called(function, args):
    module, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert not weights_like(result.module)
    return module, result


@pytest.mark.parametrize("heads", [H, K, 1])
@pytest.mark.parametrize("name", WEIGHTS)
def test_spellings(rng, name, heads):
    function, args = gradient_of_values(WEIGHTS[name]), draw(rng, heads)
    _, result = assert_called(function, args)
    assert max(errors(run(result.module, args), exact(function, args))) < 4e-6


def test_heads_that_share_keys(rng):
    """Their gradients are summed by the product itself."""
    q, k, v, g = draw(rng, K)
    args = [q.reshape(B, T, K, H // K, D), k, v, g.reshape(B, T, K, H // K, D)]

    def function(q, k, v, g):
        def attend(v):
            return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k)), v)

        return jax.vjp(attend, v)[1](g)

    _, result = assert_called(function, args)
    assert max(errors(run(result.module, args), exact(function, args))) < 4e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_types(rng, dtype):
    function, args = gradient_of_values(WEIGHTS["where"]), draw(rng, K, dtype)
    module, result = assert_called(function, args)
    assert_as_close(run(result.module, args), run(module, args), exact(function, args))


def test_float64(rng):
    with jax.enable_x64(True):
        function, args = gradient_of_values(WEIGHTS["where"]), draw(rng, dtype=jnp.float64)
        _, result = assert_called(function, args)
        assert max(errors(run(result.module, args), exact(function, args))) < 1e-14


@pytest.mark.parametrize("place", [0, 1, 3], ids=["q", "k", "g"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_none(rng, place, number):
    args = [np.array(a) for a in draw(rng)]
    args[place][tuple(int(rng.integers(size)) for size in args[place].shape)] = number
    function = gradient_of_values(jax.nn.softmax)
    _, result = assert_called(function, args)
    (ours,), (program,) = run(result.module, args), run_on_xla(hlo_bytes(function, *args), args)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(program))
    np.testing.assert_allclose(ours, program, rtol=1e-4, atol=1e-4)


def test_weights_of_rows_that_see_no_key_are_zero(rng):
    function, args = gradient_of_values(WEIGHTS["where"]), draw(rng)
    args[3] = jnp.zeros_like(args[3]).at[0, ::5].set(1)
    _, result = assert_called(function, args)
    assert not run(result.module, args)[0].any()


def squared(x):
    return jax.nn.softmax(x) ** 2


def over_queries(x):
    """Whose product sums over other positions than the softmax."""
    return jax.nn.softmax(x, axis=-2)


def test_other_weights(rng):
    assert_near_miss(gradient_of_values(squared), draw(rng), "no values are weighted")


def test_a_softmax_over_queries(rng):
    """Then queries and keys are each other's, and the product over them is an output."""
    function, args = gradient_of_values(over_queries), draw(rng)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD], result.notes
    assert max(errors(run(result.module, args), exact(function, args))) < 4e-6


def test_a_softmax_over_queries_of_an_output_over_keys(rng):
    """No gradient of anything, but the same product: over the positions that the softmax is not over."""

    def function(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=2)
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    args = draw(rng)[:3]
    _, result = assert_called(function, args)
    assert max(errors(run(result.module, args), exact(function, args))) < 4e-6


def test_weights_that_are_needed_themselves(rng):
    def function(q, k, v, g):
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        return weights, jnp.einsum("bhts,bthd->bshd", weights, g)

    assert_near_miss(function, draw(rng), "which the call does not give|the computation returns")
