"""Compiles the generated kernels of a program, before its first run needs them one after the other."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from flagos_backend.codegen.triton.kernel import RegionKernel
from flagos_backend.errors import FlagosBackendError
from flagos_backend.side_by_side import side_by_side

logger = logging.getLogger("flagos_backend")


def compile_together(kernels: Iterable[RegionKernel], device: torch.device) -> None:
    """Returns when all are compiled for ``device``. What fails is left to the first run, which reports it."""
    different = list({kernel.source: kernel for kernel in kernels}.values())
    if len(different) < 2:
        return  # the first run does no worse
    for kernel, reason in zip(different, side_by_side(_compile, different, device), strict=True):
        if reason:
            logger.debug("%s is compiled when it is needed: %s", kernel.text, reason)


def _compile(kernel: RegionKernel) -> str:
    """Why it was not, or ""."""
    try:
        kernel.compile()
    except FlagosBackendError as error:
        return str(error)
    return ""
