"""Collectives by the alpha-beta model: what a machine's measured figures say of more devices than it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .collectives import Timed


@dataclass(frozen=True)
class Link:
    """``alpha``: seconds that one message takes, however short; ``beta``: seconds of each further byte (R. W. Hockney,
    The communication challenge for MPP, 1994)."""

    alpha: float
    beta: float

    def ring(self, size: float, devices: int) -> float:
        """Seconds of an all-reduce of ``size`` bytes that goes round twice: each device sends 2 (n - 1) messages of an
        n-th."""
        return 2 * (devices - 1) * (self.alpha + self.beta * size / devices)

    def halving(self, size: float, devices: int) -> float:
        """Seconds of one by recursive halving and doubling: 2 log2 n messages, the same bytes (R. Thakur,
        R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005)."""
        return 2 * math.ceil(math.log2(devices)) * self.alpha + 2 * (devices - 1) / devices * self.beta * size

    def all_reduce(self, size: float, devices: int) -> float:
        """The faster of both; nothing for one device."""
        return min(self.ring(size, devices), self.halving(size, devices)) if devices > 1 else 0.0


def fit(rows: Sequence[Timed], devices: int) -> Link:
    """From all-reduces of several sizes: alpha from the smallest, beta from the largest, each less the other's share.
    Raises ValueError for fewer than two sizes."""
    found = sorted((row for row in rows if row.name == "all-reduce"), key=lambda row: row.bytes)
    if len({row.bytes for row in found}) < 2:
        raise ValueError("a latency and a bandwidth need all-reduces of two sizes")
    small, large = found[0], found[-1]
    messages = 2 * math.ceil(math.log2(devices))
    share = 2 * (devices - 1) / devices
    # small = messages * alpha + share * beta * bytes; large the same.
    beta = max(0.0, (large.seconds - small.seconds) / (share * (large.bytes - small.bytes)))
    alpha = max(0.0, (small.seconds - share * beta * small.bytes) / messages)
    return Link(alpha, beta)


def efficiency(
    step_seconds: float, gradient_bytes: float, overlap: float, devices: int, within: Link, beyond: Link, size: int
) -> float:
    """Of data parallel training, a step of which takes ``step_seconds`` on one device: its share of the time over
    ``devices``, in machines of ``size`` with links ``within`` and ``beyond``. Gradients are summed in a machine, then
    between machines by an n-th each, then told in the machine; ``overlap`` of the step's time hides them."""
    inside = within.all_reduce(gradient_bytes, min(size, devices))
    machines = max(1, devices // size)
    outside = beyond.all_reduce(gradient_bytes / min(size, devices), machines)
    return step_seconds / (step_seconds + max(0.0, inside + outside - overlap * step_seconds))
