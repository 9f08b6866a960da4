"""Says that a collective on an accelerator is overdue, for transports that do not: FlagCX's backend of PyTorch has no
timeouts, and its collectives only wait on the device."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

logger = logging.getLogger("flagos_backend")

_POLL_SECONDS: Final = 0.2


class Event(Protocol):
    """A place in a stream, after a collective."""

    def query(self) -> bool: ...


@dataclass(eq=False)
class Watch:
    """``note`` is told of every collective that was begun. When one has not ended ``seconds`` later, its description is
    logged, and ``overdue`` is called with it; then the watch is over."""

    seconds: float
    overdue: Callable[[str], None]
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _pending: list[tuple[float, Event, Callable[[], str]]] = field(default_factory=list)
    _thread: threading.Thread | None = None
    _closed: bool = False

    def note(self, event: Event, describe: Callable[[], str]) -> None:
        with self._changed:
            if self._closed:
                return
            self._pending.append((time.monotonic() + self.seconds, event, describe))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flagos-collectives", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._pending.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed)
                if self._closed:
                    return
                # Asking takes long where the driver is busy: those who note do not wait for it.
                noted, self._pending = self._pending, []
            late = [one for one in noted if not _has_ended(one[1])]
            described = next((describe() for deadline, _, describe in late if time.monotonic() > deadline), None)
            with self._changed:
                if self._closed:
                    return
                self._pending[:0] = late
            if described is not None:
                self.close()
                logger.error(described)
                self.overdue(described)
                return
            time.sleep(min(_POLL_SECONDS, self.seconds / 4))


def _has_ended(event: Event) -> bool:
    """Also of a device that has failed: whoever waits for it hears that."""
    try:
        return event.query()
    except RuntimeError:
        return True
