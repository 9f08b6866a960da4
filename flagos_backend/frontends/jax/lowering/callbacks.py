"""Debugging primitives: JAX's own rules, which end in emit_python_callback and so in jax/callbacks.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from flagos_backend.frontends.jax import jax_internals
from flagos_backend.frontends.jax.lowering.rule import LoweringRule


def _upstream(module: str, name: str) -> Callable[..., Any]:
    def rule(ctx: Any, *operands: Any, **parameters: Any) -> Any:
        return jax_internals.lookup(module, name)(ctx, *operands, **parameters)

    return rule


_DEBUGGING: Final = "jax._src.debugging"
_CHECKIFY: Final = "jax._src.checkify"

RULES: Final = (
    LoweringRule(_DEBUGGING, "debug_callback_p", _upstream(_DEBUGGING, "debug_callback_lowering")),
    LoweringRule(_DEBUGGING, "debug_print_p", _upstream(_DEBUGGING, "debug_print_lowering_rule")),
    LoweringRule(_CHECKIFY, "check_p", _upstream(_CHECKIFY, "check_lowering_rule")),
)
