"""Attention for which a program asks cuDNN by name, which JAX allows where its own CUDA plugin has it: JAX's other
implementation of the same function, which becomes one kernel here as all attention does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.errors import UnsupportedParameter
from flagos_backend.frontends.jax.lowering.rule import LoweringRule

_MODULE: Final = "jax._src.cudnn.fused_attention_stablehlo"
# The numbers that JAX has for a layout and for masks.
_HEADS_FIRST: Final = 1
_NO_MASK, _PADDING, _CAUSAL, _PADDING_CAUSAL = range(4)


def _attention(
    query: Any, key: Any, value: Any, bias: Any, lengths: Sequence[Any], parameters: dict[str, Any]
) -> tuple[Any, Any]:
    """The result, in the queries' layout, and the logarithms of each query's sum of weights: [B,N,T]."""
    heads_first = parameters["layout"] == _HEADS_FIRST
    mask = parameters["mask_type"].value
    window = parameters["sliding_window_length"]
    has_bias, _ = parameters["variadic_args"]
    query_lengths, key_lengths = lengths if mask in (_PADDING, _PADDING_CAUSAL) else (None, None)
    if heads_first:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    result, residual = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias if has_bias else None,
        scale=parameters["scale"],
        is_causal=mask in (_CAUSAL, _PADDING_CAUSAL),
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla",
        return_residual=True,
    )
    return jnp.swapaxes(result, 1, 2) if heads_first else result, jnp.swapaxes(residual, 1, 2).astype(jnp.float32)


def _refuse_others(ctx: Any, parameters: dict[str, Any]) -> None:
    offsets, pages = ctx.avals_in[6], ctx.avals_in[8]
    refused = {
        "packed sequences (q_offsets)": offsets.ndim == 2 and offsets.shape[1] > 2,
        "pages (page_table_k)": pages.ndim == 4,
        f"dropout_rate {parameters['dropout_rate']}": parameters["dropout_rate"] > 0,
        str(parameters["mask_type"]): parameters["mask_type"].value > _PADDING_CAUSAL,
    }
    for parameter, is_given in refused.items():
        if is_given:
            raise UnsupportedParameter(
                primitive="dot_product_attention of cuDNN",
                parameter=parameter,
                reason="JAX's own implementation does not have it",
                cure="Write the attention out, which becomes one kernel where it can",
            )


def _forward(ctx: Any, *operands: Any, **parameters: Any) -> Any:
    _refuse_others(ctx, parameters)

    def attention(query: Any, key: Any, value: Any, bias: Any, *others: Any) -> Any:
        return _attention(query, key, value, bias, others[:2], parameters)[: len(ctx.avals_out)]

    return jax_internals.lower_function(attention)(ctx, *operands)


def _backward(ctx: Any, *operands: Any, **parameters: Any) -> Any:
    _refuse_others(ctx, parameters)

    def gradients(query: Any, key: Any, value: Any, bias: Any, *others: Any) -> Any:
        def attention(query: Any, key: Any, value: Any, bias: Any) -> Any:
            return _attention(query, key, value, bias, others[:2], parameters)[0]

        _, pull_back = jax.vjp(attention, query, key, value, bias)
        return pull_back(others[-1])[: len(ctx.avals_out)]

    return jax_internals.lower_function(gradients)(ctx, *operands)


RULES: Final = (
    LoweringRule(_MODULE, "_dot_product_attention_fwd_p", _forward),
    LoweringRule(_MODULE, "_dot_product_attention_bwd_p", _backward),
)
