"""Values that are weighted with exponentials, and divided by their sum after that; float64 is the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from support.matching import assert_as_close, assert_near_miss, errors, exact, matched, run, targets, weights_like
from support.seeds import fresh

B, T, H, D = 2, 24, 4, 8


def exponentials(x, stops=True):
    peak = jnp.max(x, -1, keepdims=True)
    return jnp.exp(x - (jax.lax.stop_gradient(peak) if stops else peak))


def quotient(e, v):
    """Heads after positions: the sum is another arrangement of rows than the product's."""
    total = jnp.sum(e.astype(jnp.float32), -1).transpose(0, 2, 1)[..., None]
    return jnp.einsum("bhts,bshd->bthd", e.astype(v.dtype), v) / total.astype(v.dtype)


def reciprocal(e, v):
    return (1 / jnp.sum(e, -1)).transpose(0, 2, 1)[..., None] * jnp.einsum("bhts,bshd->bthd", e, v)


def ones_column(e, v):
    """The sum by a matrix product, as some kernels have it: not seen as one, and so no quotient by it."""
    both = jnp.einsum("bhts,bshd->bthd", e, jnp.concatenate([v, jnp.ones_like(v[..., :1])], -1))
    return both[..., :-1] / both[..., -1:]


MASK = fresh(__name__).random((B, 1, T, T)) < 0.6
MASK[0, 0, ::5] = False  # rows that see no key
LOGITS = {
    "plain": lambda x, bias, temperature: x,
    "causal": lambda x, bias, temperature: jnp.where(jnp.tril(jnp.ones((T, T), bool)), x, -jnp.inf),
    "mask": lambda x, bias, temperature: jnp.where(MASK, x, -1e9),
    "mask, bias": lambda x, bias, temperature: jnp.where(MASK, x + bias, -1e30),
    "cap": lambda x, bias, temperature: 1.5 * jnp.tanh(x / 1.5),
    "temperature": lambda x, bias, temperature: x * temperature[:, None, None],
}


def arguments(rng, dtype=jnp.float32, heads=H, channels=D):
    dims = ((B, T, H, D), (B, T, heads, D), (B, T, heads, channels), (B, T, H, channels), (H, 1, T))
    return [*(jnp.asarray(rng.standard_normal(d), dtype) for d in dims), jnp.asarray(rng.uniform(1, 3, H), dtype)]


def with_gradients(change, divided=quotient, stops=True):
    def both(q, k, v, g, bias, temperature):
        def attend(q, k, v):
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
            logits = change(jnp.einsum("bthd,bshd->bhts", q, k) / 3, bias, temperature)
            return divided(exponentials(logits, stops), v)

        output, pullback = jax.vjp(attend, q, k, v)
        return output, *pullback(g)

    return both


def assert_matched(function, args):
    """The output alone, and with gradients."""
    true = exact(function, args)
    for called, calls in ((lambda *args: function(*args)[:1], [FORWARD]), (function, [FORWARD, BACKWARD])):
        _, result = matched(called, *args)
        assert targets(result.module) == calls, result.notes
        assert not weights_like(result.module)
        assert max(errors(run(result.module, args), true[: len(calls) ** 2])) < 4e-6


@pytest.mark.parametrize("heads", [H, 2])
@pytest.mark.parametrize("name", LOGITS)
def test_spellings(rng, name, heads):
    assert_matched(with_gradients(LOGITS[name]), arguments(rng, heads=heads))


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("divided", [quotient, reciprocal])
def test_other_spellings(rng, divided, stops):
    assert_matched(with_gradients(LOGITS["causal"], divided, stops), arguments(rng))


def test_as_many_channels_as_keys(rng):
    """Sizes do not tell an array over keys from one over channels."""
    function, args = with_gradients(LOGITS["causal"]), arguments(rng, channels=T)
    true = exact(function, args)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), true)) < 4e-6


def test_a_gradient_by_hand(rng):
    """As flash attention's: what the sum has of the gradient is made of the output."""
    args = arguments(rng)

    def function(q, k, v, g, bias, temperature):
        e = exponentials(jnp.einsum("bthd,bshd->bhts", q, k) / 3)
        total = jnp.sum(e, -1)
        output = jnp.einsum("bhts,bshd->bthd", e, v) / total.transpose(0, 2, 1)[..., None]
        weights, of_weights = e / total[..., None], jnp.einsum("bthd,bshd->bhts", g, v)
        of_logits = weights * (of_weights - jnp.sum(g * output, -1).transpose(0, 2, 1)[..., None]) / 3
        of_query, of_key = (jnp.einsum(f"bhts,{x}", of_logits, y) for x, y in (("bshd->bthd", k), ("bthd->bshd", q)))
        return output, of_query, of_key, jnp.einsum("bhts,bthd->bshd", weights, g)

    assert_matched(function, args)


def test_a_sink(rng):
    args = arguments(rng)

    def divided(e, v):
        total = jnp.sum(e, -1).transpose(0, 2, 1)[..., None]
        return jnp.einsum("bhts,bshd->bthd", e[..., :-1], v) / total

    def with_sink(x, bias, temperature):
        return jnp.concatenate([x, jnp.broadcast_to(temperature[:, None, None], (B, H, T, 1))], -1)

    function = with_gradients(with_sink, divided)
    _, result = matched(lambda *args: function(*args)[:1], *args)
    assert targets(result.module) == [FORWARD], result.notes
    assert max(errors(run(result.module, args), exact(function, args)[:1])) < 4e-6


@pytest.mark.parametrize("name", ["plain", "mask"])
def test_bfloat16(rng, name):
    args, function = arguments(rng, jnp.bfloat16), with_gradients(LOGITS[name])
    module, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert_as_close(run(result.module, args), run(module, args), exact(function, args))


def test_what_is_not_a_number(rng):
    """Rows that -infinity hides wholly, a query that is NaN, one whose logits are infinite: NaN where the program has
    them, and what is right elsewhere."""
    args = arguments(rng)
    args[0] = args[0].at[0, 3, 0].set(jnp.nan).at[1, 5, 1].set(jnp.inf)

    def hidden(x, *_):
        return jnp.where(MASK, x, -jnp.inf)

    function = with_gradients(hidden)
    _, result = matched(lambda *args: function(*args)[:1], *args)
    assert targets(result.module) == [FORWARD], result.notes
    (ours,), (program,) = run(result.module, args), jax.tree.leaves(jax.jit(lambda *args: function(*args)[:1])(*args))
    assert np.isnan(program[0, ::5]).all() and np.isnan(program[0, 3, 0]).all() and np.isnan(program[1, 5, 1]).all()
    np.testing.assert_allclose(ours, program, rtol=1e-5, atol=1e-5)


def squared(e, v):
    return quotient(e, v) / jnp.sum(e, -1).transpose(0, 2, 1)[..., None]


def with_epsilon(e, v):
    return jnp.einsum("bhts,bshd->bthd", e, v) / (jnp.sum(e, -1) + 1e-6).transpose(0, 2, 1)[..., None]


def of_part(e, v):
    return jnp.einsum("bhts,bshd->bthd", e, v) / jnp.sum(e[..., :-1], -1).transpose(0, 2, 1)[..., None]


def of_zeroed(e, v):
    return quotient(jnp.where(MASK, e, 0.0), v)


def both_products(e, v):
    return quotient(e, v) + jnp.einsum("bhts,bshd->bthd", e, v)


def by_what_is_seen(e, v):
    """Weights that the sum alone is zero for: another quotient in rows that see no key."""
    return jnp.einsum("bhts,bshd->bthd", e, v) / jnp.sum(jnp.where(MASK, e, 0.0), -1).transpose(0, 2, 1)[..., None]


@pytest.mark.parametrize("divided", [ones_column, with_epsilon, of_part, of_zeroed])
def test_other_divisors(rng, divided):
    args = arguments(rng)
    for count in (1, 4):
        function = with_gradients(LOGITS["mask"], divided)
        assert_near_miss(lambda *args, n=count, f=function: f(*args)[:n], args, "before the weights are divided")


def test_a_product_that_is_needed_undivided(rng):
    args = arguments(rng)
    assert_near_miss(lambda *args: with_gradients(LOGITS["plain"], both_products)(*args)[:1], args, "needs %exp")


def test_a_quotient_is_an_array_like_others(rng):
    """What is divided by the sum once more is the output divided by it, which needs the sum."""
    args = arguments(rng)
    assert_near_miss(lambda *args: with_gradients(LOGITS["plain"], squared)(*args)[:1], args, "the computation returns")


def test_a_sum_of_other_weights(rng):
    args = arguments(rng)
    function = with_gradients(LOGITS["mask"], by_what_is_seen)
    assert_near_miss(lambda *args: function(*args)[:1], args, "set to zero in one place and not in another")


@pytest.mark.parametrize("divided", [True, False])
def test_another_gradient_than_the_outputs(rng, divided):
    """The sum's part of the logits' gradient is made with another array than the weights' part."""
    args = arguments(rng)

    def function(q, k, v, g, bias, temperature):
        x = jnp.einsum("bthd,bshd->bhts", q, k)
        e = exponentials(x)
        product, total = jnp.einsum("bhts,bshd->bthd", e, v), jnp.sum(e, -1).transpose(0, 2, 1)[..., None]
        if divided:
            of_weights = jnp.einsum("bthd,bshd->bhts", g / total, v)
        else:
            of_weights = jnp.einsum("bthd,bshd->bhts", g, v) / jnp.sum(e, -1)[..., None]
        of_sum = jnp.sum(jnp.cos(g) * product / (total * total), -1).transpose(0, 2, 1)[..., None]
        return product / total, jnp.einsum("bhts,bshd->bthd", e * (of_weights - of_sum), k)

    assert_near_miss(function, args, "needs %exp")
