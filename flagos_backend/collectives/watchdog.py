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
# For so long one call of ``follow`` counts.
_FOLLOWED_SECONDS: Final = 0.2


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
            self._device(device).pending.append(_Noted(time.monotonic(), event, describe))
            self._changed.notify_all()

    def _device(self, device: Hashable) -> _Device:
        if not self._devices:
            self._start(self._look_at_the_clock)
        known = self._devices.get(device)
        if known is None:
            known = self._devices[device] = _Device()
            self._start(self._wait_for, known)
        return known

    def follow(self, device: Hashable, record: Callable[[], Event], describe: Callable[[], str]) -> float:
        """As ``note`` of what the device was given until now, and will be given within as many seconds as this returns:
        ``record`` gives an event behind it, and is called in another thread after these. Whoever launches often pays
        once for many launches."""
        with self._changed:
            if self._closed:
                return _FOLLOWED_SECONDS
            known, now = self._device(device), time.monotonic()
            if known.followed is None:
                known.followed = _Followed(now + _FOLLOWED_SECONDS, record, describe)
                self._changed.notify_all()
            else:
                # Not put off: who launches all the time would never be looked at.
                known.followed = _Followed(known.followed.due, record, describe)
            return max(0.0, known.followed.due - now)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for device in self._devices.values():
                device.pending.clear()
                device.followed = None
            self._changed.notify_all()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, name="flagos-collectives", daemon=True).start()

    @property
    def _pause(self) -> float:
        return min(_POLL_SECONDS, self.seconds / 4)

    def _wait_for(self, device: _Device) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: device.pending or device.followed or self._closed)
                if self._closed:
                    return
                one = device.pending[0] if device.pending else None
            if one is None:
                self._note_followed(device)
                continue
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

    def _note_followed(self, device: _Device) -> None:
        """In the device's own thread, of one of which nothing is pending."""
        while True:
            with self._changed:
                followed = device.followed
                if followed is None or device.pending:  # closed, or another thing is pending first
                    return
                seconds = followed.due - time.monotonic()
                if seconds <= 0:
                    device.followed = None
                    break
            time.sleep(seconds)
        try:
            event = followed.record()
        except RuntimeError:  # of a device that has failed: whoever waits for it hears that
            return
        with self._changed:
            if not self._closed:
                device.pending.append(_Noted(time.monotonic(), event, followed.describe))
                self._changed.notify_all()

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


@dataclass(frozen=True, slots=True)
class _Followed:
    """``due``: from when on ``record`` may be called."""

    due: float
    record: Callable[[], Event]
    describe: Callable[[], str]


@dataclass(eq=False, slots=True)
class _Device:
    """``pending``: what has not ended, in order. ``followed``: what comes behind it. ``ended``: when one was last seen
    to have."""

    pending: deque[_Noted] = field(default_factory=deque)
    followed: _Followed | None = None
    ended: float = 0.0

    def overdue(self, now: float, seconds: float) -> _Noted | None:
        """A host that runs ahead begins what waits for a long time behind others."""
        first = self.pending[0] if self.pending else None
        return first if first is not None and now > max(first.since, self.ended) + seconds else None
