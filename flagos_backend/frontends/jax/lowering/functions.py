"""Elementwise functions that HLO lacks, a custom call each: JAX's default is a hundred operations of every element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from flagos_backend.frontends.jax.lowering.rule import LoweringRule, custom_call
from flagos_backend.ir.functions import TABLE, TARGET_OF_FUNCTION

TARGETS: Final = tuple(TARGET_OF_FUNCTION.values())


def _rule(target: str) -> Callable[..., Any]:
    def rule(ctx: Any, x: Any, **_: Any) -> list[Any]:
        return custom_call(ctx, target, [x], num_batch_dims=ctx.avals_in[0].ndim)

    return rule


RULES: Final = tuple(
    LoweringRule("jax._src.lax.special", f"{function.name}_p", _rule(TARGET_OF_FUNCTION[function.opcode]))
    for function in TABLE
    if not function.in_hlo
)
