"""Collectives of a launch that is recorded go to a stream beside the one that computes: what does not wait for them
goes on meanwhile. Where they start and are waited for, overlap.py says; capture.py gives the stream."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import torch


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
        self._ends: dict[Hashable, Any] = {}  # of what nobody has waited for yet, in order

    @contextlib.contextmanager
    def started(self, channel: Hashable) -> Iterator[None]:
        """What is enqueued in it runs after what was enqueued before, and beside what is enqueued behind it, up to a
        wait for the channel."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._ends[channel] = self._stream.record_event()

    def wait(self, channel: Hashable) -> None:
        """What is enqueued from now on runs after what was started for ``channel``, and before it. Nothing waits where
        that was in another recording, which ended with all of it."""
        if channel in self._ends:
            channels = list(self._ends)
            ends = [self._ends.pop(other) for other in channels[: channels.index(channel) + 1]]
            torch.cuda.current_stream(self._device).wait_event(ends[-1])

    def wait_for_all(self) -> None:
        """As ``wait`` for what was started last."""
        if self._ends:
            self.wait(next(reversed(self._ends)))
