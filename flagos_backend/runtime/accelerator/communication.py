"""Collectives of a launch that is recorded go to a stream beside the one that computes: what does not wait for them
goes on meanwhile. Where they start and are waited for, compile/overlap.py says; capture.py gives the stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from flagos_backend.ir.hlo import Instruction
from flagos_backend.process.torch_loading import torch


class CommunicationStream:
    """One object serves one recording. What it is given runs in order, also of different groups: devices that met in
    two at once could each wait in another one first.

    What is allocated in ``started`` belongs to the stream, so that it alone gets it again, and only what it starts
    later: which waits for all that the other stream was given before, and so for whoever used it.
    """

    def __init__(self, stream: Any, device: torch.device) -> None:
        """``stream``: torch's; nobody else has it while this object is used."""
        self._stream = stream
        self._device = device
        # Of what nobody has waited for yet, in order: an event behind it, and what it reads.
        self._under_way: dict[Instruction, tuple[Any, Sequence[Any]]] = {}

    @contextlib.contextmanager
    def started(self, collective: Instruction, operands: Sequence[Any]) -> Iterator[None]:
        """What is enqueued in it runs after what was enqueued before, and beside what is enqueued behind it, up to a
        wait for the collective: ``operands``, as whoever has them may let go of them, stay as long."""
        assert collective not in self._under_way, f"{collective.name} is started again before it was waited for"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                yield
            except BaseException:
                # A capture has to end with all that it began.
                with contextlib.suppress(RuntimeError):
                    self._under_way[collective] = self._stream.record_event(), operands
                raise
        self._under_way[collective] = self._stream.record_event(), operands

    def wait(self, collective: Instruction) -> None:
        """What is enqueued from now on runs after the collective, and what was started before it. Nothing waits for one
        of another recording, which ended with all of its."""
        if collective in self._under_way:
            started = list(self._under_way)
            over = [self._under_way.pop(other) for other in started[: started.index(collective) + 1]]
            event, _ = over[-1]
            torch.cuda.current_stream(self._device).wait_event(event)

    def wait_for_all(self) -> None:
        """As ``wait`` for what was started last."""
        if self._under_way:
            self.wait(next(reversed(self._under_way)))
