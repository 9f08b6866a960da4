"""Collectives beside what does not wait for them: each starts as soon as it can, what it does not need comes after it,
and the schedule says where its results are waited for. Between codegen/triton's schedule and the plan."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from flagos_backend.fusion.flat import FlatComputation
from flagos_backend.fusion.fuse import Schedule
from flagos_backend.fusion.region import Region
from flagos_backend.fusion.spaces import moved_bytes
from flagos_backend.fusion.updates import Item, copied, sources, targets
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import leaves
from flagos_backend.passes.effects import COLLECTIVES, Effects
from flagos_backend.runtime.cost import instruction_cost

# A collective passes at most so many others that are before it in the program, and the items that they need: what is
# early takes memory. One more is passed where it is needed first.
AHEAD = 1
# So many may be under way: what they take and make stays where it is.
UNDER_WAY = 4
# How far behind a wait something is looked for that comes before it.
LOOK_AHEAD = 512
# About what a chip and its links do, in seconds and per second. It decides how much work covers a collective, no more.
_KERNEL, _BYTES, _OPERATIONS = 3e-6, 3e12, 5e14
_MEETING, _BYTES_BETWEEN = 2e-5, 2e11


@dataclass(frozen=True, slots=True)
class Wait:
    """For what was started of ``collectives``, in order: all that are under way up to the last of them."""

    collectives: tuple[Instruction, ...]


def overlapped(computation: FlatComputation, schedule: Schedule) -> tuple[Item | Wait, ...]:
    """The items of ``schedule`` in another order, in which a collective is an item that starts it, and what waits for
    it. Collectives keep the order that they have, which all devices have to have."""
    if not any(map(_is_collective, schedule.items)):
        return schedule.items
    overlap = _Overlap(computation, schedule)
    return tuple(overlap.with_waits(overlap.started_early(overlap.needed_first(schedule.items))))


def _is_collective(item: Item) -> TypeGuard[Instruction]:
    return not isinstance(item, Region) and item.opcode in COLLECTIVES


class _Overlap:
    def __init__(self, computation: FlatComputation, schedule: Schedule) -> None:
        self.computation, self.schedule = computation, schedule
        self.effects = Effects()

    def needed_first(self, items: Sequence[Item]) -> list[Item]:
        """Of the items between two collectives, those that the second one needs, and behind it the others."""
        needs = self._needs(items)
        ordered: list[Item] = []
        begin = 0
        for number, item in enumerate(items):
            if not _is_collective(item):
                continue
            needed, waiting = {number}, [number]
            while waiting:
                found = {n for n in needs[waiting.pop()] if n >= begin} - needed
                needed |= found
                waiting += found
            ordered += (items[n] for n in range(begin, number + 1) if n in needed)
            ordered += (items[n] for n in range(begin, number) if n not in needed)
            begin = number + 1
        return [*ordered, *items[begin:]]

    def started_early(self, items: Sequence[Item]) -> list[Item]:
        """Collectives move up, past what they do not need; all else stays in its order."""
        needs = self._needs(items)
        places: list[tuple[int, bool]] = []  # the number of an item, and whether it comes right behind
        collectives: list[int] = []
        for number, item in enumerate(items):
            place = number, False
            if _is_collective(item):
                ahead = collectives[-AHEAD] if len(collectives) >= AHEAD else -1
                before = [*collectives[-1:], *needs[number]]
                place = max([ahead, *(places[n][0] for n in before)]), True
                collectives.append(number)
            places.append(place)
        # Those of one place stay in the order of the program, as sorting is stable.
        return [items[number] for number in sorted(range(len(items)), key=places.__getitem__)]

    def with_waits(self, items: Sequence[Item]) -> Iterator[Item | Wait]:
        """A wait before the first item that needs results, and at the end. While the device would wait, what comes
        later and needs nothing that is missing comes first."""
        needs = self._needs(items)
        computed = communicated = 0.0  # when the device is through with all so far
        ends: dict[int, float] = {}  # of what is under way, in order
        waiting = dict.fromkeys(range(len(items)))
        while waiting:
            number = next(iter(waiting))
            awaited = [n for n in needs[number] if n in ends]
            if _is_collective(items[number]) and len(ends) >= UNDER_WAY:
                awaited.append(next(iter(ends)))
            if awaited:
                last = max(awaited)
                missing = waiting.keys() | ends.keys()
                for other in list(itertools.islice(waiting, 1, LOOK_AHEAD)):
                    if computed >= ends[last]:
                        break
                    if self._comes_early(items[other]) and missing.isdisjoint(needs[other]):
                        del waiting[other]
                        missing.discard(other)
                        computed += self._seconds(items[other])
                        yield items[other]
                computed = max(computed, ends[last])
                yield self._wait(items, ends, last)
            del waiting[number]
            if _is_collective(items[number]):
                communicated = ends[number] = max(computed, communicated) + self._seconds(items[number])
            else:
                computed += self._seconds(items[number])
            yield items[number]
        if ends:
            yield self._wait(items, ends, max(ends))

    @staticmethod
    def _wait(items: Sequence[Item], ends: dict[int, float], last: int) -> Wait:
        over = [number for number in ends if number <= last]
        for number in over:
            del ends[number]
        return Wait(tuple(item for number in over if _is_collective(item := items[number])))

    def _comes_early(self, item: Item) -> bool:
        """Whether it may: what it makes takes no more memory than what it takes."""
        if not isinstance(item, Region) and self.effects.of(item):
            return False
        return _bytes(self._writes(item)) <= _bytes(self._reads(item))

    def _seconds(self, item: Item) -> float:
        if isinstance(item, Region):
            return _KERNEL + moved_bytes(item) / _BYTES
        if _is_collective(item):
            return _MEETING + max(_bytes(self._reads(item)), _bytes(self._writes(item))) / _BYTES_BETWEEN
        cost = instruction_cost(item)
        return _KERNEL + max(cost.flops / _OPERATIONS, cost.bytes_accessed / _BYTES)

    def _needs(self, items: Sequence[Item]) -> list[list[int]]:
        """The numbers of the items that each must come after; collectives have to be over."""
        writers: defaultdict[Instruction, list[int]] = defaultdict(list)
        readers: defaultdict[Instruction, list[int]] = defaultdict(list)
        meetings: list[int] = []
        effects: list[int] = []
        needs = []
        for number, item in enumerate(items):
            reads, writes = self._reads(item), self._writes(item)
            found = [n for buffer in (*reads, *writes) for n in writers[buffer]]
            array = copied(item)
            if array is not None:  # which the update may be written over
                found += readers[array]
            if _is_collective(item):
                found += effects[-1:]
                meetings.append(number)
            elif not isinstance(item, Region) and self.effects.of(item):
                found += [*effects[-1:], *meetings[-1:]]
                effects.append(number)
            needs.append(found)
            for buffer in reads:
                readers[buffer].append(number)
            for buffer in writes:
                writers[buffer].append(number)
        return needs

    def _reads(self, item: Item) -> tuple[Instruction, ...]:
        if isinstance(item, Region):
            return sources(item)
        views = (self.schedule.views.get((item, number)) for number in range(len(self.computation.operands(item))))
        read = (v.buffer if v else o for v, o in zip(views, self.computation.operands(item), strict=True))
        return tuple(self.schedule.buffers.get(buffer, buffer) for buffer in read)

    def _writes(self, item: Item) -> tuple[Instruction, ...]:
        return targets(item) if isinstance(item, Region) else self.computation.leaves_of[item]


def _bytes(buffers: Sequence[Instruction]) -> int:
    return sum(leaf.num_bytes for buffer in buffers for leaf in leaves(buffer.shape))
