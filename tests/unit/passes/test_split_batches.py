"""Attention over batches and heads that were merged into one dimension becomes a call; other products stay so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.verifier import verify
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.passes.attention.split_batches import split_batches
from flagos_backend.passes.dce import eliminate_dead_code
from programs import hlo_bytes, run_on_xla
from support.against_xla import assert_same, from_storage, to_storage
from support.matching import check, gradient, matched
from support.passes import simplified

B, N, T, D = 2, 4, 24, 8


def merged(x):
    return x.reshape(B * N, *x.shape[2:])


def apart(x):
    return x.reshape(B, N, *x.shape[1:])


def matmul(a, b):
    """As PyTorch's matmul of arrays of four dimensions."""
    return apart(jax.lax.batch_matmul(merged(a), merged(b)))


def eager(q, k, v):
    logits = matmul(q, k.swapaxes(2, 3)) / np.sqrt(D)
    logits = jnp.where(jnp.tril(jnp.ones((T, T), bool)), logits, -jnp.inf)
    return matmul(jax.nn.softmax(logits), v)


def scaled_while_merged(q, k, v):
    logits = apart(jax.lax.batch_matmul(merged(q), merged(k).swapaxes(1, 2)) * 0.25)
    logits = merged(logits + jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0, -1e9))
    return apart(jax.lax.batch_matmul(jax.nn.softmax(logits), merged(v)))


@pytest.fixture
def draw(rng):
    return lambda *dims: rng.standard_normal(dims).astype(np.float32)


def left_merged(q, k, v):
    """Nobody takes the result apart."""
    return merged(eager(q, k, v))


def given_merged(q, k, v):
    """The arguments were merged before the program; its masks were not."""
    logits = apart(jax.lax.batch_matmul(q, k.swapaxes(1, 2)) * 0.25)
    logits = jnp.where(jnp.tril(jnp.ones((T, T), bool)), logits, -1e9)
    return jax.lax.batch_matmul(merged(jax.nn.softmax(logits)), v)


def repeated(q, k, v):
    """Keys and values of half as many heads: what merges their repetition says nothing of the queries' heads."""
    k, v = (jnp.broadcast_to(x[:, : N // 2, None], (B, N // 2, 2, T, D)).reshape(B * N, T, D) for x in (k, v))
    logits = apart(jax.lax.batch_matmul(merged(q), k.swapaxes(1, 2)))
    logits = jnp.where(jnp.tril(jnp.ones((T, T), bool)), logits, -1e9)
    return apart(jax.lax.batch_matmul(merged(jax.nn.softmax(logits)), v))


@pytest.mark.parametrize("function", [left_merged, given_merged, repeated])
def test_other_merged_batches(draw, function):
    """Also with gradients; each is matched once."""
    dims = (B * N, T, D) if function is given_merged else (B, N, T, D)
    args = [draw(*dims) for _ in range(3)]
    check(function, *args, calls=[FORWARD], tolerance=2e-6)
    check(gradient(function), *args, calls=[FORWARD, BACKWARD], tolerance=1e-5)
    assert "upper=0" in matched(function, *args)[1].notes[0]


@pytest.mark.parametrize("function", [eager, scaled_while_merged])
def test_attention_over_a_merged_batch(draw, function):
    args = [draw(B, N, T, D) for _ in range(3)]
    check(function, *args, calls=[FORWARD], tolerance=2e-6)
    check(gradient(function), *args, calls=[FORWARD, BACKWARD], tolerance=1e-5)
    assert "upper=0" in matched(function, *args)[1].notes[0]


def test_what_is_no_attention_stays_as_it_is(draw):
    args = [draw(B, N, T, D) for _ in range(3)]
    module, result = matched(lambda q, k, v: matmul(jnp.tanh(matmul(q, k.swapaxes(2, 3))), v), *args)
    assert result.module is module


def rounded(a, b):
    return apart(jnp.cos(jax.lax.batch_matmul(merged(a), merged(b)).astype(jnp.bfloat16).astype(jnp.float32)) + 1)


def with_a_merged_bias(a, b, bias):
    return apart(jax.lax.batch_matmul(merged(a), merged(b)) * 2 + bias[:, None])


def transposed(a, b):
    product = jax.lax.batch_matmul(merged(a).swapaxes(1, 2), merged(b).swapaxes(1, 2))
    return product.transpose(1, 0, 2).reshape(T, B, N, D)


def one_side(a, b):
    return apart(jax.lax.batch_matmul(merged(a), b))


def apart_for_a_while(a, b, bias):
    """No operand was ever apart, or is an argument."""
    return jnp.sin(merged(apart(jax.lax.batch_matmul(jnp.cos(a), jnp.cos(b))) + bias))


def summed_while_merged(a, b, bias):
    return jnp.sin(merged(matmul(a, b) * bias)).sum(0)


PRODUCTS = {
    "rounded": (rounded, [(B, N, T, D), (B, N, D, T)]),
    "a merged bias": (with_a_merged_bias, [(B, N, T, D), (B, N, D, T), (B * N, T)]),
    "transposed": (transposed, [(B, N, D, T), (B, N, D, D)]),
    "one side was never apart": (one_side, [(B, N, T, D), (B * N, D, T)]),
    "apart for a while": (apart_for_a_while, [(B * N, T, D), (B * N, D, T), (B, 1, T, T)]),
    "summed while merged": (summed_while_merged, [(B, N, T, D), (B, N, D, T), (N, T, T)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_compute_the_same(draw, name):
    function, dims = PRODUCTS[name]
    args = [draw(*d) for d in dims]
    module = simplified(import_module(hlo_bytes(function, *args)))
    split = eliminate_dead_code(split_batches(module))
    verify(split)
    assert split is not module
    assert not any(str(B * N) in str(i.shape).split(",")[0] for i in split.entry.instructions if i.opcode == "dot")
    tensors = [to_storage(a, p.shape) for a, p in zip(args, split.entry.parameters, strict=True)]
    plan = build_plan(split.entry)
    ours = [from_storage(t, s) for t, s in zip(plan.run(Run(), tensors), plan.result_shapes, strict=True)]
    for a, b in zip(ours, run_on_xla(hlo_bytes(function, *args), args), strict=True):
        assert_same(a, b, 2e-2 if name == "rounded" else 1e-5)


def test_a_product_without_a_batch_keeps_its_rows(draw):
    module = simplified(
        import_module(hlo_bytes(lambda x, w: (x.reshape(B * T, D) @ w).reshape(B, T, D), draw(B, T, D), draw(D, D)))
    )
    assert split_batches(module) is module
