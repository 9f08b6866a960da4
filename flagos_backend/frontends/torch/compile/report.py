"""What became of the nodes of each compiled graph: for the log, for tests and for whoever asks."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Nodes by what they became. ``lowered``: HLO; ``whole``: the library's operator, by choice; ``fallback``: the
    operator itself for want of a lowering; ``outside``: run by PyTorch between programs, because no program has them or
    sizes depend on their results."""

    name: str
    lowered: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)
    fallback: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)

    def add(self, other: GraphReport) -> None:
        """Counts the nodes of another program of the same graph."""
        for kind in ("lowered", "whole", "fallback", "outside"):
            getattr(self, kind).update(getattr(other, kind))

    def __str__(self) -> str:
        parts = [
            f"{sum(self.lowered.values())} nodes lowered",
            _listed("left whole", self.whole),
            _listed("without lowering", self.fallback),
            _listed("between programs", self.outside),
        ]
        return f"{self.name}: {'; '.join(part for part in parts if part)}"


def _listed(label: str, counts: Counter[str]) -> str:
    names = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in sorted(counts.items()))
    return f"{sum(counts.values())} {label} ({names})" if counts else ""


_KEPT = 256
_lock = threading.Lock()
_reports: deque[GraphReport] = deque(maxlen=_KEPT)


def record(report: GraphReport) -> None:
    with _lock:
        _reports.append(report)


def reports() -> tuple[GraphReport, ...]:
    """The programs compiled last, at most 256, oldest first."""
    with _lock:
        return tuple(_reports)


def clear() -> None:
    with _lock:
        _reports.clear()
