"""Where the devices of one launch, each on a thread of this process, meet for collectives. For runtime/bridge.py."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from flagos_backend.errors import CollectiveAborted
from flagos_backend.kernels.reference.registry import Value

Meeting = tuple[Hashable, tuple[int, ...]]


@dataclass(slots=True)
class _Round:
    """One collective of one group: what was brought, and how many have not yet taken everything away."""

    values: dict[int, Value] = field(default_factory=dict)
    missing: int = 0
    staying: int = 0


class ThreadRendezvous:
    """Implements ``registry.Rendezvous`` for one launch. A participant that fails must ``abort`` it for the others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # A participant may come to its next round before the others have left the last one.
        self._turns: Counter[tuple[Meeting, int]] = Counter()
        self._rounds: dict[tuple[Meeting, int], _Round] = {}
        self._reason: str | None = None

    def exchange(
        self, channel: Hashable, participants: tuple[int, ...], participant: int, value: Value
    ) -> tuple[Value, ...]:
        """See ``registry.Rendezvous``. Raises CollectiveAborted when another participant failed."""
        if len(participants) == 1:
            return (value,)
        meeting = (channel, participants)
        with self._changed:
            turn = self._turns[meeting, participant]
            self._turns[meeting, participant] += 1
            key = (meeting, turn)
            if key not in self._rounds:
                self._rounds[key] = _Round(missing=len(participants), staying=len(participants))
            round = self._rounds[key]
            round.values[participant] = value
            round.missing -= 1
            if round.missing == 0:
                self._changed.notify_all()
            self._changed.wait_for(lambda: round.missing == 0 or self._reason is not None)
            if round.missing != 0:
                raise CollectiveAborted(reason=self._reason, participant=participant)
            round.staying -= 1
            if round.staying == 0:
                del self._rounds[key]
            return tuple(round.values[p] for p in participants)

    def abort(self, code: int, message: str) -> None:
        """Wakes everybody who waits, and refuses everybody who comes."""
        with self._changed:
            if self._reason is None:
                self._reason = message or f"status code {code}"
            self._changed.notify_all()
