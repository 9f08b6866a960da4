"""Compiles the generated kernels of a program side by side, before its first run needs them one after the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from flagos_backend.codegen.triton.kernel import RegionKernel
from flagos_backend.errors import FlagosBackendError

logger = logging.getLogger("flagos_backend")

#: How many are compiled at once; the number of processors where it is not set.
THREADS = "FLAGOS_COMPILE_THREADS"


def compile_together(kernels: Iterable[RegionKernel], device: torch.device) -> None:
    """Returns when all are compiled for ``device``. What fails is left to the first run, which reports it."""
    different = list({kernel.source: kernel for kernel in kernels}.values())
    threads = min(len(different), _threads())
    if threads < 2:
        return
    # Compilers drop the interpreter's lock for most of their work.
    with ThreadPoolExecutor(threads, thread_name_prefix="flagos-compile") as pool:
        for kernel, reason in zip(different, pool.map(lambda k: _compile(k, device), different), strict=True):
            if reason:
                logger.debug("%s is compiled when it is needed: %s", kernel.text, reason)


def _threads() -> int:
    text = os.environ.get(THREADS, "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text:
        logger.warning("%s is %r, not a number of threads", THREADS, text)
    return len(os.sched_getaffinity(0))


def _compile(kernel: RegionKernel, device: torch.device) -> str:
    """Why it was not, or ""."""
    try:
        with torch.get_device_module(device).device(device):
            kernel.compile()
    except FlagosBackendError as error:
        return str(error)
    return ""
