"""Which stage of a compile took how long, for whoever listens: bridge.py, on behalf of a profiler; and which one it is
in, for whoever watches it (process/progress.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from flagos_backend.process import progress


@dataclass(frozen=True, slots=True)
class Stage:
    """``begin`` and ``end`` in nanoseconds of the monotonic clock."""

    name: str
    begin: int
    end: int


_heard: ContextVar[list[Stage] | None] = ContextVar("heard", default=None)


@contextmanager
def listen() -> Iterator[list[Stage]]:
    """The stages that end meanwhile in this thread, in the order of their ends."""
    heard: list[Stage] = []
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs meanwhile is the stage ``name`` of a compile, also where it fails."""
    heard = _heard.get()
    begin = time.monotonic_ns()
    try:
        with progress.stage(name):
            yield
    finally:
        if heard is not None:
            heard.append(Stage(name, begin, time.monotonic_ns()))
