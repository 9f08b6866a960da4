"""Attention that asks for cuDNN, against the attention of JAX's that does not, on JAX's own CPU."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.frontends.jax.errors import UnsupportedParameter
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.opcode import Opcode
from support.passes import SIMULATED, matched_attention, run_until

_MODULE = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 6, 8, 4, 16
# Of float16, which cuDNN takes: sums of a few products that are rounded in one order or another.
CLOSE = {"rtol": 1e-2, "atol": 1e-2}


@pytest.fixture(autouse=True)
def cudnn_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX asks its CUDA plugin for the library and the chip before it binds the primitives."""
    monkeypatch.setattr(_MODULE, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(_MODULE, "check_is_flash_attention", lambda *_, **__: None)
    jax.clear_caches()


def arrays(rng: np.random.Generator, key_heads: int, queries: int = QUERIES) -> list[np.ndarray]:
    shapes = [(BATCH, queries, HEADS, WIDTH), *[(BATCH, KEYS, key_heads, WIDTH)] * 2]
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


def on(device: str, tree: Any) -> Any:
    """Of float32 on JAX's CPU, which multiplies no float16."""
    wide = lambda x: x.astype(np.float32) if x.dtype == np.float16 else x  # noqa: E731
    return jax.device_put(tree if device == "flagos" else jax.tree.map(wide, tree), jax.devices(device)[0])


def lengths(rng: np.random.Generator, most: int) -> np.ndarray:
    return rng.integers(1, most + 1, BATCH).astype(np.int32)


def options(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    bias = rng.standard_normal((BATCH, HEADS, QUERIES, KEYS)).astype(np.float16)
    mask = rng.integers(0, 2, (BATCH, 1, QUERIES, KEYS)).astype(bool)
    mask[..., 0] = True
    padding = {"query_seq_lengths": lengths(rng, QUERIES), "key_value_seq_lengths": lengths(rng, KEYS)}
    return {
        "plain": {},
        "scale": {"scale": 0.3},
        "causal": {"is_causal": True},
        "bias": {"bias": bias},
        "mask": {"mask": mask},
        "padding": padding,
        "causal padding": padding | {"is_causal": True},
        "window": {"is_causal": True, "local_window_size": (2, 0)},
    }[kind]


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("kind", ["plain", "scale", "causal", "bias", "mask", "padding", "causal padding", "window"])
def test_result_and_gradients(kind: str, key_heads: int, rng: np.random.Generator) -> None:
    given = options(rng, kind)
    others = {name: value for name, value in given.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in given.items() if name not in others}
    weights = rng.standard_normal((BATCH, QUERIES, HEADS, WIDTH)).astype(np.float16)

    def computed(implementation: str, device: str) -> list[np.ndarray]:
        @jax.jit
        def both(differentiated: list[jax.Array], others: dict[str, jax.Array], weights: jax.Array) -> Any:
            def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
                result = jax.nn.dot_product_attention(
                    query, key, value, **others, **static, implementation=implementation
                )
                return (result * weights).sum(), result

            # Without the loss, a sum of hundreds of rounded products, which may cancel.
            return jax.grad(loss, (0, 1, 2), has_aux=True)(*differentiated)

        return list(map(np.asarray, jax.tree.leaves(both(*on(device, (operands, others, weights))))))

    operands = arrays(rng, key_heads)
    ours = computed("cudnn", "flagos")
    theirs = computed("xla", "cpu")
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, **CLOSE)


def test_bias_has_a_gradient(rng: np.random.Generator) -> None:
    operands = [*arrays(rng, HEADS, KEYS), rng.standard_normal((1, HEADS, KEYS, KEYS)).astype(np.float16)]

    def gradient(implementation: str, device: str) -> np.ndarray:
        def loss(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
            result = jax.nn.dot_product_attention(query, key, value, bias, implementation=implementation)
            return jnp.sin(result).sum()

        return np.asarray(jax.jit(jax.grad(loss, 3))(*on(device, operands)))

    ours, theirs = gradient("cudnn", "flagos"), gradient("xla", "cpu")
    np.testing.assert_allclose(ours, theirs, **CLOSE)


def test_heads_first_with_the_logarithms_of_the_sums(rng: np.random.Generator) -> None:
    q, k, v = (x.swapaxes(1, 2) for x in arrays(rng, HEADS))
    attention = jax.jit(lambda *x: _MODULE.dot_product_attention(*x, qkv_layout="BNTH", return_residual=True))
    result, residual = map(np.asarray, attention(*on("flagos", (q, k, v))))
    logits = np.einsum("bnth,bnsh->bnts", q.astype(np.float64), k.astype(np.float64))
    sums = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    weights = np.exp(logits - sums[..., None])
    np.testing.assert_allclose(residual, sums, **CLOSE)
    np.testing.assert_allclose(result, np.einsum("bnts,bnsh->bnth", weights, v), **CLOSE)


def test_several_of_them_at_once(rng: np.random.Generator) -> None:
    """JAX's rule for vmap makes one call of them."""
    q, k, v = (np.stack([x, x[::-1]]) for x in arrays(rng, HEADS))

    def attention(implementation: str, device: str) -> np.ndarray:
        one = lambda *x: jax.nn.dot_product_attention(*x, implementation=implementation)  # noqa: E731
        return np.asarray(jax.jit(jax.vmap(one))(*on(device, (q, k, v))))

    ours, theirs = attention("cudnn", "flagos"), attention("xla", "cpu")
    np.testing.assert_allclose(ours, theirs, **CLOSE)


@pytest.mark.parametrize("kind", ["plain", "causal", "padding", "window"])
def test_accelerators_see_one_attention_and_one_gradient(kind: str, rng: np.random.Generator) -> None:
    given = options(rng, kind)

    def gradients(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **given)
        result, pull_back = jax.vjp(attention, query, key, value)
        return result, pull_back(cotangent)

    operands = [jnp.asarray(x, jnp.bfloat16) for x in arrays(rng, HEADS)]
    operands = on("flagos", [*operands, operands[0]])
    hlo = jax.jit(gradients).lower(*operands).compiler_ir("hlo").as_serialized_hlo_module_proto()
    found = matched_attention(run_until("match_attention", import_module(hlo), SIMULATED)).module
    instructions = [i for c in found.computations() for i in c.instructions]
    assert not [i for i in instructions if i.opcode is Opcode.DOT]
    assert [i.attributes_as(CustomCallAttributes).target for i in instructions if i.opcode is Opcode.CUSTOM_CALL] == [
        FORWARD,
        BACKWARD,
    ]


def test_dropout_is_refused_by_name(rng: np.random.Generator) -> None:
    operands = on("flagos", arrays(rng, HEADS))
    attention = jax.jit(lambda *x: _MODULE.dot_product_attention(*x, dropout_rate=0.5))
    with pytest.raises(UnsupportedParameter, match=r"dropout_rate 0\.5 is not supported on flagos"):
        attention(*operands)
