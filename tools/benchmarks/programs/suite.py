"""All programs of one scale."""

from __future__ import annotations

from benchmarks.programs import kernels, models
from benchmarks.programs.program import Program, Scale


def programs(scale: Scale) -> list[Program]:
    """Kernels first, then models."""
    if scale is Scale.HOST:
        return [*kernels.host(), *models.host()]
    return [*kernels.accelerator(), *models.accelerator()]
