"""Lowering rules for the platform flagos: for primitives that JAX has no default for, and where the default is slow.

One module per family of primitives; each is a table from a primitive's place in JAX to its rule.
"""

from __future__ import annotations

import functools
from types import ModuleType

from flagos_backend.frontends.jax import imports, jax_internals
from flagos_backend.frontends.jax.lowering import (
    approximate_top_k,
    callbacks,
    collectives,
    cudnn_attention,
    functions,
    linear_algebra,
    log_gamma,
    ragged_dots,
    scaled_matmul,
    sparse,
    tridiagonal,
)
from flagos_backend.frontends.jax.lowering.rule import LoweringRule
from plugin_abi.loader import DEFAULT_PLATFORM

RULES: tuple[LoweringRule, ...] = (
    *approximate_top_k.RULES,
    *callbacks.RULES,
    *collectives.RULES,
    *cudnn_attention.RULES,
    *functions.RULES,
    *linear_algebra.RULES,
    *log_gamma.RULES,
    *ragged_dots.RULES,
    *scaled_matmul.RULES,
    *sparse.RULES,
    *tridiagonal.RULES,
)


def _register(rule: LoweringRule, module: ModuleType) -> None:
    if hasattr(module, rule.primitive):
        jax_internals.register_lowering(getattr(module, rule.primitive), rule.function, DEFAULT_PLATFORM)


def register_rules() -> None:
    """Register every rule; for a module that is not imported yet, when it is. JAX must know the platform; a
    primitive that this release does not have is passed over."""
    for rule in RULES:
        imports.when_imported(rule.module, functools.partial(_register, rule))
    for target in (*linear_algebra.TARGETS, *functions.TARGETS):
        jax_internals.register_batch_partitionable(target)
    # kernels/reference/CUSTOM_CALLS.md is what they mean, for good.
    jax_internals.enable_export((*functions.TARGETS, *linear_algebra.TARGETS, *sparse.TARGETS))
