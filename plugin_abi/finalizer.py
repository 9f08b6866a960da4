"""A function that is called once an object is gone, whether or not exit handlers have run. For what a backend owns."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar


class Finalizer:
    """As weakref.finalize, but exit handlers do not concern it. That one calls its functions when Python runs them,
    while others of them still use the objects, and calls none from then on, though the process may live. What is left
    when Python ends is left."""

    #: Those that have not been called, and with them what their arguments keep alive. Here, where it lives as long as
    #: the class: the globals of modules go before the last objects do.
    _pending: ClassVar[dict[Finalizer, tuple[Callable[..., object], tuple[Any, ...]]]] = {}

    def __init__(self, owner: object, function: Callable[..., object], *arguments: object) -> None:
        self._pending[self] = function, arguments
        self._reference = weakref.ref(owner, self)

    def __call__(self, _reference: object = None) -> None:
        """Call the function now; a second call does nothing."""
        found = self._pending.pop(self, None)  # in one step, for any thread
        if found is not None:
            function, arguments = found
            function(*arguments)

    @property
    def alive(self) -> bool:
        """Whether the function has not been called."""
        return self in self._pending
