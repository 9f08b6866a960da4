"""torch.flagos: streams, events and waiting.

On host memory operators are done when they return, so work is never pending: a stream has nothing to wait for, and an
event's time is the time at which it is recorded. An inner device with streams of its own is waited for as a whole.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from flagos_backend.frontends.torch.device.api.devices import DeviceLike, index_of, opened
from flagos_backend.frontends.torch.device.opening import DEVICE_TYPE, is_open


def synchronize(device: DeviceLike = None) -> None:
    """Waits until all work of a device is done."""
    index_of(device)
    if is_open():
        found = opened()
        found.inner_module.synchronize()
        found.device.synchronize()


class Stream(torch.Stream):
    """A stream of the device. Work on one takes place in order; with one device, so does work on all."""

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **given: Any) -> Stream:
        if not given:
            given = {"device": torch.device(DEVICE_TYPE, index_of(device)), "priority": priority}
        made: Stream = super().__new__(cls, **given)
        return made

    def __init__(self, *_args: Any, **_given: Any) -> None:
        """All is done by __new__."""

    def synchronize(self) -> None:
        """Waits for the work on this stream."""
        synchronize()

    def query(self) -> bool:
        """Whether the work on this stream is done."""
        synchronize()
        return True

    def wait_event(self, event: Any) -> None:
        """Has work that comes after wait for an event."""
        event.synchronize()

    def wait_stream(self, stream: Any) -> None:
        """Has work that comes after wait for another stream."""
        stream.synchronize()

    def record_event(self, event: Any = None) -> Any:
        """Records an event, a new one if none is given, and returns it."""
        made = Event() if event is None else event
        made.record(self)
        return made


class Event(torch.Event):
    """A point in a stream's work. ``enable_timing``: whether its time can be told."""

    _seconds: float | None
    _timing: bool

    def __new__(cls, device: DeviceLike = None, enable_timing: bool = False, **_given: Any) -> Event:
        made: Event = super().__new__(
            cls, device=torch.device(DEVICE_TYPE, index_of(device)), enable_timing=enable_timing
        )
        made._timing, made._seconds = enable_timing, None
        return made

    def __init__(self, *_args: Any, **_given: Any) -> None:
        """All is done by __new__."""

    def record(self, stream: Any = None) -> None:
        """Marks the end of the work that the stream has now."""
        synchronize()
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        """Whether the work before the event is done, as that before one that was never recorded is."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Has a stream's later work wait for the event."""

    def synchronize(self) -> None:
        """Waits for the work before the event."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to a later one. Raises RuntimeError where one has no time to tell."""
        if not isinstance(end_event, Event):
            raise RuntimeError(f"expected other to be a torch.{DEVICE_TYPE}.Event object")
        if not (self._timing and end_event._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._seconds - self._seconds) * 1e3


class _Current(threading.local):
    """Of each thread, as PyTorch has it."""

    stream: Stream | None = None


_current = _Current()


def default_stream(device: DeviceLike = None) -> Stream:
    """The stream on which a program begins."""
    return Stream(device)


def current_stream(device: DeviceLike = None) -> Stream:
    """The stream on which work is put now."""
    index_of(device)
    return default_stream() if _current.stream is None else _current.stream


def set_stream(stream: Stream) -> None:
    """Puts the thread's later work on a stream."""
    _current.stream = stream


class StreamContext:
    """Context manager: work inside is put on a stream; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> Stream | None:
        self._before = _current.stream
        if self.stream is not None:
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        _current.stream = self._before


def stream(stream: Stream | None) -> StreamContext:
    """A context in which work is put on a stream."""
    return StreamContext(stream)
