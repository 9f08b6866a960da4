"""The stream of recorded collectives: what waits for what, as told to torch."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
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
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return current[0]


def collective(name: str) -> Instruction:
    return Instruction(Opcode.ALL_REDUCE, ArrayShape(ElementType.F32, ()), (), name=name)


X, Y, Z = map(collective, "xyz")


def start(communication: CommunicationStream, instruction: Instruction, operand: object = None) -> None:
    with communication.started(instruction, [operand]):
        torch.cuda.current_stream(DEVICE).enqueued.append(instruction.name)  # type: ignore[attr-defined]


def test_what_is_started_follows_what_is_before_and_nothing_else(computing: Stream) -> None:
    beside = Stream("beside")
    communication = CommunicationStream(beside, DEVICE)
    computing.enqueued.append("a")
    start(communication, X)
    computing.enqueued.append("b")
    start(communication, Y)
    assert computing.enqueued == ["a", "b"]
    assert beside.enqueued == ["wait for computing 1", "x", "wait for computing 2", "y"]


def test_a_wait_is_for_what_was_started_until_then(computing: Stream) -> None:
    communication = CommunicationStream(Stream("beside"), DEVICE)
    for instruction in (X, Y, Z):
        start(communication, instruction)
    communication.wait(Y)
    communication.wait(X)  # over with it
    assert computing.enqueued == ["wait for beside 4"]
    communication.wait_for_all()
    communication.wait_for_all()
    communication.wait(Z)
    assert computing.enqueued == ["wait for beside 4", "wait for beside 6"]


def test_nobody_waits_for_what_another_recording_started(computing: Stream) -> None:
    CommunicationStream(Stream("beside"), DEVICE).wait(X)
    assert computing.enqueued == []


def test_what_is_read_stays_until_the_wait(computing: Stream) -> None:
    """Whoever had it may have let go of it."""
    communication = CommunicationStream(Stream("beside"), DEVICE)
    operand = torch.ones(2)
    there = weakref.ref(operand)
    start(communication, X, operand)
    start(communication, Y)
    del operand
    assert there() is not None
    communication.wait(X)
    assert there() is None


def test_what_breaks_is_waited_for_too(computing: Stream) -> None:
    """A capture has to end with all that it began."""
    communication = CommunicationStream(Stream("beside"), DEVICE)
    with pytest.raises(RuntimeError, match="broken"), communication.started(X, []):
        raise RuntimeError("broken")
    communication.wait_for_all()
    assert computing.enqueued == ["wait for beside 1"]


def test_none_is_started_twice_at_once(computing: Stream) -> None:
    communication = CommunicationStream(Stream("beside"), DEVICE)
    start(communication, X)
    with pytest.raises(AssertionError, match="x is started again"):
        start(communication, X)


def test_a_collective_is_started_again_in_the_next_iteration(computing: Stream) -> None:
    communication = CommunicationStream(Stream("beside"), DEVICE)
    for _ in range(2):
        start(communication, X)
        communication.wait(X)
    assert computing.enqueued == ["wait for beside 2", "wait for beside 4"]
