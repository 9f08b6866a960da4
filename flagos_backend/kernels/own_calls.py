"""Marks the calls of ATen that a kernel is made of, in its thread: gems/patching.py gives those to no other kernel."""

from __future__ import annotations

import threading
from types import TracebackType


class _Thread(threading.local):
    depth = 0


_thread = _Thread()


class OwnCalls:
    """Within it this thread's calls of ATen are PyTorch's own."""

    __slots__ = ()

    def __enter__(self) -> None:
        _thread.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _thread.depth -= 1


def are_own() -> bool:
    """Whether this thread is within OwnCalls."""
    return _thread.depth > 0
