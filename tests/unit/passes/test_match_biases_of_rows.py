"""The gradient of what is added to the logits of all keys of a row alike is zero: weights add up to one. Programs
compute it as what rounding leaves of that, and as NaN where a row has a NaN; matched, it is the one or the other."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from programs import hlo_bytes, run_on_xla
from support.biases import EVERY, B, D, H, K, T, added, arguments, attend, lower, product, repeated, weigh
from support.matching import assert_near_miss, errors, exact, gradient, matched, run, targets


def grouped(q, k, v, bias):
    """Groups have a dimension of their own."""
    logits = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k) + bias.reshape(B, K, H // K, T, 1)
    return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(logits), v).reshape(q.shape)


def only_seen(q, k, v, bias):
    seen = lower() & (jnp.arange(T)[:, None] % 5 > 0)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(product(q, k) + bias, where=seen), v)


def sometimes_fully_masked(q, k, v, bias, fill=-1e30):
    """Some rows see no key."""
    seen = lower() & (jnp.arange(T)[:, None] % 5 > 0)
    return weigh(jnp.where(seen, product(q, k) + bias, fill), v)


def fully_masked_by_a_sum(q, k, v, bias):
    """A mask that is added has rows that see no key weigh all of them."""
    seen = lower() & (jnp.arange(T)[:, None] % 5 > 0)
    return weigh(product(q, k) + bias + jnp.where(seen, 0, -1e30), v)


def beside_another(q, k, v, bias):
    return weigh(product(q, k) + bias + jnp.cos(jnp.arange(H * T * T)).reshape(H, T, T), v)


def differentiated_maximum(q, k, v, bias):
    logits = product(q, k) + bias
    exponentials = jnp.exp(logits - logits.max(-1, keepdims=True))
    return jnp.einsum("bhts,bshd->bthd", exponentials / exponentials.sum(-1, keepdims=True), v)


ROWS = (B, H, T, 1)
#: What computes it, the bias's dimensions, and heads of keys.
SPELLINGS = {
    "of every row": (added, ROWS, H),
    "of every row, for all heads": (added, (B, 1, T, 1), H),
    "of queries": (added, (T, 1), H),
    "of heads": (added, (H, 1, 1), H),
    "of batches": (added, (B, 1, 1, 1), H),
    "a number": (added, (), H),
    "scaled after": (attend(lambda x, b: (x + b) * 0.3), ROWS, H),
    "subtracted": (attend(lambda x, b: x - b), ROWS, H),
    "causal": (attend(lambda x, b: jnp.where(lower(), x + b, -jnp.inf)), ROWS, H),
    "causal, of heads": (attend(lambda x, b: jnp.where(lower(), x + b, -1e30)), (H, 1, 1), H),
    "cap": (attend(lambda x, b: 1.5 * jnp.tanh(x / 1.5) + b), ROWS, H),
    "temperature": (attend(lambda x, b: x * jnp.cos(jnp.arange(H))[:, None, None] + b), ROWS, H),
    "repeated": (repeated, ROWS, K),
    "repeated, for all heads": (repeated, (B, 1, T, 1), K),
    "grouped": (grouped, ROWS, K),
    "zero where nothing is seen": (only_seen, ROWS, H),
    "some see nothing": (sometimes_fully_masked, ROWS, H),
    "some see nothing, by a sum": (fully_masked_by_a_sum, ROWS, H),
    "beside another": (beside_another, ROWS, H),
    "the maximum has a gradient": (differentiated_maximum, ROWS, H),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_gradients(rng, name):
    function, bias, heads = SPELLINGS[name]
    args = arguments(rng, bias, heads)
    function = gradient(function, EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert "that of a bias for all keys zero" in result.notes[0]
    ours = run(result.module, args)
    assert not ours[-1].any() and ours[-1].shape == bias
    # Float64 has more of a logit left beside -1e30 than float32.
    true = [np.asarray(x, np.float64) for x in jax.tree.leaves(jax.jit(function)(*args))]
    if "by a sum" not in name:
        true = exact(function, args)
    assert np.abs(true[-1]).max() < 1e-5
    assert max(errors(ours, true)) < 1e-5


def test_the_gradient_alone(rng):
    """Nobody reads the output, or any other gradient: there is nothing to compute backwards."""
    args = [*arguments(rng, ROWS), jnp.asarray(rng.standard_normal((B, T, H, D)), jnp.float32)]

    def function(q, k, v, bias, g):
        return jax.vjp(lambda bias: added(q, k, v, bias), bias)[1](g)

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD], result.notes
    assert not run(result.module, args)[0].any()


def test_beside_a_bias_of_keys_that_has_a_gradient(rng):
    args = [*arguments(rng, (H, T, T)), jnp.asarray(rng.standard_normal(ROWS), jnp.float32)]
    function = gradient(lambda q, k, v, one, other: weigh(product(q, k) + one + other, v), (0, 1, 2, 3, 4))
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    ours = run(result.module, args)
    assert not ours[-1].any()
    assert max(errors(ours, exact(function, args))) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_half_types(rng, dtype):
    args = arguments(rng, ROWS, dtype=dtype)
    function = gradient(attend(lambda x, b: jnp.where(lower(), x + b, -1e30 if dtype is jnp.bfloat16 else -6e4)), EVERY)
    if dtype is jnp.float16:
        function = gradient(added, EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    ours = run(result.module, args)
    assert not ours[-1].any()
    for error in errors(ours, exact(function, args)):
        assert error < 0.05


def hidden_before(q, k, v, bias, fill=-jnp.inf):
    """Hidden logits pass on their gradients: in a row that sees no key they are NaN."""
    seen = lower() & (jnp.arange(T)[:, None] % 5 > 0)
    return weigh(jnp.where(seen, product(q, k), fill) + bias, v)


ODD = {
    "nothing hidden": added,
    "causal": attend(lambda x, b: jnp.where(lower(), x + b, -jnp.inf)),
    "only seen": only_seen,
    "some see nothing": sometimes_fully_masked,
    "some see nothing, at all": partial(sometimes_fully_masked, fill=-jnp.inf),
    "hidden before": hidden_before,
}


@pytest.mark.parametrize("dims", [ROWS, (H, 1, 1)], ids=["rows", "heads"])
@pytest.mark.parametrize("place", range(5), ids=["q", "k", "v", "bias", "g"])
@pytest.mark.parametrize("name", ODD)
def test_numbers_that_are_none(rng, name, place, dims):
    """The program's gradient is NaN where that of the match is, and next to zero elsewhere."""
    args = [np.array(a) for a in arguments(rng, dims)]
    args.append(rng.standard_normal((B, T, H, D)).astype(np.float32))
    at = tuple(int(rng.integers(size)) for size in args[place].shape)
    if place in (1, 2):
        at = (at[0], 0, *at[2:])  # what the calls leave out of a row is what it does not see
    args[place][at] = rng.choice([np.nan, np.inf, -np.inf])
    function = ODD[name]

    def differentiated(q, k, v, bias, g):
        return jax.vjp(lambda bias: function(q, k, v, bias), bias)[1](g)

    _, result = matched(differentiated, *args)
    assert targets(result.module) == [FORWARD], result.notes
    (ours,), (program,) = run(result.module, args), run_on_xla(hlo_bytes(differentiated, *args), args)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(program))
    assert not ours[~np.isnan(ours)].any()
    assert np.abs(np.nan_to_num(program)).max() < 1e-3


def with_a_sink(q, k, v, bias):
    """Of which the keys' weights are what is left."""
    logits = product(q, k) + bias
    column = jnp.broadcast_to(jnp.cos(jnp.arange(H, dtype=q.dtype))[None, :, None, None], (B, H, T, 1))
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.concatenate([logits, column], -1))[..., :-1], v)


def low(q, k, v, bias):
    """Hidden keys have weights where the bias hides the others."""
    bias = bias + jnp.where(jnp.arange(T) % 3 == 0, -1e30, 0.0)[:, None]
    return weigh(jnp.where(lower(), product(q, k) + bias, -1e30), v)


NEAR_MISSES = {
    "a sink": (with_a_sink, "needs .* call does not give"),
    "hidden keys have weights": (
        attend(lambda x, b: jnp.where(lower(), x + b, -3.0)),
        "summed over the keys that a row sees, though hidden logits are -3 and have weights",
    ),
    "a bias that hides": (low, "and a bias may hide as much as the mask"),
    "inside a cap": (attend(lambda x, b: 1.5 * jnp.tanh((x + b) / 1.5)), "caps logits that have a mask, a bias"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(rng, name):
    function, reason = NEAR_MISSES[name]
    args = arguments(rng, ROWS)
    function = gradient(function, EVERY)
    assert_near_miss(function, args, reason)
    module, _ = matched(function, *args)
    if name != "a bias that hides":
        true = exact(function, args)
        assert np.abs(true[-1]).max() > 1e-3  # is not zero
        assert max(errors(run(module, args), true)) < 2e-5
