"""How a fusion replaces runs of basic operations by fused ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flagos_backend.frontends.torch.ops.operation import BasicOperation, FusibleOperation

Patterns = tuple[tuple[tuple[type[BasicOperation], ...], Callable[[Sequence[Any]], FusibleOperation]], ...]
"""Types of neighbours, and what stands for them. The first that matches is taken."""


def replace_runs(
    ops: Sequence[FusibleOperation],
    patterns: Patterns,
    allowed: Callable[[Sequence[Any]], bool] = lambda run: True,
) -> list[FusibleOperation]:
    """Replace each run of exactly these types that is allowed, from the left. A subclass is another operation."""
    fused: list[FusibleOperation] = []
    position = 0
    while position < len(ops):
        for types, make in patterns:
            run = ops[position : position + len(types)]
            if tuple(type(op) for op in run) == types and allowed(run):
                fused.append(make(run))
                position += len(types)
                break
        else:
            fused.append(ops[position])
            position += 1
    return fused
