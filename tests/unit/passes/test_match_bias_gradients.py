"""The gradient of what is added to an attention's logits is a result of its backward call, summed over what shares it.
Float64 is the oracle."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType, leaves
from support.biases import (
    EVERY,
    OF_HEADS,
    B,
    D,
    H,
    K,
    T,
    added,
    arguments,
    attend,
    backward_of,
    clipped,
    doubled,
    lower,
    of_bias,
    product,
    repeated,
    weigh,
)
from support.matching import assert_as_close_as_the_program, errors, exact, gradient, matched, run, targets

dpa = jax.nn.dot_product_attention


def grouped(q, k, v, bias):
    """Groups have a dimension of their own."""
    logits = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k) + bias.reshape(K, H // K, T, T)
    return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(logits), v).reshape(q.shape)


def with_a_sink(q, k, v, bias):
    logits = jnp.where(lower(), product(q, k) + bias, -1e30)
    column = jnp.broadcast_to(jnp.cos(jnp.arange(H, dtype=q.dtype))[None, :, None, None], (B, H, T, 1))
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.concatenate([logits, column], -1))[..., :-1], v)


def only_seen(q, k, v, bias):
    weights = jax.nn.softmax(product(q, k) + bias, where=lower() & (jnp.arange(T)[:, None] % 5 > 0))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def divided_late(q, k, v, bias):
    logits = product(q, k) + bias
    exponentials = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    return jnp.einsum("bhts,bshd->bthd", exponentials, v) / exponentials.sum(-1).swapaxes(1, 2)[..., None]


def by_logarithms(q, k, v, bias):
    return jnp.einsum("bhts,bshd->bthd", jnp.exp(jax.nn.log_softmax(product(q, k) + bias)), v)


def t5(q, k, v, table):
    """Biases are gathered from a table by distance, and what hides is added to them first."""
    buckets = jnp.clip(jnp.arange(T)[None, :] - jnp.arange(T)[:, None], -7, 8) + 7
    bias = table[buckets].transpose(2, 0, 1)[None]
    kept = jnp.arange(T) % 7 > 0
    bias = bias + jnp.where(kept[None, None, None, :], 0.0, -1e10)
    return weigh(jnp.einsum("bthd,bshd->bhts", q, k) + bias, v)


def alphafold(q, k, v, pair):
    """A bias that hides and one that a product makes, for each head."""
    kept = (jnp.arange(B * T).reshape(B, 1, 1, T) % 5 > 0).astype(q.dtype)
    logits = product(q, k) + 1e9 * (kept - 1)
    return weigh(logits + jnp.einsum("tsc,ch->hts", pair, jnp.cos(jnp.arange(5 * H).reshape(5, H))), v)


def rematerialized(q, k, v, bias):
    return jax.checkpoint(added)(q, k, v, bias)


def layers(q, k, v, bias):
    """All layers have one bias."""
    first = added(q, k, v, bias)
    return added(*(jnp.roll(first, n, 1) for n in range(3)), bias)


CAUSAL = attend(lambda x, b: jnp.where(lower(), x + b, -1e30))
#: What computes it, the bias's dimensions, those of its gradient in the call, and heads of keys.
SPELLINGS = {
    "of every head": (added, OF_HEADS, "hts", H),
    "of one batch": (added, (1, H, T, T), "1hts", H),
    "of every batch": (added, (B, H, T, T), "bhts", H),
    "of every batch, for all heads": (added, (B, 1, T, T), "b1ts", H),
    "for all": (added, (T, T), "ts", H),
    "of keys": (added, (B, 1, 1, T), "b11s", H),
    "of a head's keys": (added, (H, 1, T), "h1s", H),
    "JAX's own": (lambda q, k, v, b: dpa(q, k, v, b, is_causal=True), (1, H, T, T), "1hts", H),
    "JAX's own, grouped": (lambda q, k, v, b: dpa(q, k, v, b), (1, H, T, T), "1hgts", K),
    "causal": (CAUSAL, OF_HEADS, "hts", H),
    "causal, -inf": (attend(lambda x, b: jnp.where(lower(), b + x, -jnp.inf)), OF_HEADS, "hts", H),
    "hidden by a sum": (attend(lambda x, b: x + jnp.where(lower(), 0, -1e30) + b), OF_HEADS, "hts", H),
    "hidden by a sum, before": (attend(lambda x, b: x + (b + jnp.where(lower(), 0, -1e30))), OF_HEADS, "hts", H),
    "window": (attend(lambda x, b: jnp.where(jnp.triu(lower(), -4), x + b, -1e30)), OF_HEADS, "hts", H),
    "scaled after": (attend(lambda x, b: (x + b) * 0.3), OF_HEADS, "hts", H),
    "scaled after, of every batch": (attend(lambda x, b: (x + b) * 0.3), (B, H, T, T), "bhts", H),
    "subtracted, of every batch": (attend(lambda x, b: x - b), (B, H, T, T), "bhts", H),
    "subtracted": (attend(lambda x, b: x - b), OF_HEADS, "hts", H),
    "doubled": (attend(lambda x, b: x + doubled(jnp.broadcast_to(b, x.shape))), OF_HEADS, "hts", H),
    "twice": (attend(lambda x, b: x + 2 * b), OF_HEADS, "hts", H),
    "transposed": (attend(lambda x, b: x + b.transpose(2, 1, 0)), (T, T, H), "sth", H),
    "cap": (attend(lambda x, b: 1.5 * jnp.tanh(x / 1.5) + b), OF_HEADS, "hts", H),
    "cap, causal": (
        attend(lambda x, b: jnp.where(lower(), 1.5 * jnp.tanh(x / 1.5) + b, -1e30)),
        OF_HEADS,
        "hts",
        H,
    ),
    "temperature": (attend(lambda x, b: x * jnp.cos(jnp.arange(H))[:, None, None] + b), OF_HEADS, "hts", H),
    "repeated": (repeated, OF_HEADS, "hyts", K),
    "repeated, for all": (repeated, (B, 1, T, T), "b1ts", K),
    "grouped": (grouped, OF_HEADS, "hgts", K),
    "sink": (with_a_sink, OF_HEADS, "hts", H),
    "zero where nothing is seen": (only_seen, OF_HEADS, "hts", H),
    "divided late": (divided_late, OF_HEADS, "hts", H),
    "by logarithms": (by_logarithms, OF_HEADS, "hts", H),
    "T5": (t5, (16, H), "tsh", H),
    "AlphaFold": (alphafold, (T, T, 5), "hts", H),
}


def of_every_row(module) -> list[str]:
    """Float arrays over all batches, heads, queries and keys."""
    return [
        str(instruction)
        for computation in module.computations()
        for instruction in computation.instructions
        for leaf in leaves(instruction.shape)
        if leaf.dims.count(T) == 2 and math.prod(leaf.dims) >= B * H * T * T and leaf.element_type.is_float
    ]


@pytest.mark.parametrize("name", SPELLINGS)
def test_gradients(rng, name):
    function, bias, dims, heads = SPELLINGS[name]
    args = arguments(rng, bias, heads)
    function = gradient(function, EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert of_bias(backward_of(result.module)) == dims
    assert "that of a bias over" in result.notes[0]
    # The bias itself may be of that size, and its gradient.
    assert "of every batch" in name or not of_every_row(result.module)
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


@pytest.mark.parametrize("wanted", [(3,), (0, 3), (1, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("name", ["causal", "repeated", "of every batch", "T5"])
def test_some_gradients(rng, name, wanted):
    function, bias, _, heads = SPELLINGS[name]
    args = arguments(rng, bias, heads)
    function = gradient(function, wanted)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


def test_the_gradient_alone(rng):
    """Nobody reads the output."""
    args = [*arguments(rng, (1, H, T, T)), jnp.asarray(rng.standard_normal((B, T, H, D)), jnp.float32)]

    def function(q, k, v, bias, g):
        return jax.vjp(lambda bias: dpa(q, k, v, bias), bias)[1](g)

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    call = backward_of(result.module)
    assert len(call.shape.elements) == 1 and not of_every_row(result.module)
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


def test_what_the_program_sums_over_keys_itself(rng):
    """Such a sum stays where it is; one over heads is the call's."""
    args = arguments(rng, OF_HEADS)
    for axis, dims in ((2, "hts"), (0, "ts")):

        def function(q, k, v, bias, axis=axis):
            return jax.vjp(lambda bias: CAUSAL(q, k, v, bias), bias)[1](jnp.sin(q + v))[0].sum(axis)

        _, result = matched(function, *args)
        assert of_bias(backward_of(result.module)) == dims
        assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


def test_written_out_by_hand(rng):
    """Against NumPy alone."""
    args = [np.asarray(a) for a in arguments(rng, OF_HEADS)]
    g = rng.standard_normal((B, T, H, D)).astype(np.float32)
    _, result = matched(lambda q, k, v, b, g: jax.vjp(lambda b: CAUSAL(q, k, v, b), b)[1](g), *args, g)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    q, k, v, bias = (a.astype(np.float64) for a in args)
    logits = np.einsum("bthd,bshd->bhts", q, k) / 3 + bias
    weights = np.where(np.tril(np.ones((T, T), bool)), np.exp(logits - logits.max(-1, keepdims=True)), 0)
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("bthd,bshd->bhts", g.astype(np.float64), v)
    true = (weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))).sum(0)
    assert max(errors(run(result.module, [*args, g]), [true])) < 2e-6


def narrow(q, k, v, bias):
    """The bias and the logits are rounded, the softmax is in f32."""
    return weigh((product(q, k) + bias).astype(jnp.float32), v)


def wide(q, k, v, bias):
    return weigh(jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / 3 + bias, v)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("of_bias", [None, jnp.float32], ids=["narrow", "wide"])
@pytest.mark.parametrize("function", [added, narrow, wide, repeated], ids=lambda f: f.__name__)
def test_half_types_are_as_close_as_the_program(rng, function, of_bias, dtype):
    args = arguments(rng, (1, H, T, T), K if function is repeated else H, dtype)
    if of_bias is not None:
        args[3] = jnp.asarray(rng.standard_normal((1, H, T, T)), of_bias)
    function = gradient(function, EVERY)
    module, result = matched(function, *args)
    assert_as_close_as_the_program(function, args, module, result)
    given = backward_of(result.module).shape.elements[-1].element_type
    half = ElementType.BF16 if dtype is jnp.bfloat16 else ElementType.F16
    assert given is (ElementType.F32 if of_bias is not None else half)


def test_what_is_scaled_after_the_call_is_rounded_after_that(rng):
    function = gradient(SPELLINGS["scaled after, of every batch"][0], EVERY)
    args = arguments(rng, (B, H, T, T), dtype=jnp.bfloat16)
    module, result = matched(function, *args)
    assert_as_close_as_the_program(function, args, module, result)
    assert backward_of(result.module).shape.elements[-1].element_type is ElementType.F32


def test_a_sum_of_half_floats_is_rounded_once(rng):
    """Over 64 batches, where a program that adds bf16 loses digits."""
    args = [jnp.asarray(rng.standard_normal((64, T, 1, D)), jnp.bfloat16) for _ in range(4)]
    args.append(jnp.asarray(rng.standard_normal((T, T)), jnp.bfloat16))

    def function(q, k, v, g, bias):
        return jax.vjp(lambda bias: added(q, k, v, bias), bias)[1](g)

    module, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    (true,) = exact(function, args)
    ours, program = (run(m, args)[0].astype(np.float64) for m in (result.module, module))
    bound = 2.0**-8 * np.abs(true) + 1e-5
    assert (np.abs(ours - true) <= bound).all()
    assert not (np.abs(program - true) <= bound).all()


def test_float64(rng):
    with jax.enable_x64(True):
        args = arguments(rng, OF_HEADS, dtype=jnp.float64)

        def function(q, k, v, bias):
            return jax.vjp(CAUSAL, q, k, v, bias)[1](jnp.cos(q + v))

        _, result = matched(function, *args)
        assert targets(result.module) == [FORWARD, BACKWARD], result.notes
        assert max(errors(run(result.module, args), exact(function, args))) < 1e-13


@pytest.mark.parametrize("name", ["of every head", "of keys", "for all"])
def test_biases_of_minus_infinity(rng, name):
    """They have no gradient."""
    function, bias, _, _ = SPELLINGS[name]
    args = [np.array(a) for a in arguments(rng, bias)]
    hidden = rng.random(bias) < 0.5
    hidden[..., 0] = False
    args[3][hidden] = -np.inf
    function = gradient(function, EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    ours = run(result.module, args)
    assert max(errors(ours, exact(function, args))) < 1e-5
    assert (ours[-1][hidden] == 0).all()


@pytest.mark.parametrize("low", [-1e9, float(np.finfo(np.float32).min)])
def test_rows_that_see_no_key(rng, low):
    """A mask that is added beside a bias: all keys have equal weights, and hidden ones have gradients."""
    kept = rng.random((B, 1, T, T)) < 0.6
    kept[0, :, 3] = False
    args = [*arguments(rng, OF_HEADS), kept]

    def function(q, k, v, bias, kept):
        return weigh(product(q, k) + bias + jnp.where(kept, 0.0, low), v)

    function = gradient(function, EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert "added" in result.notes[0] and "mask=" in result.notes[0]
    # Float64 has more of a logit left beside the lower number than float32.
    true = jax.jit(function)(*args)
    assert max(errors(run(result.module, args), [np.asarray(x, np.float64) for x in jax.tree.leaves(true)])) < 1e-5


TWO = {
    "of one size": ((H, T, T), (H, T, T), "hts"),
    "one within the other": ((H, T, T), (T, T), "hts"),
    "one of keys": ((H, T, T), (1, T), "hts"),
    "neither within the other": ((B, 1, T, T), (H, T, T), "bhts"),
    "both of keys": ((B, 1, 1, T), (H, 1, T), "bhs"),
}


@pytest.mark.parametrize("name", TWO)
def test_two_biases(rng, name):
    """One gradient, over the dimensions of both, that both are made of."""
    first, second, dims = TWO[name]
    args = [*arguments(rng, first), jnp.asarray(rng.standard_normal(second), jnp.float32)]

    def function(q, k, v, one, other):
        return weigh(product(q, k) + one - jnp.cos(other), v)

    function = gradient(function, (0, 1, 2, 3, 4))
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert of_bias(backward_of(result.module)) == dims
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


def test_of_two_biases_one_has_a_gradient(rng):
    args = [*arguments(rng, OF_HEADS), jnp.asarray(rng.standard_normal((B, 1, 1, T)), jnp.float32)]
    function = gradient(lambda q, k, v, one, other: weigh(product(q, k) + other + one, v), EVERY)
    _, result = matched(function, *args)
    assert of_bias(backward_of(result.module)) == "hts"
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


def test_a_gradient_that_is_used_as_it_is(rng):
    """Nothing is summed."""
    args = arguments(rng, (B, H, T, T))
    function = gradient(attend(lambda x, b: x + clipped(b)), EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert of_bias(backward_of(result.module)) == "bhts"
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


@pytest.mark.parametrize("batch", [(), (1,)], ids=str)
def test_a_gradient_that_is_all_that_the_program_returns(rng, batch):
    args = [jnp.asarray(rng.standard_normal(d), jnp.float32) for d in (*[(*batch, T, D)] * 3, (T, T), (*batch, T, D))]

    def function(q, k, v, bias, g):
        def attend(bias):
            return jax.nn.softmax(q @ k.swapaxes(-1, -2) + bias) @ v

        return jax.vjp(attend, bias)[1](g)[0]

    module, result = matched(function, *args)
    assert module.entry.root.opcode is not Opcode.TUPLE
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), exact(function, args))) < 2e-6


def test_vmapped(rng):
    args = [jnp.asarray(rng.standard_normal((3, *a.shape)), a.dtype) for a in arguments(rng, OF_HEADS)]
    for over, dims in ((0, "bhts"), (None, "hts")):
        given = args if over == 0 else [*args[:3], args[3][0]]
        function = gradient(jax.vmap(added, (0, 0, 0, over)), EVERY)
        _, result = matched(function, *given)
        assert targets(result.module) == [FORWARD, BACKWARD], result.notes
        assert len(of_bias(backward_of(result.module)).replace("1", "")) == len(dims), result.notes
        assert max(errors(run(result.module, given), exact(function, given))) < 1e-5


def test_rematerialized(rng):
    args = arguments(rng, OF_HEADS)
    function = gradient(rematerialized, EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


def test_one_bias_for_all_layers(rng):
    args = arguments(rng, OF_HEADS)
    function = gradient(layers, EVERY)
    _, result = matched(function, *args)
    assert sorted(targets(result.module)) == [FORWARD, FORWARD, BACKWARD, BACKWARD], result.notes
    assert not of_every_row(result.module)
    assert max(errors(run(result.module, args), exact(function, args))) < 2e-5


def scanned(q, k, v, bias):
    return jax.lax.scan(jax.checkpoint(lambda h, b: (added(h, k, v, b), None)), q, bias)[0]


def test_scanned(rng):
    """A bias of each layer, in the body of a loop."""
    args = arguments(rng, (2, H, T, T))
    function = gradient(scanned, EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), exact(function, args))) < 2e-5


def swin(q, k, v, table):
    """Windows of images: each of an image's has a mask of its own, which adds -100, and all have the table's biases."""
    positions = jnp.arange(T)
    bias = table[(positions[:, None] - positions[None, :]) % 16].transpose(2, 0, 1)
    apart = (positions[:, None] < 12) != (positions[None, :] < 12)
    mask = jnp.where(jnp.stack([jnp.zeros_like(apart), apart]), -100.0, 0.0)
    logits = jnp.einsum("bwthd,bwshd->bwhts", q * D**-0.5, k) + bias + mask[None, :, None]
    return jnp.einsum("bwhts,bwshd->bwthd", jax.nn.softmax(logits), v)


def test_windows_of_images(rng):
    args = [jnp.asarray(rng.standard_normal((3, 2, T, H, D)), jnp.float32) for _ in range(3)]
    args.append(jnp.asarray(rng.standard_normal((16, H)), jnp.float32))
    function = gradient(swin, EVERY)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert len(of_bias(backward_of(result.module))) == 3
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5
