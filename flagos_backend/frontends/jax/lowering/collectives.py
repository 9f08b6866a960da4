"""Collectives that JAX lowers for GPUs only although they are plain StableHLO: pbroadcast."""

from __future__ import annotations

from typing import Any, Final

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.lowering.rule import LoweringRule

_MODULE: Final = "jax._src.lax.parallel"


def _pbroadcast(ctx: Any, operand: Any, **parameters: Any) -> Any:
    return jax_internals.lookup(_MODULE, "_pbroadcast_lowering")(ctx, operand, **parameters)


def _pbroadcast_start(ctx: Any, operand: Any, **parameters: Any) -> Any:
    return jax_internals.lookup(_MODULE, "_start_lowering")(_pbroadcast)(ctx, operand, **parameters)


RULES: Final = (
    LoweringRule(_MODULE, "pbroadcast_p", _pbroadcast),
    LoweringRule(_MODULE, "pbroadcast_start_p", _pbroadcast_start),
)
