"""The stream of recorded collectives: what waits for what, as told to torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from flagos_backend.runtime.accelerator.communication import CommunicationStream

DEVICE = torch.device("cuda", 0)


class Stream:
    """Notes what it is told. An event is the number of things enqueued before it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.enqueued: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: str) -> None:
        self.enqueued.append(f"wait for {event}")

    def record_event(self) -> str:
        return f"{self.name} {len(self.enqueued)}"


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Stream:
    current = [Stream("computing")]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return current[0]


def start(communication: CommunicationStream, name: str) -> None:
    with communication.started(name):
        torch.cuda.current_stream(DEVICE).enqueued.append(name)  # type: ignore[attr-defined]


def test_what_is_started_follows_what_is_before_and_nothing_else(computing: Stream) -> None:
    beside = Stream("beside")
    communication = CommunicationStream(beside, DEVICE)
    computing.enqueued.append("a")
    start(communication, "x")
    computing.enqueued.append("b")
    start(communication, "y")
    assert computing.enqueued == ["a", "b"]
    assert beside.enqueued == ["wait for computing 1", "x", "wait for computing 2", "y"]


def test_a_wait_is_for_what_was_started_until_then(computing: Stream) -> None:
    communication = CommunicationStream(Stream("beside"), DEVICE)
    for name in "xyz":
        start(communication, name)
    communication.wait("y")
    communication.wait("x")  # over with it
    assert computing.enqueued == ["wait for beside 4"]
    communication.wait_for_all()
    communication.wait_for_all()
    communication.wait("z")
    assert computing.enqueued == ["wait for beside 4", "wait for beside 6"]


def test_nobody_waits_for_what_another_recording_started(computing: Stream) -> None:
    CommunicationStream(Stream("beside"), DEVICE).wait("x")
    assert computing.enqueued == []


def test_a_channel_is_started_again_in_the_next_turn(computing: Stream) -> None:
    communication = CommunicationStream(Stream("beside"), DEVICE)
    for _ in range(2):
        start(communication, "x")
        communication.wait("x")
    assert computing.enqueued == ["wait for beside 2", "wait for beside 4"]
