"""Collectives beside what does not wait for them: each starts as soon as it can, what it does not need comes after it,
and the schedule says where its results are waited for. Between codegen/triton's schedule and the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from flagos_backend.compile.dependences import needs_of
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.updates import Item
from flagos_backend.ir.cost import instruction_cost
from flagos_backend.ir.effects import COLLECTIVES, Effects
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import leaves
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.region import Region
from flagos_backend.loop_ir.spaces import moved_bytes

# A collective passes at most so many others that are before it in the program, and the items that they need: what is
# early takes memory. One more is passed where it is needed first.
AHEAD = 1
# So many may be under way: what they take and make stays where it is.
UNDER_WAY = 4
# How far behind a wait something is looked for that comes before it.
LOOK_AHEAD = 512
# About what a chip and its links do, in seconds and per second. It decides how much work covers a collective, no more.
_KERNEL, _BYTES, _OPERATIONS = 3e-6, 3e12, 5e14
_RENDEZVOUS, _BYTES_BETWEEN = 2e-5, 2e11


@dataclass(frozen=True, slots=True)
class Wait:
    """For what was started of ``collectives``, in order: all that are under way up to the last of them."""

    collectives: tuple[Instruction, ...]


def overlapped(computation: FlatComputation, schedule: Schedule) -> tuple[Item | Wait, ...]:
    """The items of ``schedule`` in another order, in which a collective is an item that starts it, and what waits for
    it. Collectives keep the order that they have, which all devices have to have."""
    if not any(map(_is_collective, schedule.items)):
        return schedule.items
    items = _Items(computation, schedule)
    return tuple(_with_waits(items, _started_early(items, _needed_first(items))))


def _is_collective(item: Item) -> TypeGuard[Instruction]:
    return not isinstance(item, Region) and item.opcode in COLLECTIVES


class _Items:
    """The items by number. ``needs``: for each the numbers of those that it must come after, of the parts of one buffer
    the last: each comes after the one before. Collectives have to be over."""

    def __init__(self, computation: FlatComputation, schedule: Schedule) -> None:
        self._computation, self._schedule = computation, schedule
        self._all = schedule.items
        self._effects = Effects()
        self._early: dict[int, bool] = {}
        self.collectives = [number for number, item in enumerate(self._all) if _is_collective(item)]
        self.needs = needs_of(computation, schedule, self._effects)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Item:
        return self._all[number]

    def wait_for(self, numbers: Sequence[int]) -> Wait:
        return Wait(tuple(item for n in numbers if _is_collective(item := self._all[n])))

    def seconds(self, number: int) -> float:
        item = self._all[number]
        if isinstance(item, Region):
            return _KERNEL + moved_bytes(item) / _BYTES
        if _is_collective(item):
            return _RENDEZVOUS + max(self._taken(item), self._made(item)) / _BYTES_BETWEEN
        cost = instruction_cost(item)
        return _KERNEL + max(cost.flops / _OPERATIONS, cost.bytes_accessed / _BYTES)

    def may_come_early(self, number: int) -> bool:
        """What it makes takes no more memory than what it takes, and nobody knows when it ran."""
        if number not in self._early:
            item = self._all[number]
            has_effect = not isinstance(item, Region) and self._effects.of(item)
            self._early[number] = not has_effect and self._made(item) <= self._taken(item)
        return self._early[number]

    def _taken(self, item: Item) -> int:
        return _bytes(self._schedule.reads(self._computation, item))

    def _made(self, item: Item) -> int:
        return _bytes(self._schedule.writes(self._computation, item))


def _bytes(buffers: Sequence[Instruction]) -> int:
    return sum(leaf.num_bytes for buffer in buffers for leaf in leaves(buffer.shape))


def _needed_first(items: _Items) -> list[int]:
    """Of the items between two collectives, those that the second one needs, and behind it the others."""
    ordered: list[int] = []
    begin = 0
    for number in items.collectives:
        needed, waiting = {number}, [number]
        while waiting:
            found = {n for n in items.needs[waiting.pop()] if n >= begin} - needed
            needed |= found
            waiting += found
        between = range(begin, number)
        ordered += [*filter(needed.__contains__, between), number, *itertools.filterfalse(needed.__contains__, between)]
        begin = number + 1
    return [*ordered, *range(begin, len(items))]


def _started_early(items: _Items, order: Sequence[int]) -> list[int]:
    """Collectives move up, past what they do not need; all else stays in its order."""
    places: dict[int, int] = {}  # of a collective, the place that it comes right behind
    passed: list[int] = []  # where the collectives before it were
    last = -1
    collectives = set(items.collectives)
    for place, number in enumerate(order):
        if number in collectives:
            ahead = passed[-AHEAD] if len(passed) >= AHEAD else -1
            last = places[number] = max([ahead, last, *(places[n] for n in items.needs[number])])
            passed.append(place)
        else:
            places[number] = place
    # Collectives of one place stay in their order, as sorting is stable.
    return sorted(order, key=lambda number: (places[number], number in collectives))


def _with_waits(items: _Items, order: Sequence[int]) -> Iterator[Item | Wait]:
    """A wait before the first item that needs results, and at the end. While the device would wait, what comes later
    and needs nothing that is missing comes first."""
    collectives = set(items.collectives)
    computed = communicated = 0.0  # when the device is through with all so far
    ends: dict[int, float] = {}  # of what is under way, in order
    placed, over = [False] * len(items), [False] * len(items)

    def wait(last: int) -> Wait:
        numbers = list(ends)
        numbers = numbers[: numbers.index(last) + 1]
        for number in numbers:
            over[number] = True
            del ends[number]
        return items.wait_for(numbers)

    for place, number in enumerate(order):
        if placed[number]:
            continue
        awaited = [other for other in ends if other in items.needs[number]]
        if number in collectives and len(ends) >= UNDER_WAY:
            awaited = awaited or [next(iter(ends))]
        if awaited:
            for other in itertools.islice(order, place + 1, place + LOOK_AHEAD):
                if computed >= ends[awaited[-1]]:
                    break
                is_ready = not placed[other] and all(over[n] for n in items.needs[other])
                if is_ready and items.may_come_early(other):
                    placed[other] = over[other] = True
                    computed += items.seconds(other)
                    yield items[other]
            computed = max(computed, ends[awaited[-1]])
            yield wait(awaited[-1])
        placed[number] = True
        if number in collectives:
            communicated = ends[number] = max(computed, communicated) + items.seconds(number)
        else:
            over[number] = True
            computed += items.seconds(number)
        yield items[number]
    if ends:
        yield wait(next(reversed(ends)))
