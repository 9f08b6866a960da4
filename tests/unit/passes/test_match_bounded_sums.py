"""Sums of exponentials with a lower bound, or with a number added that is rounded away: they are one or more in a row
that sees a key, so that only rows that see none can tell. float64 is the oracle, for NaN and infinities the program."""

from __future__ import annotations

from functools import partial

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

# ---- what l is divided by ----


def maximum(total):
    return jnp.maximum(total, 1e-6)


def clipped(total):
    return jnp.clip(total, 1e-12)


def epsilon(total):
    return total + 1e-9


def not_zero(total):
    return jnp.where(total == 0, 1, total)


DIVISORS = {f.__name__: f for f in (maximum, clipped, epsilon, not_zero)}

# ---- e ----


def plain(x):
    return jnp.exp(x - jax.lax.stop_gradient(x.max(-1, keepdims=True)))


def masked(x):
    """What hides is finite, or all but one row would be NaN in a gradient: zero times that."""
    x = jnp.where(MASK, x, -1e30)
    return plain(x)


def zeroed(x):
    return jnp.where(MASK, masked(x), 0)


def zeroed_infinite(x):
    return jnp.where(MASK, plain(jnp.where(MASK, x, -jnp.inf)), 0)


def guarded(x):
    """A row that sees no key has exponentials of zero."""
    x = jnp.where(MASK, x, -jnp.inf)
    greatest = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    return jnp.exp(x - jnp.where(greatest == -jnp.inf, 0, greatest))


def guarded_and_zeroed(x):
    return jnp.where(MASK, guarded(x), 0)


EXPONENTIALS = {f.__name__: f for f in (plain, masked, zeroed, zeroed_infinite, guarded, guarded_and_zeroed)}
SEES = {"plain": "tf32$", "masked": "tf32$", "guarded": "every logit is -infinity", "zeroed": "sees no key"}


def attend(exponentials, divisor, q, k, v):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    e = exponentials(jnp.einsum("bthd,bshd->bhts", q, k) / 3)
    weights = e / divisor(e.sum(-1, keepdims=True))
    return jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)


def with_gradients(function):
    def both(q, k, v, g):
        output, pullback = jax.vjp(function, q, k, v)
        return output, *pullback(g)

    return both


def draw(rng, heads=H, dtype=jnp.float32):
    return [jnp.asarray(rng.standard_normal((B, T, n, D)), dtype) for n in (H, heads, heads, H)]


def assert_matched(function, args, tolerance=4e-6, biased=False):
    """The output alone, and with gradients."""
    both = with_gradients(function)
    true = exact(both, args)
    assert all(np.isfinite(x).all() for x in true)
    for called, calls in ((lambda *args: both(*args)[:1], [FORWARD]), (both, [FORWARD, BACKWARD])):
        _, result = matched(called, *args)
        assert targets(result.module) == calls, result.notes
        assert biased or not weights_like(result.module)
        assert max(errors(run(result.module, args), true[: len(calls) ** 2])) < tolerance
    return result


@pytest.mark.parametrize("heads", [H, K])
@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("name", EXPONENTIALS)
def test_spellings(rng, name, divisor, heads):
    args = draw(rng, heads)
    result = assert_matched(partial(attend, EXPONENTIALS[name], DIVISORS[divisor]), args)
    assert SEES[name.split("_")[0]].rstrip("$") in result.notes[0]


@pytest.mark.parametrize("divisor", [maximum, epsilon])
@pytest.mark.parametrize("name", ["plain", "masked"])
def test_what_is_divided_is_the_product(rng, name, divisor):
    def function(q, k, v):
        e = EXPONENTIALS[name](jnp.einsum("bthd,bshd->bhts", q, k) / 3)
        return jnp.einsum("bhts,bshd->bthd", e, v) / divisor(e.sum(-1)).transpose(0, 2, 1)[..., None]

    assert_matched(function, draw(rng))


def test_a_mask_that_hides_nothing_with_a_learned_bias(rng):
    """Rows of -infinity that a bias makes."""
    args = draw(rng)
    bias = rng.standard_normal((H, T, T)).astype(np.float32)
    bias[:, ::3] = -np.inf

    def function(q, k, v):
        def exponentials(x):
            x = x + bias
            greatest = x.max(-1, keepdims=True)
            greatest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(greatest), 0, greatest))
            return jnp.exp(x - greatest)

        return attend(exponentials, maximum, q, k, v)

    result = assert_matched(function, args, biased=True)
    assert "every logit is -infinity" in result.notes[0]
    assert not run(result.module, args)[0][:, ::3].any()


def test_float64(rng):
    with jax.enable_x64(True):
        args = draw(rng, dtype=jnp.float64)
        assert_matched(partial(attend, guarded, lambda total: total + 1e-17), args, tolerance=1e-14)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["masked", "zeroed", "guarded"])
def test_half_types(rng, name, dtype):
    """Sums in f32, as they are written; in half types programs round weights and products where the calls do not."""
    args = draw(rng, dtype=dtype)

    def exponentials(x):
        return EXPONENTIALS[name](x.astype(jnp.float32))

    both = with_gradients(partial(attend, exponentials, maximum))
    module, result = matched(both, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert_as_close(run(result.module, args), run(module, args), exact(both, args))


@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "g"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("divisor", [maximum, not_zero])
@pytest.mark.parametrize("guards", [False, True])
def test_numbers_that_are_none(rng, guards, divisor, number, place):
    """The program has NaN where the calls have."""
    args = [np.array(a) for a in draw(rng)]
    args[place][tuple(int(rng.integers(size)) for size in args[place].shape)] = number
    bias = np.zeros((T, T), np.float32)
    bias[::4] = -np.inf

    def exponentials(x):
        x = x + bias if guards else x
        greatest = jax.lax.stop_gradient(x.max(-1, keepdims=True))
        return jnp.exp(x - (jnp.where(greatest == -jnp.inf, 0, greatest) if guards else greatest))

    function = with_gradients(partial(attend, exponentials, divisor))
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    for ours, program in zip(run(result.module, args), run_on_xla(hlo_bytes(function, *args), args), strict=True):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(program))
        both = np.isfinite(ours)
        assert np.abs(ours[both] - program[both]).max(initial=0.0) < 1e-4


def guarded_wholly(x):
    """Also where the greatest logit is infinite, whose weight alone is NaN then."""
    greatest = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    return jnp.exp(x - jnp.where(jnp.isfinite(greatest), greatest, 0))


def test_a_guard_for_infinities(rng):
    """The output of such a row is NaN, as the call's is; the values' gradient is not, and has no call."""
    args = draw(rng)
    function = partial(attend, guarded_wholly, maximum)
    with_infinity = [np.array(a) for a in args[:3]]
    with_infinity[0][0, 3, 1, 2] = np.inf
    for given in (args[:3], with_infinity):
        _, result = matched(function, *given)
        assert targets(result.module) == [FORWARD], result.notes
        (ours,), (program,) = run(result.module, given), run_on_xla(hlo_bytes(function, *given), given)
        np.testing.assert_allclose(ours, program, rtol=1e-5, atol=1e-5)
    assert_near_miss(with_gradients(function), args, "maximum is set to a number where it is infinite")


def test_a_cap_leaves_no_infinities_to_guard(rng):
    def capped(x):
        return guarded_wholly(1.5 * jnp.tanh(x / 1.5))

    assert_matched(partial(attend, capped, maximum), draw(rng))


def great_epsilon(total):
    return total + 1e-6


def great_bound(total):
    return jnp.maximum(total, 2.0)


def upper_bound(total):
    return jnp.minimum(total, 2.0)


def of_ones(total):
    return jnp.where(total == 1, 2.0, total)


def if_positive(total):
    """One also where it is NaN."""
    return jnp.where(total > 0, total, 1)


def no_sum(total):
    return jnp.where(total < 1.5, 1.0, total)


@pytest.mark.parametrize(
    ("divisor", "reason"),
    [
        (great_epsilon, "no values are weighted by the softmax: its sum has 1e-06 added, which is not rounded away"),
        (great_bound, "no values are weighted by the softmax: its sum is no less than 2"),
        *((f, "no values are weighted") for f in (upper_bound, of_ones, if_positive, no_sum)),
    ],
)
def test_other_sums(rng, divisor, reason):
    args = draw(rng)
    assert_near_miss(partial(attend, plain, divisor), args[:3], reason)
    assert_near_miss(with_gradients(partial(attend, plain, divisor)), args, reason)


def test_no_bound_is_no_zero(rng):
    """Zero by zero in a row that sees no key."""
    args = draw(rng)
    assert_near_miss(partial(attend, zeroed, lambda total: total), args[:3], "in one place and not in another")


@pytest.mark.parametrize("exponentials", [zeroed, guarded])
def test_weights_that_are_not_zeroed_beside_a_sum_that_is(rng, exponentials):
    """In a row that sees no key they are one by the bound."""

    def function(q, k, v):
        x = jnp.einsum("bthd,bshd->bhts", q, k)
        weights = masked(x) / maximum(exponentials(x).sum(-1, keepdims=True))
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    assert_near_miss(function, draw(rng)[:3], "in one place and not in another|no values are weighted")


def test_a_bound_whose_square_is_nothing(rng):
    """A gradient is NaN where a row sees no key: the bound's square is zero in f32."""
    args = draw(rng)
    function = with_gradients(partial(attend, guarded, lambda total: jnp.maximum(total, 1e-30)))
    assert_near_miss(function, args, "which the call does not give")
    _, forward = matched(partial(attend, guarded, lambda total: jnp.maximum(total, 1e-30)), *args[:3])
    assert targets(forward.module) == [FORWARD], forward.notes


def test_a_bound_whose_square_is_nothing_in_f16(rng):
    def function(q, k, v):
        e = guarded(jnp.einsum("bthd,bshd->bhts", q, k))
        total = e.sum(-1, keepdims=True, dtype=jnp.float16)
        return jnp.einsum("bhts,bshd->bthd", e / jnp.maximum(total, jnp.float16(1e-3)), v)

    args = draw(rng, dtype=jnp.float16)
    assert_near_miss(with_gradients(function), args, "no values are weighted")


@pytest.mark.parametrize("dims", [(H, T, T), (1, T, T), (H, T, 1), (H, 1, T)], ids=str)
@pytest.mark.parametrize("divisor", DIVISORS)
def test_gradients_of_biases(rng, divisor, dims):
    """That of rows of -infinity is zero, as their exponentials are."""
    *qkv, g = draw(rng)
    bias = rng.standard_normal(dims).astype(np.float32)
    if dims[1] == T:
        bias[:, ::3] = -np.inf

    def function(q, k, v, bias, g):
        def with_bias(q, k, v, given):
            def exponentials(x):
                x = x + given
                greatest = jax.lax.stop_gradient(x.max(-1, keepdims=True))
                return jnp.exp(x - jnp.where(greatest == -jnp.inf, 0, greatest))

            return attend(exponentials, DIVISORS[divisor], q, k, v)

        output, pullback = jax.vjp(with_bias, q, k, v, bias)
        return output, *pullback(g)

    args = [*qkv, jnp.asarray(bias), g]
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    true = exact(function, args)
    assert all(np.isfinite(x).all() for x in true)
    assert max(errors(run(result.module, args), true)) < 4e-6
