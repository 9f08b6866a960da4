"""Lowering rules for the platform flagos: for primitives that JAX has no default for, and where the default is slow.

One module per family of primitives; each is a table from a primitive's place in JAX to its rule.
"""

from __future__ import annotations

from flagos_backend.jax import jax_internals
from flagos_backend.jax.lowering import (
    approximate_top_k,
    callbacks,
    collectives,
    cudnn_attention,
    linear_algebra,
    log_gamma,
    scaled_matmul,
    sparse,
    tridiagonal,
)
from flagos_backend.jax.lowering.rule import LoweringRule
from plugin_abi.loader import DEFAULT_PLATFORM

RULES: tuple[LoweringRule, ...] = (
    *approximate_top_k.RULES,
    *callbacks.RULES,
    *collectives.RULES,
    *cudnn_attention.RULES,
    *linear_algebra.RULES,
    *log_gamma.RULES,
    *scaled_matmul.RULES,
    *sparse.RULES,
    *tridiagonal.RULES,
)


def register_rules() -> None:
    """Register every rule. JAX must know the platform; a primitive that this release does not have is passed over."""
    for rule in RULES:
        primitive = jax_internals.primitive(rule.module, rule.primitive)
        if primitive is not None:
            jax_internals.register_lowering(primitive, rule.function, DEFAULT_PLATFORM)
    for target in linear_algebra.TARGETS:
        jax_internals.register_batch_partitionable(target)
    # kernels/reference/CUSTOM_CALLS.md is what they mean, for good.
    jax_internals.enable_export((*linear_algebra.TARGETS, *sparse.TARGETS))
