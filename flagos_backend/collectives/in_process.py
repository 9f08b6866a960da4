"""Communicator for devices that share this process's memory, each run by a thread. One object serves one launch."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from flagos_backend.collectives.communicator import Combine, Communicator, Rendezvous
from flagos_backend.collectives.options import timeout_seconds
from flagos_backend.errors import CollectiveAborted, CollectiveTimeout, CollectiveTimeoutInvalid, StatusCode


@dataclass(slots=True)
class _PendingRendezvous:
    """One rendezvous in progress. ``results`` appear when the last participant has combined the contributions,
    ``failed`` says that it could not."""

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
        self._pending: dict[Hashable, _PendingRendezvous] = {}
        self._turns: Counter[Hashable] = Counter()
        self._reason: str | None = None

    def abort(self, code: int, message: str) -> None:
        """Fails this launch: everybody who waits, or comes later, gets CollectiveAborted. The first reason counts."""
        with self._condition:
            if self._reason is None:
                self._reason = message or f"status code {StatusCode(code).name}"
            self._condition.notify_all()

    @property
    def native_timeout(self) -> float:
        """As of Communicator. What is wrong with the user's is for whoever waits here to say."""
        try:
            return timeout_seconds() if self._timeout is None else self._timeout
        except CollectiveTimeoutInvalid:
            return 0.0

    def give_up(self, channel: str, participant: int, missing: Sequence[int]) -> NoReturn:
        """Raises what ended a collective that devices meet for on the native side: CollectiveTimeout for the
        participants that are ``missing``, which ends the launch, or CollectiveAborted."""
        if missing:
            seconds = timeout_seconds() if self._timeout is None else self._timeout
            late = CollectiveTimeout(channel=channel, missing=list(missing), seconds=seconds, participant=participant)
            self.abort(StatusCode.DEADLINE_EXCEEDED, str(late))
            raise late
        raise CollectiveAborted(reason=self._reason or "it was given up", participant=participant)

    def exchange(self, rendezvous: Rendezvous, contribution: Any, combine: Combine) -> Any:
        if rendezvous.size == 1:
            self._raise_if_aborted(rendezvous)
            return combine([contribution])[0]
        with self._condition:
            key, pending = self._join(rendezvous, contribution)
            complete = len(pending.contributions) == rendezvous.size
            if not complete:
                self._wait(rendezvous, pending)
        if complete:
            self._combine(rendezvous, pending, combine)
        with self._condition:
            return self._leave(rendezvous, key, pending)

    def barrier(self, rendezvous: Rendezvous) -> None:
        """Returns to every participant or to none: no abort comes between once the last is there."""
        with self._condition:
            key, pending = self._join(rendezvous, None)
            if len(pending.contributions) == rendezvous.size:
                pending.results = dict.fromkeys(rendezvous.participants)
                self._condition.notify_all()
            else:
                self._wait(rendezvous, pending)
            self._leave(rendezvous, key, pending)

    def _join(self, rendezvous: Rendezvous, contribution: Any) -> tuple[Hashable, _PendingRendezvous]:
        """The condition is held, here and in what follows."""
        self._raise_if_aborted(rendezvous)
        key = self._turn(rendezvous)
        pending = self._pending.setdefault(key, _PendingRendezvous())
        pending.contributions[rendezvous.participant] = contribution
        return key, pending

    def _leave(self, rendezvous: Rendezvous, key: Hashable, pending: _PendingRendezvous) -> Any:
        assert pending.results is not None
        result = pending.results.pop(rendezvous.participant)
        if not pending.results:
            del self._pending[key]
        return result

    def _turn(self, rendezvous: Rendezvous) -> Hashable:
        """A loop comes to one rendezvous many times: everybody's n-th time is one pending rendezvous."""
        own = (rendezvous.channel, rendezvous.participants, rendezvous.participant)
        self._turns[own] += 1
        return rendezvous.channel, rendezvous.participants, self._turns[own]

    def _combine(self, rendezvous: Rendezvous, pending: _PendingRendezvous, combine: Combine) -> None:
        contributions: Sequence[Any] = [pending.contributions[p] for p in rendezvous.participants]
        try:
            results = combine(contributions)
        except BaseException as error:
            with self._condition:
                pending.failed = True
            self.abort(StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            raise
        with self._condition:
            pending.results = dict(zip(rendezvous.participants, results, strict=True))
            self._condition.notify_all()

    def _wait(self, rendezvous: Rendezvous, pending: _PendingRendezvous) -> None:
        """Until the results are there. With nobody missing, the last participant reads all contributions, whose memory
        is lent: whatever becomes of the launch, nobody leaves before that has ended."""
        seconds = timeout_seconds() if self._timeout is None else self._timeout
        deadline = time.monotonic() + seconds
        while pending.results is None:
            missing = [p for p in rendezvous.participants if p not in pending.contributions]
            if missing or pending.failed:
                self._raise_if_aborted(rendezvous)
            remaining = deadline - time.monotonic()
            if missing and remaining <= 0:
                timeout = CollectiveTimeout(
                    channel=rendezvous.channel, missing=missing, seconds=seconds, participant=rendezvous.participant
                )
                self.abort(StatusCode.DEADLINE_EXCEEDED, str(timeout))
                raise timeout
            self._condition.wait(remaining if missing else None)

    def _raise_if_aborted(self, rendezvous: Rendezvous) -> None:
        if self._reason is not None:
            raise CollectiveAborted(reason=self._reason, participant=rendezvous.participant)
