"""Products of ragged groups stay one instruction, which the backend computes or expands as the target has it: JAX's
default is one product of all rows for each group, masked."""

from __future__ import annotations

from typing import Any, Final

from jax import lax

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.lowering.rule import LoweringRule

_LAX: Final = "jax._src.lax.lax"


def _is_one_instruction(ctx: Any, dimension_numbers: Any, precision: Any) -> bool:
    """Whether the instruction says all of it, as JAX means it."""
    (_, (batch, _)) = dimension_numbers.dot_dimension_numbers
    (ragged,) = dimension_numbers.lhs_ragged_dimensions
    lhs, rhs, *_ = ctx.avals_in
    avals = (*ctx.avals_in, *ctx.avals_out)
    return (
        # jaxlib's partitioner does not split the instruction.
        jax_internals.num_devices(ctx) == 1
        # Of groups along a batch JAX computes all elements, and the instruction those in groups.
        and ragged not in batch
        # It takes real numbers of one type, and has no algorithm.
        and lhs.dtype == rhs.dtype
        and lhs.dtype.kind not in "bc"
        and not isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)
        and jax_internals.dynamic_result_shapes(ctx, avals) is None
    )


def _rule(ctx: Any, *operands: Any, ragged_dot_dimension_numbers: Any, precision: Any, **parameters: Any) -> Any:
    rule = jax_internals.lower_ragged_dot
    if not _is_one_instruction(ctx, ragged_dot_dimension_numbers, precision):
        products = jax_internals.lookup(_LAX, "_ragged_dot_general_impl")
        rule = jax_internals.lower_function(products, multiple_results=False)
    parameters |= {"ragged_dot_dimension_numbers": ragged_dot_dimension_numbers, "precision": precision}
    return rule(ctx, *operands, **parameters)


RULES: Final = (LoweringRule(_LAX, "ragged_dot_general_p", _rule),)
