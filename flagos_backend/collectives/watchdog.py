"""Says that a collective on an accelerator is overdue, for transports that do not: FlagCX's backend of PyTorch has no
timeouts, and its collectives only wait on the device."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol

logger = logging.getLogger("flagos_backend")

_POLL_SECONDS: Final = 0.2


class Event(Protocol):
    """A place in a stream, after a collective."""

    def synchronize(self) -> None: ...


@dataclass(eq=False)
class Watchdog:
    """``note`` is told of every collective that was begun. When one has not ended ``seconds`` later, or after the one
    before it on its device, its description is logged, and ``overdue`` is called with it; then the watchdog is over.

    A thread for each device waits for its events, and another one looks at the clock: a driver that answers nobody
    while a device hangs keeps the first ones, which hold nothing meanwhile. PyTorch would ask, ``Event.query``, with
    the interpreter's lock held.
    """

    seconds: float
    overdue: Callable[[str], None]
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _devices: dict[Hashable, _Device] = field(default_factory=dict)
    _closed: bool = False

    def note(self, event: Event, device: Hashable, describe: Callable[[], str]) -> None:
        with self._changed:
            if self._closed:
                return
            if not self._devices:
                self._start(self._look_at_the_clock)
            known = self._devices.get(device)
            if known is None:
                known = self._devices[device] = _Device()
                self._start(self._wait_for, known)
            known.pending.append(_Noted(time.monotonic(), event, describe))
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for device in self._devices.values():
                device.pending.clear()
            self._changed.notify_all()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, name="flagos-collectives", daemon=True).start()

    @property
    def _pause(self) -> float:
        return min(_POLL_SECONDS, self.seconds / 4)

    def _wait_for(self, device: _Device) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: device.pending or self._closed)
                if self._closed:
                    return
                one = device.pending[0]
            with contextlib.suppress(RuntimeError):  # of a device that has failed: whoever waits for it hears that
                one.event.synchronize()
            with self._changed:
                if self._closed:
                    return
                device.pending.popleft()
                device.ended = time.monotonic()
                is_up_to_date = not device.pending
            if is_up_to_date:  # those who begin many are not to be met after each
                time.sleep(self._pause)

    def _look_at_the_clock(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or any(d.pending for d in self._devices.values()))
            time.sleep(self._pause)
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                late = next((one for d in self._devices.values() if (one := d.overdue(now, self.seconds))), None)
            if late is not None:
                self.close()
                described = late.describe()
                logger.error(described)
                self.overdue(described)
                return


@dataclass(frozen=True, slots=True)
class _Noted:
    since: float
    event: Event
    describe: Callable[[], str]


@dataclass(eq=False, slots=True)
class _Device:
    """``pending``: what has not ended, in order. ``ended``: when one was last seen to have."""

    pending: deque[_Noted] = field(default_factory=deque)
    ended: float = 0.0

    def overdue(self, now: float, seconds: float) -> _Noted | None:
        """A host that runs ahead begins what waits for a long time behind others."""
        first = self.pending[0] if self.pending else None
        return first if first is not None and now > max(first.since, self.ended) + seconds else None
