"""Functions for the last moment at which threads can run Python code: after the last exit handler.

Being a handler of atexit would be too early: handlers run in the reverse order of their registration, and those that
were registered before may still compute.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any, Final

_functions: Final[list[tuple[Callable[..., object], tuple[Any, ...]]]] = []


class _Handler:
    """Held by nobody but atexit, which lets go of its handlers once the last of them has run."""

    def __call__(self) -> None:
        """Nothing: others come after it."""

    def __del__(self) -> None:
        while _functions:
            function, arguments = _functions.pop()
            function(*arguments)


def _register_handler() -> None:
    atexit.register(_Handler())


def register(function: Callable[..., object], *arguments: Any) -> None:
    """Have a function called after the last exit handler; the function that was registered last comes first."""
    _functions.append((function, arguments))
    if len(_functions) > 1:
        return
    try:
        # Only an interpreter that ends waits for its threads; a living one may be asked to run what is registered with
        # atexit, which it then forgets.
        threading._register_atexit(_register_handler)  # type: ignore[attr-defined]
    except RuntimeError:  # it ends already
        _register_handler()
