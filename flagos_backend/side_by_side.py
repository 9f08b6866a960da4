"""Compiles kernels of accelerators side by side: compilers drop the interpreter's lock for most of their work."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from flagos_backend.torch_loading import torch

logger = logging.getLogger("flagos_backend")

#: How many are compiled at once; the number of processors where it is not set.
THREADS = "FLAGOS_COMPILE_THREADS"

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(function: Callable[[T], R], items: Sequence[T], device: torch.device) -> list[R]:
    """``function`` of each item, in order, ``device`` being the current one of each thread. Raises what the first
    failing call raises."""
    threads = min(len(items), _threads())

    def call(item: T) -> R:
        with torch.get_device_module(device).device(device):
            return function(item)

    # An interpreter that ends still runs exit handlers, but starts no threads.
    if threads < 2 or not threading.main_thread().is_alive():
        return [call(item) for item in items]
    with ThreadPoolExecutor(threads, thread_name_prefix="flagos-compile") as pool:
        return list(pool.map(call, items))


def _threads() -> int:
    text = os.environ.get(THREADS, "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text:
        logger.warning("%s is %r, not a number of threads", THREADS, text)
    return len(os.sched_getaffinity(0))
