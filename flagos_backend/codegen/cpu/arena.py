"""Places temporaries in one arena: two share bytes only when they are never alive at the same time."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Interval:
    """``size`` bytes, in use from step ``first`` through step ``last``."""

    first: int
    last: int
    size: int


def plan_arena(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """Offsets (multiples of 64) and the arena's size, by best fit in order of first use."""
    offsets = [0] * len(intervals)
    free: list[tuple[int, int]] = []  # (offset, size) of holes, by offset
    ends: list[tuple[int, int]] = []  # (last step, interval) of what is placed, by last step
    top = 0
    for number in sorted(range(len(intervals)), key=lambda i: intervals[i].first):
        interval = intervals[number]
        while ends and ends[0][0] < interval.first:
            _, done = ends.pop(0)
            _release(free, offsets[done], _rounded(intervals[done].size))
        size = _rounded(interval.size)
        fitting = [hole for hole in free if hole[1] >= size]
        if fitting:
            offset, hole = min(fitting, key=lambda h: h[1])
            free.remove((offset, hole))
            if hole > size:
                bisect.insort(free, (offset + size, hole - size))
        else:
            offset, top = top, top + size
        offsets[number] = offset
        bisect.insort(ends, (interval.last, number))
    return offsets, top


def _rounded(size: int) -> int:
    return max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)


def _release(free: list[tuple[int, int]], offset: int, size: int) -> None:
    """Adds a hole and joins it with its neighbours."""
    at = bisect.bisect(free, (offset, size))
    if at < len(free) and offset + size == free[at][0]:
        size += free.pop(at)[1]
    if at > 0 and free[at - 1][0] + free[at - 1][1] == offset:
        at -= 1
        before, before_size = free.pop(at)
        offset, size = before, before_size + size
    free.insert(at, (offset, size))
