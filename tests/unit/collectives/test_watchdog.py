"""A watchdog over events that a test ends or not, and over a transport whose collectives never end on their device."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from flagos_backend.collectives import Reducer, Rendezvous
from flagos_backend.collectives.context_peers import ContextPeers
from flagos_backend.collectives.watchdog import Watchdog
from flagos_backend.errors import CollectiveAborted
from flagos_backend.ir.opcode import Opcode
from support.devices import on_each


class Event:
    def __init__(self, ended: bool) -> None:
        self._ended = threading.Event()
        if ended:
            self.end()

    def end(self) -> None:
        self._ended.set()

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self._ended.wait()


class Lost(Event):
    def synchronize(self) -> None:
        raise RuntimeError("the device is lost")


def test_one_that_does_not_end_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    there = threading.Event()
    watchdog = Watchdog(0.4, lambda text: (told.append(text), there.set()))
    watchdog.note(Event(True), 0, lambda: "ended")
    watchdog.note(Lost(False), 0, lambda: "failed otherwise")
    watchdog.note(Event(False), 0, lambda: "%all-reduce.1 hangs")
    watchdog.note(Event(False), 0, lambda: "%all-reduce.2 hangs behind it")
    assert there.wait(30)
    watchdog.note(Event(False), 0, lambda: "later")
    time.sleep(0.6)
    assert told == ["%all-reduce.1 hangs"]
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == told


def test_one_that_ends_in_time_is_not() -> None:
    told: list[str] = []
    watchdog = Watchdog(1.0, told.append)
    events = [Event(False) for _ in range(3)]
    for event in events:
        watchdog.note(event, 0, lambda: "overdue")
    for event in events:
        event.end()
    time.sleep(1.5)
    watchdog.note(Event(False), 0, lambda: "closed before")
    watchdog.close()
    time.sleep(1.2)
    assert told == []


def test_a_host_that_runs_ahead_is_not_late() -> None:
    """What is behind others has its time from when they have ended; those of another device do not count."""
    told: list[str] = []
    watchdog = Watchdog(0.8, told.append)
    events = [Event(False) for _ in range(6)]
    for event in events:
        watchdog.note(event, 0, lambda: "behind others")
    for event in events:
        time.sleep(0.3)
        event.end()
    assert told == []
    watchdog.note(Event(False), 1, lambda: "another device's")
    for _ in range(6):
        watchdog.note(Event(True), 0, lambda: "ended")
        time.sleep(0.3)
    assert told == ["another device's"]


def test_who_launches_often_is_watched_from_time_to_time() -> None:
    """And what is launched last, too: nothing is told of it."""
    told: list[str] = []
    there = threading.Event()
    watchdog = Watchdog(0.4, lambda text: (told.append(text), there.set()))
    hangs, recorded = False, list[float]()

    def record() -> Event:
        recorded.append(time.monotonic())
        return Event(not hangs)

    began, covered, calls = time.monotonic(), 0.0, 0
    while time.monotonic() - began < 1.0:
        now = time.monotonic()
        if now >= covered:
            covered = now + watchdog.follow(0, record, lambda: "the program hangs")
            calls += 1
        time.sleep(0.01)
    assert 2 <= len(recorded) <= calls <= 15
    assert told == []
    last = time.monotonic()
    if last >= covered:
        watchdog.follow(0, record, lambda: "the program hangs")
    hangs = True  # launched within what the last call counts for
    assert there.wait(30) and told == ["the program hangs"]
    assert recorded[-1] >= last


class Endless:
    """A group whose operations are begun and have no end on the device."""

    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def allreduce(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)


def test_a_collective_over_a_backend_without_timeouts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names it, and what comes later does not begin."""
    monkeypatch.setenv("FLAGOS_COLLECTIVE_TIMEOUT", "0.5")
    group = Endless()
    monkeypatch.setattr("flagos_backend.collectives.context_peers.backend_for", lambda _: "flagcx")
    monkeypatch.setattr("flagos_backend.collectives.context_peers.make_backend", lambda *_: group)
    module = SimpleNamespace(
        Event=lambda **_: Event(False),
        get_device_name=lambda: "NVIDIA H100",
        current_device=lambda: 0,
        device=lambda _: contextlib.nullcontext(),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    peers = ContextPeers((0, 0), lambda *_: 0, lambda *_: 0, "cuda", accelerated=True)
    communicator = peers.communicator((0, 1))

    def reduce(device: int) -> list[torch.Tensor]:
        rendezvous = Rendezvous("%all-reduce.7", (0, 1), device)
        return communicator.all_reduce(rendezvous, [torch.ones(2)], Reducer(torch.add, Opcode.ADD))

    for result in on_each(2, reduce):
        assert isinstance(result, list)
    deadline = time.monotonic() + 30
    while not group.aborted and time.monotonic() < deadline:
        time.sleep(0.05)
    said = next(record.message for record in caplog.records if record.levelno == logging.ERROR)
    assert "FLAGOS-505" in said
    assert "%all-reduce.7 among the devices [0, 1] gave up after 0.5 s" in said
    assert "(flagcx)" in said
    for result in on_each(2, reduce):
        assert isinstance(result, CollectiveAborted)
    peers.close()
