"""What a lowering rule is, and how one emits a flagos custom call (kernels/reference/CUSTOM_CALLS.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagos_backend.frontends.jax import jax_internals


@dataclass(frozen=True)
class LoweringRule:
    """A rule for the primitive that ``module`` holds under the name ``primitive``."""

    module: str
    primitive: str
    function: Callable[..., Any]


def custom_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    config: Mapping[str, Any] | None = None,
    *,
    num_batch_dims: int | None = None,
) -> list[Any]:
    """The results of a custom call with one result for each of the rule's outputs.

    With ``num_batch_dims`` the partitioner may split the call along that many leading dimensions.
    """
    result_shapes = jax_internals.dynamic_result_shapes(ctx, ctx.avals_out)
    attributes, ranks = None, None
    if num_batch_dims is not None and result_shapes is None:
        attributes = jax_internals.batch_partitioning_attributes(ctx, num_batch_dims, ctx.avals_in, ctx.avals_out)
        ranks = ([aval.ndim for aval in ctx.avals_in], [aval.ndim for aval in ctx.avals_out])
    operation = jax_internals.custom_call(
        target,
        jax_internals.ir_types(ctx, ctx.avals_out),
        operands,
        json.dumps(config or {}, sort_keys=True),
        result_shapes=result_shapes,
        attributes=attributes,
        ranks=ranks,
    )
    return list(operation.results)
