"""Communicator for devices that share this process's memory, each run by a thread. One object serves one launch."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flagos_backend.collectives.communicator import Combine, Communicator, Meeting
from flagos_backend.collectives.options import timeout_seconds
from flagos_backend.errors import CollectiveAborted, CollectiveTimeout, StatusCode


@dataclass(slots=True)
class _Gathering:
    """One meeting in progress. ``results`` appear when the last participant has combined the contributions, ``failed``
    says that it could not."""

    contributions: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] | None = None
    failed: bool = False


class InProcessCommunicator(Communicator):
    """Participants meet under one condition variable; the last to come combines, outside the lock.

    Whoever runs a participant must ``abort`` the launch when it fails: the others then get an error at once.
    """

    def __init__(self, timeout: float | None = None) -> None:
        """``timeout``: in seconds; None: the user's, or the default."""
        self._timeout = timeout
        self._condition = threading.Condition()
        self._gatherings: dict[Hashable, _Gathering] = {}
        self._turns: Counter[Hashable] = Counter()
        self._reason: str | None = None

    def abort(self, code: int, message: str) -> None:
        """Fails this launch: everybody who waits, or comes later, gets CollectiveAborted. The first reason counts."""
        with self._condition:
            if self._reason is None:
                self._reason = message or f"status code {StatusCode(code).name}"
            self._condition.notify_all()

    def exchange(self, meeting: Meeting, contribution: Any, combine: Combine) -> Any:
        if meeting.size == 1:
            self._raise_if_aborted(meeting)
            return combine([contribution])[0]
        with self._condition:
            key, gathering = self._join(meeting, contribution)
            complete = len(gathering.contributions) == meeting.size
            if not complete:
                self._wait(meeting, gathering)
        if complete:
            self._combine(meeting, gathering, combine)
        with self._condition:
            return self._leave(meeting, key, gathering)

    def barrier(self, meeting: Meeting) -> None:
        """Returns to every participant or to none: no abort comes between once the last is there."""
        with self._condition:
            key, gathering = self._join(meeting, None)
            if len(gathering.contributions) == meeting.size:
                gathering.results = dict.fromkeys(meeting.participants)
                self._condition.notify_all()
            else:
                self._wait(meeting, gathering)
            self._leave(meeting, key, gathering)

    def _join(self, meeting: Meeting, contribution: Any) -> tuple[Hashable, _Gathering]:
        """The condition is held, here and in what follows."""
        self._raise_if_aborted(meeting)
        key = self._turn(meeting)
        gathering = self._gatherings.setdefault(key, _Gathering())
        gathering.contributions[meeting.participant] = contribution
        return key, gathering

    def _leave(self, meeting: Meeting, key: Hashable, gathering: _Gathering) -> Any:
        assert gathering.results is not None
        result = gathering.results.pop(meeting.participant)
        if not gathering.results:
            del self._gatherings[key]
        return result

    def _turn(self, meeting: Meeting) -> Hashable:
        """A loop comes to one meeting many times: everybody's n-th time is one gathering."""
        own = (meeting.channel, meeting.participants, meeting.participant)
        self._turns[own] += 1
        return meeting.channel, meeting.participants, self._turns[own]

    def _combine(self, meeting: Meeting, gathering: _Gathering, combine: Combine) -> None:
        contributions: Sequence[Any] = [gathering.contributions[p] for p in meeting.participants]
        try:
            results = combine(contributions)
        except BaseException as error:
            with self._condition:
                gathering.failed = True
            self.abort(StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            raise
        with self._condition:
            gathering.results = dict(zip(meeting.participants, results, strict=True))
            self._condition.notify_all()

    def _wait(self, meeting: Meeting, gathering: _Gathering) -> None:
        """Until the results are there. With nobody missing, the last participant reads all contributions, whose memory
        is lent: whatever becomes of the launch, nobody leaves before that has ended."""
        seconds = timeout_seconds() if self._timeout is None else self._timeout
        deadline = time.monotonic() + seconds
        while gathering.results is None:
            missing = [p for p in meeting.participants if p not in gathering.contributions]
            if missing or gathering.failed:
                self._raise_if_aborted(meeting)
            remaining = deadline - time.monotonic()
            if missing and remaining <= 0:
                timeout = CollectiveTimeout(
                    channel=meeting.channel, missing=missing, seconds=seconds, participant=meeting.participant
                )
                self.abort(StatusCode.DEADLINE_EXCEEDED, str(timeout))
                raise timeout
            self._condition.wait(remaining if missing else None)

    def _raise_if_aborted(self, meeting: Meeting) -> None:
        if self._reason is not None:
            raise CollectiveAborted(reason=self._reason, participant=meeting.participant)
