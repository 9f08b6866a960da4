"""Compiles kernels of accelerators side by side: compilers drop the interpreter's lock for most of their work. Ctrl-C
ends the compilers that run as processes, and what has not begun."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

from flagos_backend.process import interrupts, progress
from flagos_backend.process.torch_loading import torch

logger = logging.getLogger("flagos_backend")

#: How many are compiled at once; the number of processors where it is not set.
THREADS = "FLAGOS_COMPILE_THREADS"

#: Seconds that an interrupt waits for what was begun. What runs longer goes on by itself.
_GRACE = 0.5

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(
    function: Callable[[T], R],
    items: Sequence[T],
    device: torch.device,
    then: Callable[[int], object] = lambda number: None,
) -> list[R]:
    """``function`` of each item, in order, ``device`` being the current one of each thread. ``then`` is called in this
    thread with the number of each item that is done, while others go on. Raises what the first failing call raises,
    and what ``then`` does."""
    threads = min(len(items), _threads())
    done = progress.counter(len(items), "kernels")

    def call(item: T) -> R:
        with torch.get_device_module(device).device(device):
            result = function(item)
        if done is not None:
            done()
        return result

    # An interpreter that ends still runs exit handlers, but starts no threads.
    if threads < 2 or not threading.main_thread().is_alive():
        results = []
        for number, item in enumerate(items):
            results.append(call(item))
            then(number)
        return results
    workers: list[threading.Thread] = []
    pool = ThreadPoolExecutor(threads, "flagos-compile", initializer=lambda: workers.append(threading.current_thread()))
    futures: list[Future[R]] = []
    try:
        for item in items:
            futures.append(pool.submit(call, item))  # one by one: an interrupt then finds what was begun
        numbers = {future: number for number, future in enumerate(futures)}
        for future in as_completed(futures):
            future.result()
            then(numbers[future])
        results = [future.result() for future in futures]
    except Exception:
        pool.shutdown(cancel_futures=True)
        raise
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        _end(futures, workers)
        raise
    pool.shutdown()
    return results


def _end(futures: Sequence[Future[R]], workers: Sequence[threading.Thread]) -> None:
    """Kills the workers' processes, also those that begin meanwhile, until all calls ended or the grace is over."""
    limit = time.monotonic() + _GRACE
    running = {future for future in futures if future.running()}
    while running and time.monotonic() < limit:
        interrupts.end_children(workers)
        running = wait(running, _GRACE / 20).not_done


def _threads() -> int:
    text = os.environ.get(THREADS, "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if text:
        logger.warning("%s is %r, not a number of threads", THREADS, text)
    return len(os.sched_getaffinity(0))
