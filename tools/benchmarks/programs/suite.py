"""All programs of one scale."""

from __future__ import annotations

from . import kernels, models
from .program import Program, Scale


def programs(scale: Scale) -> list[Program]:
    """Models first, then kernels."""
    if scale is Scale.HOST:
        return [*models.host(), *kernels.host()]
    return [*models.accelerator(), *kernels.accelerator()]
