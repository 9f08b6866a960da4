"""Attention as people write it in JAX becomes one call (two with gradients) that computes the same, and leaves no array
over queries and keys; what merely looks like attention stays as it is, and the notes say why."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import leaves
from support.matching import TOKENS, assert_as_close, check, gradient, matched, run, targets

B, T, S, N, K, D = 2, TOKENS, TOKENS, 4, 2, 8
dpa = jax.nn.dot_product_attention
LOWEST = np.finfo(np.float32).min


@pytest.fixture
def draw(rng):
    return lambda *dims: rng.standard_normal(dims).astype(np.float32)


def llama(q, k, v):
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    causal = jnp.where(jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool)), 0.0, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits + causal, axis=-1), v)


def gpt2(q, k, v):
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    logits = (q @ jnp.swapaxes(k, -1, -2)) * (1.0 / np.sqrt(D))
    logits = jnp.where(jnp.tril(jnp.ones((1, 1, T, S))) == 0, -jnp.inf, logits)
    return jnp.swapaxes(jax.nn.softmax(logits, -1) @ v, 1, 2)


def written_out(q, k, v):
    logits = jnp.einsum("bthd,bshd->bhts", q / 3.0, k)
    positions = jnp.arange(T)
    logits = jnp.where(positions[:, None] >= positions[None, :], logits, -1e10)
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


def one_head(q, k, v):
    return jax.nn.softmax(q[0, :, 0] @ k[0, :, 0].T) @ v[0, :, 0]


def window(q, k, v):
    return dpa(q, k, v, local_window_size=(3, 1))


def causal(q, k, v):
    return dpa(q, k, v, is_causal=True)


def attend(change_logits, q, k, v, change_weights=lambda w: w):
    logits = change_logits(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", change_weights(jax.nn.softmax(logits)), v)


def lower():
    return jnp.tril(jnp.ones((T, S), bool))


def by_logarithms(q, k, v):
    logits = jnp.where(lower(), jnp.einsum("bthd,bshd->bhts", q, k) / 3, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jnp.exp(jax.nn.log_softmax(logits)), v)


def by_logarithms_of_logits_in_parts(q, k, v):
    """As log_softmax is written out, with repeated heads and a finite fill."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = jnp.where(lower(), jnp.einsum("bthd,bshd->bhts", q, k) / 3, -1e10)
    logits = logits - logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True)))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def maximum_with_a_gradient(q, k, v):
    logits = jnp.where(lower(), jnp.einsum("bthd,bshd->bhts", q, k) / 3, -1e10)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


def zeroed_again(q, k, v):
    return attend(lambda x: jnp.where(lower(), x, -1e30), q, k, v, lambda w: jnp.where(lower(), w, 0))


def scaled_after_the_mask(q, k, v):
    return attend(lambda x: jnp.where(lower(), x, -jnp.inf) / 3, q, k, v)


def one_less_the_mask(q, k, v):
    return attend(lambda x: x / 3 + (1 - jnp.tril(jnp.ones((T, S)))) * -1e10, q, k, v)


def constant_bias(q, k, v):
    return attend(lambda x: x / 3 + np.triu(np.full((T, S), -1e10, np.float32), 1), q, k, v)


def window_of_triangles(q, k, v):
    return attend(lambda x: jnp.where(jnp.triu(lower(), -4), x, -1e30), q, k, v)


def scanned(q, k, v):
    layer = jax.checkpoint(lambda h, _: (written_out(h, k, v), None))
    return jax.lax.scan(layer, q, None, length=2)[0]


SPELLINGS = {
    "default": (dpa, N),
    "causal": (causal, N),
    "causal, grouped": (causal, K),
    "window": (window, N),
    "llama": (llama, K),
    "gpt2": (gpt2, N),
    "written out": (written_out, N),
    "maximum with a gradient": (maximum_with_a_gradient, N),
    "by logarithms": (by_logarithms, N),
    "by logarithms, grouped": (by_logarithms_of_logits_in_parts, K),
    "zeroed again": (zeroed_again, N),
    "scaled after the mask": (scaled_after_the_mask, N),
    "one less the mask": (one_less_the_mask, N),
    "constant bias": (constant_bias, N),
    "window of triangles": (window_of_triangles, N),
    "one head": (one_head, N),
    "vmapped": (jax.vmap(lambda q, k, v: dpa(q, k, v, is_causal=True)), N),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_forward(draw, name):
    function, heads = SPELLINGS[name]
    args = [draw(B, T, N, D), draw(B, S, heads, D), draw(B, S, heads, D)]
    check(function, *args, calls=[FORWARD], tolerance=2e-6)


@pytest.mark.parametrize("name", SPELLINGS)
def test_gradients(draw, name):
    function, heads = SPELLINGS[name]
    args = [draw(B, T, N, D), draw(B, S, heads, D), draw(B, S, heads, D)]
    check(gradient(function), *args, calls=[FORWARD, BACKWARD], tolerance=1e-5)


@pytest.mark.parametrize("arguments", [(0,), (1,), (2,), (0, 2)])
def test_some_gradients(draw, arguments):
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D)]
    check(gradient(causal, arguments), *args, calls=[FORWARD, BACKWARD], tolerance=1e-5)


def test_gradients_alone_arrange_the_output_as_their_argument(draw):
    """Backward kernels of libraries want channels last in all arrays, and nobody else reads the output."""
    args = [draw(B, T, N, D) for _ in range(4)]

    def function(q, k, v, g):
        return jax.vjp(causal, q, k, v)[1](g)

    check(function, *args, calls=[FORWARD, BACKWARD], tolerance=1e-5)
    module = matched(function, *args)[1].module
    assert Opcode.TRANSPOSE not in {i.opcode for i in module.entry.instructions}
    (forward,) = (i for i in module.entry.instructions if getattr(i.attributes, "target", "") == FORWARD)
    assert next(leaves(forward.shape)).dims == (B, T, N, 1, D)


@pytest.mark.parametrize("differentiate", [False, True])
def test_bias_and_masks(draw, rng, differentiate):
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D), draw(1, N, T, S), rng.random((B, 1, 1, S)) < 0.7]

    def function(q, k, v, bias, mask):
        return dpa(q, k, v, bias, mask, is_causal=True)

    calls = [FORWARD, BACKWARD] if differentiate else [FORWARD]
    check(gradient(function) if differentiate else function, *args, calls=calls, tolerance=1e-5, biased=True)


@pytest.mark.parametrize("softmax", [jax.nn.softmax, lambda x: jnp.exp(jax.nn.log_softmax(x))])
@pytest.mark.parametrize("fill", [-1e9, LOWEST])
def test_rows_that_see_no_key(draw, rng, softmax, fill):
    """A finite fill makes their weights equal over all keys, hidden ones too; so does the call."""
    mask = rng.random((B, 1, T, S)) < 0.6
    mask[0] = False
    mask[1, 0, ::5] = False
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D), mask]

    def function(q, k, v, mask):
        logits = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, k) / 3, fill)
        return jnp.einsum("bhts,bshd->bthd", softmax(logits), v)

    check(function, *args, calls=[FORWARD], tolerance=2e-6)
    check(gradient(function), *args, calls=[FORWARD, BACKWARD], tolerance=1e-5)


def test_sequences_that_see_no_key(draw):
    """As above, by JAX's own function."""
    mask = np.ones((B, 1, 1, S), bool)
    mask[0] = False
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D), mask]

    def function(q, k, v, mask):
        return dpa(q, k, v, mask=mask, is_causal=True)

    check(gradient(function), *args, calls=[FORWARD, BACKWARD], tolerance=1e-5)


TWO_MASKS = {
    "two biases": lambda x, kept: x + jnp.where(lower(), 0, LOWEST) + (1 - kept) * LOWEST,
    "a mask and a bias": lambda x, kept: jnp.where(lower(), x + (1 - kept) * LOWEST, -1e9),
}


@pytest.mark.parametrize("name", TWO_MASKS)
def test_rows_that_one_of_two_masks_leaves_a_key(draw, name):
    """Padding to the left: the first queries see what the other mask hides."""
    kept = np.ones((B, 1, 1, S), np.float32)
    kept[0, ..., :5] = 0
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D), kept]

    def function(q, k, v, kept):
        return attend(lambda x: TWO_MASKS[name](x, kept), q, k, v)

    check(function, *args, calls=[FORWARD], tolerance=2e-6, biased=True)
    assert "upper" not in matched(function, *args)[1].notes[0]  # kernels skip what a band hides


PADDINGS = {
    "BERT": lambda x, kept: x + (1 - kept) * -1e9,
    "the lowest": lambda x, kept: x + (1 - kept) * LOWEST,
    "nested": lambda x, kept: x + jnp.where(~kept, LOWEST, jnp.where(lower(), 0, LOWEST)),
}


@pytest.mark.parametrize("name", PADDINGS)
def test_padding_is_a_mask_though_it_is_added(draw, name):
    """Rows that see no key have equal weights: nothing of their logits is left beside such a number."""
    kept = np.ones((B, 1, 1, S), bool)
    kept[0] = False
    kept[1, ..., :7] = False
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D), kept]

    def function(q, k, v, kept):
        return attend(lambda x: PADDINGS[name](x, kept), q, k, v)

    check(function, *args, calls=[FORWARD], tolerance=2e-6)
    # Hidden by addition, not by selection: the gradients of such rows reach their logits.
    check(gradient(function), *args, calls=[FORWARD, BACKWARD], tolerance=1e-5)
    note = matched(function, *args)[1].notes[0]
    assert "mask=b11s" in note and "bias" not in note
    assert ("upper=0" in note) is (name == "nested")


def test_a_bias_that_hides_nothing_leaves_the_band(draw):
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D), draw(N, T, S)]

    def function(q, k, v, bias):
        return attend(lambda x: x + jnp.where(lower(), 0, LOWEST) + 2 * bias, q, k, v)

    check(function, *args, calls=[FORWARD], tolerance=5e-6, biased=True)
    assert "upper=0" in matched(function, *args)[1].notes[0]


@pytest.mark.parametrize("added", [False, True])
def test_the_lowest_f16_hides(draw, added):
    args = [jnp.asarray(draw(B, T, N, D), jnp.float16) for _ in range(3)]
    lowest = jnp.finfo(jnp.float16).min

    def hide(x):
        return x + jnp.where(lower(), jnp.float16(0), lowest) if added else jnp.where(lower(), x, lowest)

    _, result = matched(lambda q, k, v: attend(hide, q, k, v), *args)
    assert "upper=0" in result.notes[0]
    assert "mask" not in result.notes[0] and "bias" not in result.notes[0]


@pytest.mark.parametrize("name", ["one less the mask", "constant bias", "window of triangles", "scaled after the mask"])
def test_triangles_are_bands(draw, name):
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D)]
    _, result = matched(SPELLINGS[name][0], *args)
    assert "upper=0" in result.notes[0]
    assert "mask" not in result.notes[0] and "bias" not in result.notes[0]


def test_padding_as_a_bias(draw, rng):
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D), (rng.random((B, S)) < 0.8).astype(np.float32)]

    def bert(q, k, v, kept):
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / 4 + (1 - kept)[:, None, None, :] * -1e9
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    check(bert, *args, calls=[FORWARD], tolerance=2e-6)


def test_two_biases_are_added(draw):
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D), draw(N, T, S), draw(B, S)]

    def function(q, k, v, positions, padding):
        logits = jnp.einsum("bthd,bshd->bhts", q, k) + positions + padding[:, None, None, :]
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v)

    check(function, *args, calls=[FORWARD], tolerance=5e-6, biased=True)


def test_one_query(draw):
    args = [draw(B, 1, N, D), draw(B, S, K, D), draw(B, S, K, D)]

    def decode(q, k, v):
        return dpa(q, k, v, key_value_seq_lengths=jnp.array([3, S]))

    check(decode, *args, calls=[FORWARD], tolerance=2e-6)


@pytest.mark.parametrize("name", ["causal, grouped", "llama", "written out", "by logarithms", "by logarithms, grouped"])
def test_bfloat16(draw, name):
    """bf16 programs round weights and products where the call does not: it is as close to the exact result. The loss is
    left out, as a sum of numbers of both signs is right by chance."""
    function, heads = SPELLINGS[name]
    args = [jnp.asarray(draw(*dims), jnp.bfloat16) for dims in ((B, T, N, D), (B, S, heads, D), (B, S, heads, D))]

    def output_and_gradients(*args):
        def loss(*args):
            out = function(*args)
            wide = out.astype(jnp.float32)
            return jnp.sum(wide * jnp.cos(wide)), out

        (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*args)
        return out, gradients

    module, result = matched(output_and_gradients, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    exact = jax.jit(output_and_gradients)(*(a.astype(jnp.float32) for a in args))
    exact = [np.asarray(x, np.float64) for x in jax.tree.leaves(exact)]
    assert_as_close(run(result.module, args), run(module, args), exact)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_precision(draw, precision):
    """HLO's default lets an accelerator round f32 to TF32; what a program asks for beyond it is kept."""
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D)]
    with jax.default_matmul_precision(precision):
        _, result = matched(gradient(written_out), *args)
    assert targets(result.module) == [FORWARD, BACKWARD]
    assert ("tf32" in result.notes[0]) is (precision is None)


def test_rematerialized(draw):
    """The backward computation has no output of its own; a loop's body gets back the mask that was hoisted out."""
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D)]
    calls = [FORWARD, FORWARD, BACKWARD]
    check(gradient(jax.checkpoint(written_out)), *args, calls=calls, tolerance=1e-5)
    check(gradient(scanned), *args, calls=calls, tolerance=2e-5)


def einsums(change_logits=lambda x: x, change_weights=lambda x: x):
    def function(q, k, v):
        weights = change_weights(jax.nn.softmax(change_logits(jnp.einsum("bthd,bshd->bhts", q, k))))
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    return function


def returns_weights(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", weights, v), weights


def no_maximum(q, k, v):
    weights = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k))
    return jnp.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


def other_keys(q, k, v):
    """A gradient that somebody made with other keys than the attention's."""
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    upstream = jnp.einsum("bthe,bshe->bhts", q, v)
    gradient = weights * (upstream - jnp.sum(weights * upstream, -1, keepdims=True))
    return jnp.einsum("bhts,bshd->bthd", weights, v), jnp.einsum("bhts,bshd->bthd", gradient, k + 1)


def with_a_sink(q, k, v):
    logits = jnp.pad(jnp.einsum("bthd,bshd->bhts", q, k), ((0, 0), (0, 0), (0, 0), (0, 1)))
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits)[..., :-1], v)


def base_of_two(q, k, v):
    weights = jnp.exp2(jax.nn.log_softmax(jnp.einsum("bthd,bshd->bhts", q, k)))
    return jnp.einsum("bhts,bshd->bthd", weights, v)


NEAR_MISSES = {
    "logarithms to another base": (base_of_two, "no values are weighted"),
    "one more key that has no value": (with_a_sink, "pad"),
    "logits of another function": (einsums(lambda x: 50 * jnp.sin(x / 50)), "sine"),
    "dropout": (einsums(change_weights=lambda p: p * (jnp.cos(p) > 0.5)), "no values are weighted"),
    "the weights are wanted": (returns_weights, "call does not give"),
    "a finite fill below a bias": (
        einsums(lambda x: jnp.where(jnp.arange(T)[:, None] < 3, x, -1e9) + jnp.cos(x[:1])),
        "changes the logits",
    ),
    "other keys in the gradient": (other_keys, "another array"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(draw, name):
    function, reason = NEAR_MISSES[name]
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D)]
    module, result = matched(function, *args)
    assert result.module is module
    assert len(result.notes) == 1
    assert re.search(f"^no attention at %.*({reason})", result.notes[0]), result.notes


def test_without_a_maximum_is_no_softmax(draw):
    """It overflows where a softmax does not."""
    args = [draw(B, T, N, D), draw(B, S, N, D), draw(B, S, N, D)]
    module, result = matched(no_maximum, *args)
    assert result.module is module and not result.notes
