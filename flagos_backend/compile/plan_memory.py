"""The memory that a plan takes, by following its storages through the steps as plan.py runs them. Used by
plan_builder.py; what explain shows, and the executable's size of temporaries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from flagos_backend.runtime.control_flow import Copies

# The storages that a value may lie in, by number. What a caller lends has none.
Held = frozenset[int]
NOTHING: Held = frozenset()
# So many iterations of a loop are followed at most: states that go round repeat before.
_MAX_ITERATIONS = 16


@dataclass(frozen=True, slots=True)
class Made:
    """A result in ``slot``: in storage of its own of ``bytes``, which is 0 where a step takes none, or in that of the
    slots ``shares``."""

    slot: int
    bytes: int
    shares: tuple[int, ...]


class Trace:
    """What becomes of storages in one run. ``events``: (storage, bytes that are there from now on, or are not)."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self._bytes: list[int] = []
        self._holders: list[int] = []
        self._joined: dict[int, int] = {}

    def new(self, size: int) -> Held:
        """A storage that nobody holds yet."""
        self._bytes.append(size)
        self._holders.append(0)
        return frozenset({len(self._bytes) - 1})

    def hold(self, held: Held) -> None:
        for storage in held:
            self._holders[storage] += 1
            if self._holders[storage] == 1:
                self.events.append((storage, self._bytes[storage]))

    def drop(self, held: Held) -> None:
        for storage in held:
            self._holders[storage] -= 1
            if not self._holders[storage]:
                self.events.append((storage, -self._bytes[storage]))

    def hold_all(self, values: Iterable[Held]) -> None:
        for held in values:
            self.hold(held)

    def drop_all(self, values: Iterable[Held]) -> None:
        for held in values:
            self.drop(held)

    def empty(self, values: list[Held], slots: Iterable[int]) -> None:
        for slot in slots:
            self.drop(values[slot])
            values[slot] = NOTHING

    def size(self, storage: int) -> int:
        return self._bytes[storage]

    @property
    def count(self) -> int:
        """Of the storages that there were so far: the number of the next one."""
        return len(self._bytes)

    def join(self, storages: Iterable[int], joined: int) -> None:
        """``joined`` stands for whichever of ``storages`` a run has."""
        for storage in storages:
            self._joined.setdefault(storage, joined)

    def peak(self, returned: Held) -> int:
        """The most bytes that are there at once, but for storages that are ``returned``."""

        def is_returned(storage: int) -> bool:
            while storage not in returned and storage in self._joined:
                storage = self._joined[storage]
            return storage in returned

        changes = (change for storage, change in self.events if not is_returned(storage))
        return max(itertools.accumulate(changes), default=0)


# Runs a step: what the slots hold -> what its results do, which is held. It may empty slots.
Follow = Callable[[Trace, list[Held]], Sequence[Held]]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """``made``: in the order of the results. ``frees``: slots that are empty afterwards. ``follow``: of a step that
    runs plans, in place of what ``made`` says of storages."""

    made: tuple[Made, ...]
    frees: tuple[int, ...]
    follow: Follow | None = None


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """``slots``: how many there are; ``parameters``, ``results``: their slots."""

    slots: int
    parameters: Sequence[int]
    results: Sequence[int]
    steps: Sequence[StepMemory]

    @property
    def temporary_bytes(self) -> int:
        """The most bytes that live at once, beside arguments, constants and what the results lie in."""
        trace = Trace()
        results = self.follow(trace, [NOTHING] * len(self.parameters))
        return trace.peak(NOTHING.union(*results))

    def follow(self, trace: Trace, arguments: Sequence[Held]) -> list[Held]:
        """A run. The caller's hold of the arguments becomes the run's, and the run's of the results the caller's."""
        values = [NOTHING] * self.slots
        for slot, argument in zip(self.parameters, arguments, strict=True):
            values[slot] = argument
        for step in self.steps:
            if step.follow is None:
                results: Sequence[Held] = [_made(trace, made, values) for made in step.made]
            else:
                results = step.follow(trace, values)
            for made, held in zip(step.made, results, strict=True):
                trace.drop(values[made.slot])
                values[made.slot] = held
            trace.empty(values, step.frees)
        returned = [values[slot] for slot in self.results]
        trace.hold_all(returned)
        trace.drop_all(values)
        return returned


def _made(trace: Trace, made: Made, values: Sequence[Held]) -> Held:
    held = NOTHING.union(*(values[slot] for slot in made.shares))
    if made.bytes:
        held |= trace.new(made.bytes)
    trace.hold(held)
    return held


def followed_loop(
    iteration: PlanMemory,
    condition: PlanMemory | None,
    trip_count: int | None,
    operands: Sequence[int],
    sizes: Sequence[int],
    copies: Copies,
) -> Follow:
    """A loop as control_flow.py runs it: counted, or with a ``condition``, and then at least once. ``sizes``: the bytes
    of each value."""

    def copied(trace: Trace, state: list[Held], numbers: Iterable[int]) -> None:
        for number in numbers:
            held = trace.new(sizes[number])
            trace.hold(held)
            trace.drop(state[number])
            state[number] = held

    def follow(trace: Trace, values: list[Held]) -> Sequence[Held]:
        before = trace.count
        state = [values[slot] for slot in operands]
        trace.hold_all(state)
        trace.empty(values, copies.dying)
        copied(trace, state, copies.first)
        if condition is not None:
            trace.hold_all(state)
            trace.drop_all(condition.follow(trace, state))
        seen: set[Hashable] = set()
        for _ in range(_MAX_ITERATIONS if trip_count is None else min(trip_count, _MAX_ITERATIONS)):
            pattern = _pattern(state, before)
            # What all iterations but the last leave is temporary. So one that repeats is followed, as the last.
            is_last = pattern in seen
            seen.add(pattern)
            state = iteration.follow(trace, state)
            if condition is not None:
                trace.drop(state.pop())
            copied(trace, state, copies.each_iteration)
            if is_last:
                break
        return state

    return follow


def followed_conditional(
    branches: Sequence[PlanMemory], operands: Sequence[Sequence[int]], sizes: Sequence[int], dying: Sequence[int]
) -> Follow:
    """Each of ``branches``, one after the other, each with what there was before. ``sizes``: the bytes of each
    result."""

    def follow(trace: Trace, values: list[Held]) -> Sequence[Held]:
        before = trace.count
        given_up = [values[slot] for slot in dying]
        outcomes = []
        for branch, slots in zip(branches, operands, strict=True):
            arguments = [values[slot] for slot in slots]
            trace.hold_all(arguments)
            trace.drop_all(given_up)
            outcomes.append(branch.follow(trace, arguments))
            trace.drop_all(outcomes[-1])
            trace.hold_all(given_up)
        results = []
        for size, alternatives in zip(sizes, zip(*outcomes, strict=True), strict=True):
            storages = NOTHING.union(*alternatives)
            made = [storage for storage in storages if storage >= before]
            held = storages.difference(made)
            if made:
                (joined,) = trace.new(size)
                trace.join(made, joined)
                # What another branch hands on instead takes no more.
                held = frozenset(storage for storage in held if trace.size(storage) > size) | {joined}
            results.append(held)
        trace.empty(values, dying)
        trace.hold_all(results)
        return results

    return follow


def _pattern(state: Sequence[Held], before: int) -> Hashable:
    """Equal for states that have the same of the first ``before`` storages, and share the others alike."""
    numbers: dict[int, int] = {}
    return tuple(
        tuple(s if s < before else before + numbers.setdefault(s, len(numbers)) for s in sorted(held)) for held in state
    )
