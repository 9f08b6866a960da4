"""Ctrl-C while the backend works: Python raises KeyboardInterrupt in the main thread between two of its own steps, and
not within what C++ does. Long calls of C++ therefore run apart, so that the wait for them can end.
"""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_enders: set[Callable[[Sequence[threading.Thread]], None]] = set()


@contextmanager
def deferred() -> Iterator[None]:
    """An interrupt meanwhile is answered afterwards, as the program answers them."""
    before = signal.getsignal(signal.SIGINT)
    # None: a handler of C's, which is not Python's to put back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    missed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: missed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if missed:
            signal.raise_signal(signal.SIGINT)


def apart(function: Callable[[], T]) -> T:
    """``function()``, which an interrupt of the main thread does not reach: the wait for it ends, and it goes on by
    itself. For what cannot be stopped, or must not be left half done; an end of the process waits for it."""
    main = threading.main_thread()
    # An interpreter that ends still runs exit handlers, but starts no threads.
    if threading.current_thread() is not main or not main.is_alive():
        return function()
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:  # raised in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="flagos-apart").start()
    return future.result()


def on_end_of_children(function: Callable[[Sequence[threading.Thread]], None]) -> None:
    """Has ``function`` called by ``end_children``: it ends what others have started for these threads."""
    _enders.add(function)


def end_children(threads: Iterable[threading.Thread]) -> None:
    """Kills the processes that these threads of this process have started and wait for: compilers and assemblers."""
    threads = list(threads)
    for end in _enders:
        end(threads)
    for thread in threads:
        listed = Path(f"/proc/self/task/{thread.native_id}/children")
        with suppress(OSError):  # the thread is gone, or this kernel does not list them
            for child in listed.read_text().split():
                with suppress(OSError):
                    os.kill(int(child), signal.SIGKILL)
