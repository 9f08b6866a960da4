"""One line on a terminal for what compiles longer than two seconds: the stage, and how many kernels are done and left.
Compilers say what they do, at any stage; a thread draws it with tqdm, which keeps out of the way of a program's bars.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO, TypeVar

#: Seconds before anything is shown, and between two looks at what is done.
DELAY = 2.0
_INTERVAL = 0.2

T = TypeVar("T")


class _Work:
    """What is done. Written by the threads that compile, read by the one that draws; each line by itself is whole."""

    def __init__(self) -> None:
        self.stage = "compiling"
        # (what is counted, how many there are, how many are done)
        self.counted: tuple[str, int, int] | None = None
        self._lock = threading.Lock()

    def enter(self, stage: str, counted: tuple[str, int, int] | None) -> None:
        with self._lock:
            self.stage, self.counted = stage, counted

    def advance(self) -> None:
        with self._lock:
            if self.counted is not None:
                unit, total, done = self.counted
                self.counted = unit, total, done + 1


_current: ContextVar[_Work | None] = ContextVar("progress", default=None)
# Of several threads that compile, the first one's is shown.
_shown = threading.Lock()


@contextmanager
def shown() -> Iterator[None]:
    """What this thread compiles meanwhile is shown, if it takes long and a person is there to see it. Within another
    one it is part of that."""
    if _current.get() is not None or not _can_show(sys.stderr) or not _shown.acquire(blocking=False):
        yield
        return
    work = _Work()
    token = _current.set(work)
    over = threading.Event()
    thread = threading.Thread(target=_draw, args=(work, over, sys.stderr), name="flagos-progress", daemon=True)
    try:
        thread.start()
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
        _current.reset(token)
        _shown.release()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs meanwhile is the stage ``name``; afterwards it is the one before."""
    work = _current.get()
    if work is None:
        yield
        return
    before = work.stage, work.counted
    work.enter(name, None)
    try:
        yield
    finally:
        work.enter(*before)


@contextmanager
def hidden() -> Iterator[None]:
    """Nothing is shown of what this thread does meanwhile: other threads go on with what is."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def counted(items: Sequence[T], unit: str) -> Iterable[T]:
    """``items``, each done when the next one is asked for. ``unit``: what they are, in the plural."""
    done = counter(len(items), unit)
    return items if done is None else _counting(items, done)


def counter(total: int, unit: str) -> Callable[[], None] | None:
    """What says, from any thread, that one of ``total`` is done; None where nothing is shown."""
    work = _current.get()
    if work is None:
        return None
    work.enter(work.stage, (unit, total, 0))
    return work.advance


def _counting(items: Sequence[T], done: Callable[[], None]) -> Iterator[T]:
    for item in items:
        yield item
        done()


def _can_show(stream: TextIO | None) -> bool:
    """A terminal that can go back to the begin of a line; of several processes of one host the first alone draws. An
    interpreter that ends starts no threads."""
    return (
        stream is not None
        and not stream.closed
        and stream.isatty()
        and os.environ.get("TERM", "dumb") != "dumb"
        and os.environ.get("LOCAL_RANK", "0") == "0"
        and _has_tqdm()
        and threading.main_thread().is_alive()
    )


@functools.cache
def _has_tqdm() -> bool:
    return importlib.util.find_spec("tqdm") is not None


def _draw(work: _Work, over: threading.Event, stream: TextIO) -> None:
    if over.wait(DELAY):
        return
    # A terminal that goes away meanwhile is no reason for a compile to fail.
    with contextlib.suppress(OSError, ValueError):
        bar = _bar(stream)
        try:
            bar.start_t = time.time() - DELAY
            while True:
                _update(bar, work)
                if over.wait(_INTERVAL):
                    break
        finally:
            bar.close()


def _bar(stream: TextIO) -> Any:
    from tqdm.std import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # its thread would look after bars that nobody refreshes

    # A terminal that does not know its size has the usual one; tqdm draws nothing on one of no lines.
    columns, lines = shutil.get_terminal_size()
    return Bar(total=1, file=stream, leave=False, ncols=columns, nrows=lines, bar_format="flagos")


def _update(bar: Any, work: _Work) -> None:
    name, count = work.stage, work.counted
    if count is None or not count[1]:
        bar.n, bar.total, bar.bar_format = 0, 1, "flagos: {desc} [{elapsed}]"
        bar.set_description_str(name)
        return
    unit, total, done = count
    bar.n, bar.total = done, total
    bar.bar_format = f"flagos: {{desc}} {{bar}} {done}/{total} {unit}, {total - done} left [{{elapsed}}]"
    bar.set_description_str(name)
