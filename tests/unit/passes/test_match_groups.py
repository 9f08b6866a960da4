"""Attention whose program repeats keys and values for groups of queries takes them as they were; so do its gradients,
which the kernel sums over the group; float64 is the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from flagos_backend.ir.attributes import DimensionsAttributes
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import leaves
from support.matching import (
    assert_as_close_as_the_program,
    errors,
    exact,
    gradient,
    matched,
    run,
    targets,
    weights_like,
)

B, T, D, E = 2, 24, 8, 6  # weights_like looks for two dimensions of 24


def causal(logits):
    return jnp.where(jnp.tril(jnp.ones((T, T), bool)), logits, -1e30)


def attend(q, k, v):
    logits = causal(jnp.einsum("bthd,bshd->bhts", q, k) / 3)
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(logits), v)


def repeated(q, k, v):
    """As Llama, and PyTorch's repeat_interleave."""
    groups = q.shape[2] // k.shape[2]
    return attend(q, jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2))


def repeated_heads_first(q, k, v):
    """As transformers' repeat_kv."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = (jnp.broadcast_to(x[:, :, None], (*x.shape[:2], groups, *x.shape[2:])) for x in (k, v))
    k, v = (x.reshape(B, -1, *x.shape[3:]) for x in (k, v))
    weights = jax.nn.softmax(causal(q @ k.swapaxes(2, 3) / 3))
    return (weights @ v).swapaxes(1, 2)


def broadcast(q, k, v):
    """Groups have a dimension of their own, also in the keys."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.broadcast_to(x[:, :, :, None], (*x.shape[:3], groups, x.shape[3])) for x in (k, v))
    logits = causal(jnp.einsum("btkgd,bskgd->bkgts", q.reshape(B, T, k.shape[2], groups, D), k) / 3)
    return jnp.einsum("bkgts,bskge->btkge", jax.nn.softmax(logits), v).reshape(B, T, q.shape[2], E)


def named(q, k, v):
    """Groups have a dimension of their own in the queries alone."""
    logits = causal(jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, k.shape[2], -1, D), k) / 3)
    return jnp.einsum("bkgts,bske->btkge", jax.nn.softmax(logits), v).reshape(B, T, q.shape[2], E)


def wide(q, k, v):
    """Repeated in the type of the arguments, computed in f32."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2).astype(jnp.float32) for x in (k, v))
    return attend(q.astype(jnp.float32), k, v).astype(q.dtype)


SPELLINGS = {f.__name__: f for f in (repeated, repeated_heads_first, broadcast, named, wide)}


def biased(q, k, v):
    """A bias and a mask of the query's heads are taken apart as the queries are."""
    groups, heads = q.shape[2] // k.shape[2], q.shape[2]
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    logits = jnp.einsum("bthd,bshd->bhts", q, k) / 3 + jnp.cos(q[:, :1, :, :1]).swapaxes(1, 2)
    seen = (jnp.arange(T)[None, :] % (2 + jnp.arange(heads)[:, None]) != 1)[None, :, None, :]
    return jnp.einsum("bhts,bshe->bthe", jax.nn.softmax(jnp.where(seen, causal(logits), -1e30)), v)


def repeats(module: Module) -> list[str]:
    """Float arrays of at least four dimensions, which are here the keys and values, repeated."""
    return [
        str(instruction)
        for computation in module.computations()
        for instruction in computation.instructions
        if instruction.opcode is Opcode.BROADCAST
        and instruction.attributes_as(DimensionsAttributes).dimensions
        and next(leaves(instruction.operands[0].shape)).element_type.is_float
        and len(next(leaves(instruction.shape)).dims) >= 4
    ]


def arguments(rng, heads, key_heads, dtype=jnp.float32):
    dims = ((B, T, heads, D), (B, T, key_heads, D), (B, T, key_heads, E))
    return [jnp.asarray(rng.standard_normal(d), dtype) for d in dims]


@pytest.mark.parametrize("differentiate", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_nothing_is_repeated(rng, name, heads, differentiate):
    args = arguments(rng, *heads)
    function = gradient(SPELLINGS[name]) if differentiate else SPELLINGS[name]
    _, result = matched(function, *args)
    assert targets(result.module) == ([FORWARD, BACKWARD] if differentiate else [FORWARD]), result.notes
    assert not repeats(result.module)
    assert not weights_like(result.module)
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", SPELLINGS)
def test_gradients_of_half_types_are_as_close_as_the_program(rng, name, dtype):
    args = arguments(rng, 6, 2, dtype)
    function = gradient(SPELLINGS[name])
    module, result = matched(function, *args)
    assert_as_close_as_the_program(function, args, module, result)
    assert not repeats(result.module)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)], ids=str)
def test_some_gradients(rng, wanted):
    args = arguments(rng, 4, 2)
    function = gradient(repeated, wanted)
    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD]
    assert not repeats(result.module)
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


@pytest.mark.parametrize("differentiate", [False, True])
def test_bias_and_mask(rng, differentiate):
    args = arguments(rng, 4, 2)
    function = gradient(biased, (1, 2)) if differentiate else biased
    _, result = matched(function, *args)
    assert targets(result.module) == ([FORWARD, BACKWARD] if differentiate else [FORWARD]), result.notes
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5
    assert "bthyd,bshd,bshe->bthye" in result.notes[0]


UNSUMMED = {
    "both are wanted": lambda dk: (dk, dk.reshape(B, T, 2, 2, D).sum(3)),
    "each head's is wanted": lambda dk: jnp.sin(dk),
    "other heads are summed": lambda dk: dk.reshape(B, T, 2, 2, D).sum(2),
    "the greatest is wanted": lambda dk: dk.reshape(B, T, 2, 2, D).max(3),
    "positions are summed, too": lambda dk: dk.reshape(B, T, 2, 2, D).sum((1, 3)),
}


@pytest.mark.parametrize("name", UNSUMMED)
def test_gradients_that_are_not_summed_over_the_group_are_those_of_repeated_keys(rng, name):
    args = arguments(rng, 4, 2)

    def function(q, k, v):
        k, v = jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2)
        return UNSUMMED[name](jax.grad(lambda k: jnp.sum(jnp.sin(attend(q, k, v))))(k))

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD, BACKWARD]
    assert repeats(result.module)
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5


def test_other_repetitions_of_the_values_are_kept(rng):
    """Their heads belong to other keys than the keys' own."""
    args = arguments(rng, 4, 2)

    def function(q, k, v):
        return attend(q, jnp.repeat(k, 2, axis=2), jnp.concatenate([v, v], axis=2))

    _, result = matched(function, *args)
    assert targets(result.module) == [FORWARD]
    assert repeats(result.module)
    assert max(errors(run(result.module, args), exact(function, args))) < 1e-5
