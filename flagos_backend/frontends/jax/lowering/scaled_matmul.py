"""Block-scaled matrix products (microscaling formats): the operands are scaled in float32, then multiplied."""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
from jax import lax

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.lowering.rule import LoweringRule


def _dequantize(values: Any, scales: Any) -> Any:
    """Each scale belongs to a block of consecutive elements along the last dimension."""
    block = values.shape[-1] // scales.shape[-1]
    return values.astype(jnp.float32) * jnp.repeat(scales.astype(jnp.float32), block, axis=-1)


def _scaled_matmul(a: Any, b: Any, a_scales: Any, b_scales: Any, *, preferred_element_type: Any) -> tuple[Any]:
    """[B,M,K] and [B,N,K] with scales [B,M,K/block] and [B,N,K/block] to [B,M,N]."""
    product = lax.dot_general(
        _dequantize(a, a_scales),
        _dequantize(b, b_scales),
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
    )
    return (product.astype(preferred_element_type),)


def _rule(ctx: Any, *operands: Any, **parameters: Any) -> Any:
    return jax_internals.lower_function(_scaled_matmul)(ctx, *operands, **parameters)


RULES: Final = (LoweringRule("jax._src.cudnn.scaled_matmul_stablehlo", "_scaled_matmul_p", _rule),)
