"""Says that a collective on an accelerator is overdue, for transports that do not: FlagCX's backend of PyTorch has no
timeouts, and its collectives only wait on the device."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol

logger = logging.getLogger("flagos_backend")

_POLL_SECONDS: Final = 0.2


class Event(Protocol):
    """A place in a stream, after a collective."""

    def query(self) -> bool: ...


@dataclass(eq=False)
class Watch:
    """``note`` is told of every collective that was begun. When one has not ended ``seconds`` later, or after the one
    before it on its device, its description is logged, and ``overdue`` is called with it; then the watch is over."""

    seconds: float
    overdue: Callable[[str], None]
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _pending: list[_Noted] = field(default_factory=list)
    # When one was last seen to have ended, by device.
    _ended: dict[Hashable, float] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _closed: bool = False

    def note(self, event: Event, device: Hashable, describe: Callable[[], str]) -> None:
        with self._changed:
            if self._closed:
                return
            self._pending.append(_Noted(time.monotonic(), event, device, describe))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flagos-collectives", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _is_overdue(self, one: _Noted) -> bool:
        """A host that runs ahead begins what waits for a long time behind others."""
        return time.monotonic() > max(one.since, self._ended.get(one.device, 0.0)) + self.seconds

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
            late = []
            for one in noted:
                if _has_ended(one.event):
                    self._ended[one.device] = time.monotonic()
                else:
                    late.append(one)
            described = next((one.describe() for one in late if self._is_overdue(one)), None)
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


@dataclass(frozen=True, slots=True)
class _Noted:
    since: float
    event: Event
    device: Hashable
    describe: Callable[[], str]


def _has_ended(event: Event) -> bool:
    """Also of a device that has failed: whoever waits for it hears that."""
    try:
        return event.query()
    except RuntimeError:
        return True
