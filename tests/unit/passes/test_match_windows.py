"""Attention within shifted windows, as Swin has it: logits over images and windows in one dimension, which is taken
apart for the windows' mask. NumPy's float64, written out here, is the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from support.biases import backward_of, of_bias
from support.matching import assert_as_close_as_the_program, assert_near_miss, errors, matched, run, targets

B, SIDE, WINDOW, H, D = 3, 8, 4, 2, 8  # images of SIDE x SIDE in windows of WINDOW x WINDOW
ACROSS = SIDE // WINDOW
W, N, C = ACROSS**2, WINDOW**2, H * D
SHIFT = WINDOW // 2


def places():
    """Which entry of the table is the bias of a query and a key."""
    at = np.stack(np.meshgrid(np.arange(WINDOW), np.arange(WINDOW), indexing="ij")).reshape(2, -1)
    apart = at[:, :, None] - at[:, None] + WINDOW - 1
    return apart[0] * (2 * WINDOW - 1) + apart[1]


def windows_mask(hidden):
    """[W, N, N]: positions that stood apart in the image, which was rolled, do not see each other."""
    region = np.digitize(np.arange(SIDE), [SIDE - WINDOW, SIDE - SHIFT])
    regions = region[:, None] * 3 + region
    in_windows = regions.reshape(ACROSS, WINDOW, ACROSS, WINDOW).swapaxes(1, 2).reshape(W, N)
    return np.where(in_windows[:, :, None] == in_windows[:, None], 0.0, hidden).astype(np.float32)


def oracle(q, k, v, table, mask, g):
    """Output, and gradients of queries, keys, values and table: arrays [B * W, H, N, D]."""
    q, k, v, table, mask, g = (np.asarray(x, np.float64) for x in (q, k, v, table, mask, g))
    bias = table[places()].transpose(2, 0, 1)
    logits = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(D) + bias + np.tile(mask, (B, 1, 1))[:, None]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("bhtd,bhsd->bhts", g, v)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    of_table = np.zeros_like(table)
    np.add.at(of_table, places(), of_logits.sum(0).transpose(1, 2, 0))
    return [
        weights @ v,
        of_logits @ k / np.sqrt(D),
        of_logits.swapaxes(2, 3) @ q / np.sqrt(D),
        weights.swapaxes(2, 3) @ g,
        of_table,
    ]


def of_table(table):
    return table[places().reshape(-1)].reshape(N, N, H).transpose(2, 0, 1)[None]


def product(q, k):
    return (q * D**-0.5) @ k.swapaxes(2, 3)


def apart(x):
    return x.reshape(B, W, *x.shape[1:])


def together(x):
    return x.reshape(B * W, *x.shape[2:])


def swin(q, k, v, table, mask):
    logits = together(apart(product(q, k) + of_table(table)) + mask[None, :, None])
    return jax.nn.softmax(logits).astype(v.dtype) @ v


def mask_first(q, k, v, table, mask):
    logits = together(apart(product(q, k)) + mask[None, :, None]) + of_table(table)
    return jax.nn.softmax(logits) @ v


def together_after_the_softmax(q, k, v, table, mask):
    logits = apart(product(q, k) + of_table(table)) + mask[None, :, None]
    return together(jax.nn.softmax(logits)) @ v


def chosen(q, k, v, table, mask):
    logits = apart(product(q, k) + of_table(table))
    return jax.nn.softmax(together(jnp.where(mask[None, :, None] == 0, logits, -1e9))) @ v


def by_einsum(q, k, v, table, mask):
    """Over arrays [B * W, N, H, D]."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D) + of_table(table)
    logits = together(apart(logits) + mask[None, :, None])
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits), v).swapaxes(1, 2)


def heads_merged(q, k, v, table, mask):
    """As PyTorch's matmul of arrays of four dimensions."""
    q, k, v = (x.reshape(-1, N, D) for x in (q, k, v))
    logits = jax.lax.batch_matmul(q * D**-0.5, k.swapaxes(1, 2)).reshape(B * W, H, N, N) + of_table(table)
    logits = together(apart(logits) + mask[None, :, None])
    return jax.lax.batch_matmul(jax.nn.softmax(logits).reshape(-1, N, N), v).reshape(B * W, H, N, D)


SPELLINGS = {
    f.__name__.replace("_", " "): f
    for f in (swin, mask_first, together_after_the_softmax, chosen, by_einsum, heads_merged)
}


def with_gradients(function):
    def both(q, k, v, table, mask, g):
        output, pullback = jax.vjp(lambda *arrays: function(*arrays, mask), q, k, v, table)
        return output, *pullback(g)

    return both


def draw(rng, hidden=-100.0, dtype=jnp.float32):
    """Tables of one size for all: their differences count beside the logits."""
    arrays = [jnp.asarray(rng.standard_normal((B * W, H, N, D)), dtype) for _ in range(4)]
    table = jnp.asarray(rng.standard_normal(((2 * WINDOW - 1) ** 2, H)), dtype)
    return [*arrays[:3], table, windows_mask(hidden).astype(dtype), arrays[3]]


def over_windows(module):
    """Arrays over all windows, queries and keys."""
    dims = [i.shape.dims for i in module.entry.instructions if hasattr(i.shape, "dims")]
    return [d for d in dims if d.count(N) >= 2 and np.prod(d) >= B * W * H * N * N]


@pytest.mark.parametrize("given", [True, False], ids=["given", "constant"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(rng, name, given):
    """``given``: the mask is an argument of the program."""
    args = draw(rng)
    true = oracle(*args)
    function = SPELLINGS[name]
    for whole, calls, wanted in (
        (lambda q, k, v, table, mask, g: function(q, k, v, table, mask), [FORWARD], true[:1]),
        (with_gradients(function), [FORWARD, BACKWARD], true),
    ):
        mask = args[4]

        def program(q, k, v, table, g, *rest, mask=mask, whole=whole):
            return whole(q, k, v, table, *(rest or (jnp.asarray(mask),)), g)

        arguments = [*args[:4], args[5], *([mask] if given else [])]
        _, result = matched(program, *arguments)
        assert targets(result.module) == calls, result.notes
        assert len(result.notes) == 1 and not over_windows(result.module)
        assert max(errors(run(result.module, arguments), wanted)) < 2e-6


def test_the_table_has_its_gradient_from_the_call(rng):
    """Summed over images and windows, of which the mask has the latter."""
    _, result = matched(with_gradients(swin), *draw(rng))
    assert sorted(of_bias(backward_of(result.module))) == sorted("cts")


def test_the_gradient_of_the_mask(rng):
    """Windows keep theirs, heads are summed."""
    args = draw(rng)

    def function(q, k, v, table, mask, g):
        return jax.vjp(lambda mask: swin(q, k, v, table, mask), mask)[1](g)

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    q, k, v, table, mask, g = (np.asarray(x, np.float64) for x in args)
    logits = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(D) + table[places()].transpose(2, 0, 1)
    logits = logits.reshape(B, W, H, N, N) + mask[:, None]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("bhtd,bhsd->bhts", g, v).reshape(weights.shape)
    true = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    assert max(errors(run(result.module, args), [true.sum((0, 2))])) < 2e-6


def layer(x, projections, table, mask):
    """A whole layer: images are rolled and cut into windows, queries, keys and values are one product."""
    x = jnp.roll(x, (-SHIFT, -SHIFT), (1, 2)).reshape(B, ACROSS, WINDOW, ACROSS, WINDOW, C)
    x = x.swapaxes(2, 3).reshape(B * W, N, C)
    q, k, v = (x @ projections[:, : 3 * C]).reshape(B * W, N, 3, H, D).transpose(2, 0, 3, 1, 4)
    x = swin(q, k, v, table, mask).swapaxes(1, 2).reshape(B * W, N, C) @ projections[:, 3 * C :]
    x = x.reshape(B, ACROSS, ACROSS, WINDOW, WINDOW, C).swapaxes(2, 3).reshape(B, SIDE, SIDE, C)
    return jnp.roll(x, (SHIFT, SHIFT), (1, 2))


def test_a_layer(rng):
    """Queries, keys and values are computed of windows that were cut out of images."""
    table, mask = draw(rng)[3:5]
    args = [
        jnp.asarray(rng.standard_normal((B, SIDE, SIDE, C)), jnp.float32),
        jnp.asarray(rng.standard_normal((C, 4 * C)) / 4, jnp.float32),
        table,
    ]

    def function(x, projections, table):
        output, pullback = jax.vjp(lambda *a: layer(*a, jnp.asarray(mask)), x, projections, table)
        return output, *pullback(jnp.cos(x))

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    with jax.enable_x64(True):
        true = [np.asarray(a) for a in jax.jit(function)(*(np.asarray(a, np.float64) for a in args))]
    assert max(errors(run(result.module, args), true)) < 5e-6


def cosine(q, k, v, table, temperature):
    """Swin's second version: logits are cosines, times a temperature of each head that is learned."""
    q, k = (x / jnp.sqrt((x * x).sum(-1, keepdims=True)) for x in (q, k))
    logits = q @ k.swapaxes(2, 3) * jnp.exp(jnp.minimum(temperature, 4.6)) + of_table(jax.nn.sigmoid(table))
    logits = together(apart(logits) + jnp.asarray(windows_mask(-100.0))[None, :, None])
    return jax.nn.softmax(logits) @ v


def test_cosines(rng):
    args = draw(rng)
    args[4] = jnp.asarray(rng.standard_normal((H, 1, 1)), jnp.float32)

    def function(q, k, v, table, temperature, g):
        output, pullback = jax.vjp(cosine, q, k, v, table, temperature)
        return output, *pullback(g)

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    with jax.enable_x64(True):
        true = [np.asarray(a) for a in jax.jit(function)(*(np.asarray(a, np.float64) for a in args))]
    assert max(errors(run(result.module, args), true)) < 1e-5


@pytest.mark.parametrize("hidden", [-1e9, float(np.finfo(np.float32).min), -np.inf])
def test_what_hides_keys(rng, hidden):
    args = draw(rng, hidden)
    _, result = matched(with_gradients(swin), *args)
    assert targets(result.module) == [FORWARD, BACKWARD], result.notes
    assert max(errors(run(result.module, args), oracle(*args))) < 2e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
def test_half_types(rng, dtype):
    args = draw(rng, dtype=dtype)
    function = with_gradients(swin)
    module, result = matched(function, *args)
    assert_as_close_as_the_program(function, args, module, result)


def with_heads(q, k, v, table, mask):
    """Windows and heads are one dimension while the mask is added."""
    logits = (product(q, k) + of_table(table)).reshape(B, W * H, N, N) + jnp.repeat(mask, H, axis=0)
    return jax.nn.softmax(logits.reshape(B * W, H, N, N)) @ v


def of_other_windows(q, k, v, table, mask):
    logits = apart(product(q, k) + of_table(table)) + mask[None, :, None]
    return jax.nn.softmax(together(jnp.flip(logits, 1))) @ v


def over_all_keys(q, k, v, table, mask):
    """One softmax over the keys of all of an image's windows."""
    logits = apart(product(q, k) + of_table(table)) + mask[None, :, None]
    weights = jax.nn.softmax(logits.transpose(0, 2, 3, 1, 4).reshape(B, H, N, W * N))
    return together(weights.reshape(B, H, N, W, N).transpose(0, 3, 1, 2, 4)) @ v


NEAR_MISSES = {
    "windows and heads in one": (with_heads, "reshape .* other dimensions"),
    "of other windows": (of_other_windows, "reshape .* other dimensions"),
    "over all keys": (over_all_keys, "reshape .* other dimensions"),
}


@pytest.mark.parametrize("differentiate", [False, True])
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(rng, name, differentiate):
    function, reason = NEAR_MISSES[name]
    args = draw(rng)
    if differentiate:
        assert_near_miss(with_gradients(function), args, reason)
    else:
        assert_near_miss(lambda q, k, v, table, mask, g: function(q, k, v, table, mask), args, reason)
