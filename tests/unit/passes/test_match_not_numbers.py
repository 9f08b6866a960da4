"""Weights of which those that are NaN are set to zero, as ``nan_to_num`` of a softmax does: rows that see no key, and
rows with a NaN or an infinity, have an output of zero. The program itself and NumPy's float64, written out here, are
the oracles. With gradients it stays as it is: those of a row that a NaN made are NaN, where the values' is zero."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import FORWARD, AttentionCall
from flagos_backend.ir.opcode import Opcode
from programs import hlo_bytes, run_on_xla
from support.matching import assert_as_close, assert_near_miss, errors, matched, run, targets, weights_like

B, T, H, K, D = 2, 24, 4, 2, 8


def nan_to_num(weights):
    return jnp.nan_to_num(weights)


def finite_alone(weights):
    return jnp.where(jnp.isfinite(weights), weights, 0)


def where_nan(weights):
    return jnp.where(jnp.isnan(weights), 0, weights)


def where_itself(weights):
    return jnp.where(weights == weights, weights, 0)


SPELLINGS = {
    "nan_to_num": nan_to_num,
    "is finite": finite_alone,
    "is nan": where_nan,
    "equals itself": where_itself,
    "with numbers": partial(jnp.nan_to_num, posinf=7.0, neginf=-7.0),
}


def attend(change, fill, q, k, v, mask, bias):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / 3 + bias
    weights = jax.nn.softmax(jnp.where(mask, logits, fill)).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", change(weights), v)


def oracle(fill, q, k, v, mask, bias):
    q, k, v, bias = (np.asarray(x, np.float64) for x in (q, k, v, bias))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = np.where(mask, np.einsum("bthd,bshd->bhts", q, k) / 3 + bias, fill)
    with np.errstate(invalid="ignore"):
        e = np.exp(logits - logits.max(-1, keepdims=True))
    weights = e / e.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", np.where(np.isnan(weights), 0, weights), v)


def draw(rng, heads=H, dtype=jnp.float32):
    """A mask with rows that see no key, a bias with rows of -infinity."""
    q, k, v = (rng.standard_normal((B, T, n, D)) for n in (H, heads, heads))
    mask = rng.random((B, 1, T, T)) < 0.6
    mask[0, 0, ::5] = False
    bias = rng.standard_normal((1, H, T, T))
    bias[0, 1, 2::7] = -np.inf
    q, k, v, bias = (jnp.asarray(x, dtype) for x in (q, k, v, bias))
    return [q, k, v, mask, bias]


def assert_called(function, args):
    module, result = matched(function, *args)
    assert targets(result.module) == [FORWARD], result.notes
    assert "zero where weights are NaN" in result.notes[0]
    (call,) = (i for c in result.module.computations() for i in c.instructions if i.opcode is Opcode.CUSTOM_CALL)
    assert AttentionCall.of(call).tells_nan
    return module, result


@pytest.mark.parametrize("fill", [-np.inf, -1e30])
@pytest.mark.parametrize("heads", [H, K])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(rng, name, heads, fill):
    args = draw(rng, heads)
    _, result = assert_called(partial(attend, SPELLINGS[name], fill), args)
    (ours,) = run(result.module, args)
    assert max(errors([ours], [oracle(fill, *args)])) < 2e-6
    assert not ours[:, 2::7, 1].any() or np.isfinite(fill)
    assert ours[0, ::5].any() == np.isfinite(fill)


def test_causal(rng):
    """A mask of positions is a band, of which no row is empty; nothing is left of the weights."""
    args = draw(rng)[:3]

    def function(q, k, v):
        weights = jax.nn.softmax(
            jnp.where(jnp.tril(jnp.ones((T, T), bool)), jnp.einsum("bthd,bshd->bhts", q, k), -jnp.inf)
        )
        return jnp.einsum("bhts,bshd->bthd", jnp.nan_to_num(weights), v)

    _, result = assert_called(function, args)
    assert "upper=0" in result.notes[0] and not weights_like(result.module)
    (ours,), (program,) = run(result.module, args), run_on_xla(hlo_bytes(function, *args), args)
    np.testing.assert_allclose(ours, program, rtol=1e-5, atol=1e-5)


def test_float64(rng):
    with jax.enable_x64(True):
        args = draw(rng, dtype=jnp.float64)
        _, result = assert_called(partial(attend, nan_to_num, -np.inf), args)
        assert max(errors(run(result.module, args), [oracle(-np.inf, *args)])) < 1e-14


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_types(rng, dtype):
    args = draw(rng, dtype=dtype)
    module, result = assert_called(partial(attend, nan_to_num, -np.inf), args)
    assert_as_close(run(result.module, args), run(module, args), [oracle(-np.inf, *args)])


@pytest.mark.parametrize("place", [0, 1, 2, 4], ids=["q", "k", "v", "bias"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none(rng, place, number):
    """A row with a NaN is zero, and NaN if a value is NaN or infinite too, as the program has it."""
    args = [np.array(a) for a in draw(rng)]
    args[3][...] = True
    args[place][tuple(int(rng.integers(size)) for size in args[place].shape)] = number
    function = partial(attend, nan_to_num, -np.inf)
    _, result = assert_called(function, args)
    (ours,), (program,) = run(result.module, args), run_on_xla(hlo_bytes(function, *args), args)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(program))
    np.testing.assert_allclose(ours, program, rtol=1e-4, atol=1e-4)


def test_weights_that_are_zero_where_hidden_too(rng):
    args = draw(rng)

    def function(q, k, v, mask, bias):
        return attend(lambda w: jnp.where(mask, jnp.nan_to_num(w), 0), -1e30, q, k, v, mask, bias)

    _, result = assert_called(function, args)
    (ours,), (program,) = run(result.module, args), run_on_xla(hlo_bytes(function, *args), args)
    np.testing.assert_allclose(ours, program, rtol=1e-5, atol=1e-5)


def of_another_number(weights):
    return jnp.nan_to_num(weights, nan=1.0)


def of_the_square(weights):
    return jnp.nan_to_num(weights * weights)


def by_others(weights):
    return jnp.where(jnp.isnan(weights.mean(1, keepdims=True)), 0, weights)


def greater(weights):
    return jnp.where(weights > 0.1, weights, 0)


@pytest.mark.parametrize("change", [of_another_number, of_the_square, by_others, greater])
def test_near_misses(rng, change):
    assert_near_miss(partial(attend, change, -np.inf), draw(rng), "no values are weighted")


def test_weights_that_are_used_twice(rng):
    """Once as they are, once without NaN: the call gives one of them."""

    def function(*args):
        return attend(nan_to_num, -np.inf, *args), attend(lambda w: w, -np.inf, *args)

    assert_near_miss(function, draw(rng), "which the call does not give")


def test_a_sink_is_a_near_miss(rng):
    def function(q, k, v, mask, bias):
        logits = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, k), -jnp.inf)
        whole = jnp.concatenate([logits, jnp.zeros((B, H, T, 1))], -1)
        return jnp.einsum("bhts,bshd->bthd", jnp.nan_to_num(jax.nn.softmax(whole))[..., :-1], v)

    assert_near_miss(function, draw(rng), "set to zero, beside a sink")


@pytest.mark.parametrize("arguments", [(0, 1, 2), (2,), (0, 1)])
def test_gradients_are_a_near_miss(rng, arguments):
    args = draw(rng)

    def function(*args):
        output, pullback = jax.vjp(partial(attend, nan_to_num, -np.inf), *args)
        return output, *(x for i, x in enumerate(pullback(jnp.cos(output))) if i in arguments)

    reason = "set to zero, but not where its gradients" if 2 in arguments else "which the call does not give"
    assert_near_miss(function, args, reason)


def test_a_gradient_made_of_what_was_set_to_zero_is_a_near_miss(rng):
    @jax.custom_vjp
    def weigh(logits):
        return jnp.nan_to_num(jax.nn.softmax(logits))

    def backward(weights, g):
        return (weights * g - weights * (weights * g).sum(-1, keepdims=True),)

    weigh.defvjp(lambda logits: (weights := weigh(logits), weights), backward)

    def function(q, k, v):
        def attend(q, k, v):
            return jnp.einsum("bhts,bshd->bthd", weigh(jnp.einsum("bthd,bshd->bhts", q, k)), v)

        output, pullback = jax.vjp(attend, q, k, v)
        return output, *pullback(jnp.cos(output))

    assert_near_miss(function, draw(rng)[:3], "set to zero, but not where its gradients")
