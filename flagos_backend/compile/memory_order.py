"""The order of steps that takes the least memory. Between codegen/triton's schedule and overlap.py.

Programs come in an order that does not look at memory. Three orders are tried: the program's, and the two of a list
scheduler, from the front and from the back, that takes what frees the most bytes first. The one with the lowest peak
stays; the program's, unless another one is lower by enough. Time is that of sorting the items.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from flagos_backend.compile.dependences import needs_of
from flagos_backend.compile.storages import Storages
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.updates import Item
from flagos_backend.ir.effects import COLLECTIVES, Effects
from flagos_backend.ir.hlo import Instruction
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.region import Region
from flagos_backend.runtime.accelerator.capturable import may_stay_outside

# An order is taken if its peak is lower by a part of this, at least: what is near the program's order stays that.
_LEAST_GAIN = 64

Inner = Callable[[Instruction], int]


@dataclass(frozen=True, slots=True)
class Ordered:
    """``peak``: the most bytes of temporaries that live at once in ``schedule``, parameters and results left out,
    those of what its items run included. ``handed_on``: as of Storages."""

    schedule: Schedule
    peak: int
    handed_on: int = 0


def ordered_by_memory(computation: FlatComputation, schedule: Schedule, inner: Inner) -> Ordered:
    """``schedule`` in the order of the lowest peak. ``inner``: the bytes that an instruction with called computations
    takes while it runs.

    Every item comes after what it needs, effects keep their places, and so does what a graph cannot record. A buffer
    that an item may be written over has no reader behind that item. With collectives the order stays, which overlap.py
    chooses.
    """
    items = _Items(computation, schedule, inner)
    program = range(len(schedule.items))
    lowest = items.peak(program)
    best: Sequence[int] = program
    if not any(not isinstance(item, Region) and item.opcode in COLLECTIVES for item in schedule.items):
        for order in (items.from_the_front(), items.from_the_back()):
            peak = items.peak(order)
            if peak < lowest and (best is not program or peak + peak // _LEAST_GAIN <= lowest):
                best, lowest = order, peak
    if best is program:
        return Ordered(schedule, lowest, items.handed_on)
    ordered = replace(schedule, items=tuple(schedule.items[number] for number in best))
    return Ordered(ordered, lowest, items.handed_on)


class _Items:
    """The items by number. ``touched``: the storages that each reads or writes. A storage is one piece of memory, of
    one buffer or of several that are written over one another, and lives while anything is left that touches it."""

    def __init__(self, computation: FlatComputation, schedule: Schedule, inner: Inner) -> None:
        items, effects = schedule.items, Effects()
        self._inner = [0 if isinstance(item, Region) or not item.called else inner(item) for item in items]
        self._run = _runs(items, effects)
        storages = Storages(computation, schedule)
        self._needs = [dict.fromkeys(found) for found in needs_of(computation, schedule, effects)]
        for number, earlier in storages.behind:
            self._needs[number].update(dict.fromkeys(earlier))
        self._touched = storages.touched
        self._size = storages.sizes
        self.handed_on = storages.handed_on
        self._touching: dict[Instruction, list[int]] = {}
        for number, touched in enumerate(self._touched):
            for storage in touched:
                self._touching.setdefault(storage, []).append(number)

    def peak(self, order: Iterable[int]) -> int:
        """The most bytes that live at once in ``order``."""
        left = {storage: len(touching) for storage, touching in self._touching.items()}
        begun: set[Instruction] = set()
        alive = peak = 0
        for number in order:
            touched = self._touched[number]
            alive += sum(self._size[storage] for storage in touched if storage not in begun)
            begun.update(touched)
            peak = max(peak, alive + self._inner[number])
            for storage in touched:
                left[storage] -= 1
                if not left[storage]:
                    alive -= self._size[storage]
        return peak

    def from_the_front(self) -> list[int]:
        """Next comes, of what may, what leaves the fewest bytes alive; of those the first."""
        return self._listed(self._needs, [(run, number) for number, run in enumerate(self._run)])

    def from_the_back(self) -> list[int]:
        """The same from the end of the program: a storage begins there where it ends otherwise."""
        after: list[dict[int, None]] = [{} for _ in self._needs]
        for number, needed in enumerate(self._needs):
            for other in needed:
                after[other][number] = None
        return self._listed(after, [(-run, -number) for number, run in enumerate(self._run)])[::-1]

    def _listed(self, needs: Sequence[dict[int, None]], places: Sequence[tuple[int, int]]) -> list[int]:
        """``places``: the run of each, all of which comes before the next, and its place among equals."""
        awaiting: list[list[int]] = [[] for _ in needs]
        for number, needed in enumerate(needs):
            for other in needed:
                awaiting[other].append(number)
        awaited = [len(needed) for needed in needs]
        left = {storage: len(touching) for storage, touching in self._touching.items()}
        # The sum of the numbers of what is left to touch it: of one, its number.
        sums = {storage: sum(touching) for storage, touching in self._touching.items()}
        begun: set[Instruction] = set()

        def entry(number: int) -> tuple[int, int, int, int]:
            gained = 0  # bytes that are alive behind it and not before
            for storage in self._touched[number]:
                gained += self._size[storage] * ((storage not in begun) - (left[storage] == 1))
            run, place = places[number]
            return run, gained, place, number

        # What an item gains only falls while others are taken, so that its last entry comes first.
        ready = [entry(number) for number, count in enumerate(awaited) if not count]
        heapq.heapify(ready)
        taken = [False] * len(needs)
        order: list[int] = []
        while ready:
            number = heapq.heappop(ready)[-1]
            if taken[number]:
                continue
            taken[number] = True
            order.append(number)
            changed: dict[int, None] = {}
            for storage in self._touched[number]:
                left[storage] -= 1
                sums[storage] -= number
                if storage not in begun:
                    begun.add(storage)
                    changed.update(dict.fromkeys(self._touching[storage]))
                elif left[storage] == 1:
                    changed[sums[storage]] = None
            for other in awaiting[number]:
                awaited[other] -= 1
                changed[other] = None
            for other in changed:
                if not awaited[other] and not taken[other]:
                    heapq.heappush(ready, entry(other))
        return order


def _runs(items: Sequence[Item], effects: Effects) -> list[int]:
    """For each item the number of the run that it is in: the others stay before it or behind it. What a graph cannot
    record, or may not on some chip, is a run by itself, so that a program has no more graphs than before."""
    runs, run = [], 0
    for item in items:
        is_fixed = not isinstance(item, Region) and (effects.of(item) or may_stay_outside(item))
        runs.append(run + is_fixed)
        run += 2 * is_fixed
    return runs
