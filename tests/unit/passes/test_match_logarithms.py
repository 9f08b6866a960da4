"""Weights that are exponentials of log_softmax are those of a softmax; float64 is the oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from programs import hlo_bytes, run_on_xla
from support.matching import assert_as_close, assert_near_miss, errors, exact, matched, run, targets, weights_like

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
    assert_as_close(run(result.module, args), run(module, args), truth(function, args))


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


# ---- logsumexp ----


def less_logsumexp(x):
    return x - jax.nn.logsumexp(x, -1, keepdims=True)


def less_logsumexp_in_parts(x):
    """Without what JAX's does for infinite maxima."""
    greatest = jax.lax.stop_gradient(x.max(-1, keepdims=True))
    return x - (greatest + jnp.log(jnp.exp(x - greatest).sum(-1, keepdims=True)))


def attend_less(logarithms, change, q, k, v, g, mask, bias, temperature):
    def weigh(x, *rest):
        return logarithms(change(x, *rest))

    return attend(weigh, q, k, v, mask, bias, temperature)


def gradients_less(logarithms, change, arguments=(0, 1, 2)):
    def both(*args):
        def function(*some):
            whole = list(args)
            for i, x in zip(arguments, some, strict=True):
                whole[i] = x
            return attend_less(logarithms, change, *whole)

        output, pullback = jax.vjp(function, *(args[i] for i in arguments))
        return output, *pullback(args[3])

    return both


@pytest.mark.parametrize("heads", [H, K])
@pytest.mark.parametrize("name", ["plain", "causal", "cap", "temperature"])
@pytest.mark.parametrize("logarithms", [less_logsumexp, less_logsumexp_in_parts])
def test_logsumexp(rng, logarithms, name, heads):
    """The output; and, of sums of logits that are finite, gradients."""
    args = arguments(rng, heads)
    asked = [(), (0, 1)] if logarithms is less_logsumexp and name != "cap" else [(), (0, 1, 2), (0, 1)]
    for some in asked:
        function = (
            gradients_less(logarithms, LOGITS[name], some) if some else partial(attend_less, logarithms, LOGITS[name])
        )
        _, result = matched(function, *args)
        assert targets(result.module) == ([FORWARD, BACKWARD] if some else [FORWARD]), result.notes
        assert not weights_like(result.module)
        assert max(errors(run(result.module, args), truth(function, args))) < 4e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logsumexp_of_half_types(rng, dtype):
    args = arguments(rng, H, dtype)
    function = gradients_less(less_logsumexp_in_parts, LOGITS["causal"])
    module, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert_as_close(run(result.module, args), run(module, args), truth(function, args))


@pytest.mark.parametrize("place", range(4), ids=["q", "k", "v", "g"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("logarithms", "asked"),
    [(less_logsumexp, (0, 1)), (less_logsumexp_in_parts, (0, 1, 2)), (jax.nn.log_softmax, (0, 1, 2))],
)
def test_numbers_that_are_none(rng, logarithms, asked, number, place):
    args = [np.array(a) for a in arguments(rng, H)]
    args[place][tuple(int(rng.integers(size)) for size in args[place].shape)] = number
    function = gradients_less(logarithms, LOGITS["plain"], asked)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    for ours, program in zip(run(result.module, args), run_on_xla(hlo_bytes(function, *args), args), strict=True):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(program))
        both = np.isfinite(ours)
        assert np.abs(ours[both] - program[both]).max(initial=0.0) < 1e-4


def test_weights_beside_an_infinity_have_a_gradient_of_values(rng):
    """logsumexp makes them zero, where a softmax, and so the call, has NaN."""
    args = arguments(rng, H)
    function = gradients_less(less_logsumexp, LOGITS["plain"])
    assert_near_miss(function, args, "its maximum is set to a number where it is infinite")
    args[0] = args[0].at[0, 3, 1, 2].set(jnp.inf)
    of_values = run_on_xla(hlo_bytes(function, *args), args)[3]
    assert np.isnan(of_values[0, :, 1]).any() and np.isfinite(of_values[0, :, 1]).any()


@pytest.mark.parametrize("fill", [-1e9, -1e30])
@pytest.mark.parametrize("added", [False, True])
def test_a_sum_that_is_lost(rng, added, fill):
    """In f32 -1e9 and log(T) are -1e9, so that a row that sees no key has weights of one in the program."""
    args = arguments(rng, H)

    def function(q, k, v, g, mask, bias, temperature):
        hidden = jnp.where(mask, 0.0, fill)
        change = (lambda x, *_: x + hidden) if added else (lambda x, *_: jnp.where(mask, x, fill))
        return attend_less(less_logsumexp_in_parts, change, q, k, v, g, mask, bias, temperature)

    assert_near_miss(function, args, "logsumexp of a row that sees no key has lost the sum")
    if not added:
        (program,) = run_on_xla(hlo_bytes(function, *args), args)
        sums = np.asarray(args[2][0], np.float64).sum(0)
        np.testing.assert_allclose(program[0, 0], sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_mask_that_is_infinite(rng, zeroed):
    """Rows that see no key are NaN, or set to zero."""
    args = arguments(rng, H)

    def function(q, k, v, g, mask, bias, temperature):
        x = jnp.einsum("bthd,bshd->bhts", q, k) / 3
        weights = jnp.exp(less_logsumexp(jnp.where(mask, x + bias, -jnp.inf)))
        return jnp.einsum("bhts,bshd->bthd", jnp.where(mask, weights, 0) if zeroed else weights, v)

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD], result.notes
    (ours,), (program,) = run(result.module, args), run_on_xla(hlo_bytes(function, *args), args)
    assert np.isnan(program[0, ::5]).all() or zeroed
    np.testing.assert_allclose(ours, program, rtol=1e-5, atol=1e-5)


# ---- where ----


@pytest.mark.parametrize("heads", [H, K])
@pytest.mark.parametrize("biased", [False, True])
def test_where(rng, biased, heads):
    """The logarithms of hidden weights are -infinity, also where a row sees no key."""
    args = arguments(rng, heads)

    def both(q, k, v, g, mask, bias, temperature):
        def logarithms(x, *_):
            return jax.nn.log_softmax(x + bias if biased else x, where=mask)

        output, pullback = jax.vjp(lambda *qkv: attend(logarithms, *qkv, mask, bias, temperature), q, k, v)
        return output, *pullback(g)

    true = truth(both, args)
    assert all(np.isfinite(x).all() for x in true) and not true[0][0, ::5].any()
    for function, calls in ((lambda *args: both(*args)[:1], [FORWARD]), (both, [FORWARD, BACKWARD])):
        _, result = matched(function, *args)
        assert targets(result.module) == calls, result.notes
        assert "zero where a row sees no key" in result.notes[0] and not weights_like(result.module)
        assert max(errors(run(result.module, args), true[: len(calls) ** 2])) < 4e-6


def test_logarithms_that_another_mask_hides(rng):
    args = arguments(rng, H)

    def function(q, k, v, g, mask, bias, temperature):
        def logarithms(x, *_):
            return jnp.where(lower(), jax.nn.log_softmax(jnp.where(mask, x, -jnp.inf)), -jnp.inf)

        return attend(logarithms, q, k, v, mask, bias, temperature)

    assert_near_miss(function, args, "no values are weighted by the softmax")


def test_logarithms_that_become_a_number(rng):
    args = arguments(rng, H)

    def function(q, k, v, g, mask, bias, temperature):
        def logarithms(x, *_):
            return jnp.where(mask, jax.nn.log_softmax(jnp.where(mask, x, -jnp.inf)), -3.0)

        return attend(logarithms, q, k, v, mask, bias, temperature)

    assert_near_miss(function, args, "no values are weighted by the softmax")


# ---- near misses ----


def maximum_of_logarithms(x):
    """Not zero: what is taken off once more changes the weights."""
    return jax.nn.log_softmax(x) - jax.nn.log_softmax(x).max(-1, keepdims=True)


def flattened(x):
    return jax.nn.log_softmax(x) * 0.5


def of_other_rows(x):
    return x - x.max(-1, keepdims=True) - jnp.log(jnp.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True) + 1)


def of_other_logits(x):
    return x - jax.nn.logsumexp(x * 0.5, -1, keepdims=True)


@pytest.mark.parametrize("change", [maximum_of_logarithms, flattened, of_other_rows, of_other_logits])
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
