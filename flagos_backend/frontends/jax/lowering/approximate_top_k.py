"""Approximate top k, for which JAX's default sorts whole rows: the exact top k is cheaper than that on every device."""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
from jax import lax

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.lowering.rule import LoweringRule


def _rule(ctx: Any, operand: Any, *, reduction_dimension: int, is_max_k: bool, **_: Any) -> Any:
    # Without aggregation there are more results than k: as many of the best.
    count = ctx.avals_out[0].shape[reduction_dimension]

    def top_k(x: Any) -> tuple[Any, Any]:
        last = jnp.moveaxis(x if is_max_k else -x, reduction_dimension, -1)
        values, indices = (jnp.moveaxis(found, -1, reduction_dimension) for found in lax.top_k(last, count))
        return values if is_max_k else -values, indices

    return jax_internals.lower_function(top_k)(ctx, operand)


RULES: Final = (LoweringRule("jax._src.lax.ann", "approx_top_k_p", _rule),)
