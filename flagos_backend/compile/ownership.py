"""Who owns which storage inside a plan: the proof that lets a step write over an operand. Used by plan_builder.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A root stands for one storage. 0 is storage the plan may never write (constants); -1 - k is what parameter k came in;
# positive roots are storage the plan's own steps allocate.
Roots = frozenset[int]
BORROWED = 0


def parameter_root(number: int) -> int:
    return -1 - number


def parameter_of(root: int) -> int | None:
    """The parameter whose storage ``root`` is, or None."""
    return -1 - root if root < 0 else None


def is_own(root: int) -> bool:
    """Whether a step of the plan allocates ``root``."""
    return root > BORROWED


@dataclass(frozen=True, slots=True)
class StorageSet:
    """Where a value lies: the storages it may share, and whether no two of its elements can share a location."""

    roots: Roots
    distinct: bool = True


@dataclass(frozen=True, slots=True)
class Summary:
    """What a caller must know of a plan. ``overwrites``: parameters that it writes over, which the caller must hand in
    in storage of their own. ``results``: where each result lies, in the plan's own roots."""

    overwrites: frozenset[int]
    results: tuple[StorageSet, ...]


class Ownership:
    """Follows values through the steps of one plan, in order. Values are named by slot number."""

    def __init__(self, owned_parameters: Iterable[int]) -> None:
        self.overwrites: set[int] = set()
        self.storages: dict[int, StorageSet] = {}
        self._owned = frozenset(owned_parameters)
        self._live: dict[int, set[int]] = {}  # root -> slots that may lie in it
        self._next_root = 1

    def new_root(self) -> int:
        self._next_root += 1
        return self._next_root - 1

    def define(self, slot: int, found: StorageSet) -> None:
        self.storages[slot] = found
        for root in found.roots:
            self._live.setdefault(root, set()).add(slot)

    def release(self, slot: int) -> None:
        for root in self.storages[slot].roots:
            self._live[root].discard(slot)

    def union(self, slots: Iterable[int]) -> StorageSet:
        """Where something lies that may be any of ``slots``, or all of them."""
        sets = [self.storages[s] for s in slots]
        return StorageSet(frozenset().union(*(p.roots for p in sets)), all(p.distinct for p in sets))

    def may_overwrite(self, slot: int, operands: Sequence[int], dying: frozenset[int]) -> bool:
        """Whether the step that takes ``operands`` may write over ``slot``; ``dying`` are the slots last used there."""
        found = self.storages[slot]
        if slot not in dying or not found.distinct or operands.count(slot) != 1:
            return False
        for root in found.roots:
            parameter = parameter_of(root)
            if root == BORROWED or (parameter is not None and parameter not in self._owned):
                return False
            if self._live[root] != {slot}:
                return False
        return True

    def overwrite(self, slot: int) -> None:
        """Notes that a step writes over ``slot``."""
        parameters = (parameter_of(root) for root in self.storages[slot].roots)
        self.overwrites.update(p for p in parameters if p is not None)

    def summary(self, results: Sequence[int]) -> Summary:
        return Summary(frozenset(self.overwrites), tuple(self.storages[r] for r in results))


def hand_over(
    owner: Ownership, overwrites: frozenset[int], slots: Sequence[int], dying: frozenset[int]
) -> tuple[int, ...]:
    """Gives up the arguments that a callee writes over; returns those that it must be given copies of instead."""
    copied = []
    for index in sorted(overwrites):
        if owner.may_overwrite(slots[index], slots, dying):
            owner.overwrite(slots[index])
        else:
            copied.append(index)
    return tuple(copied)


def after_copy(owner: Ownership, slot: int, copied: bool) -> StorageSet:
    return StorageSet(frozenset({owner.new_root()})) if copied else owner.storages[slot]


def call_results(ownership: Ownership, summary: Summary, arguments: Sequence[StorageSet]) -> tuple[StorageSet, ...]:
    """Where the results of a called plan lie for the caller, given where its arguments lay."""
    fresh: dict[int, int] = {}
    results = []
    for found in summary.results:
        roots: set[int] = set()
        distinct = found.distinct
        for root in found.roots:
            parameter = parameter_of(root)
            if parameter is not None:
                roots |= arguments[parameter].roots
                distinct &= arguments[parameter].distinct
            elif root == BORROWED:
                roots.add(BORROWED)
            else:
                if root not in fresh:
                    fresh[root] = ownership.new_root()
                roots.add(fresh[root])
        results.append(StorageSet(frozenset(roots), distinct))
    return tuple(results)


def join(alternatives: Sequence[Sequence[StorageSet]]) -> tuple[StorageSet, ...]:
    """Where results lie that come from one of several calls."""
    return tuple(
        StorageSet(frozenset().union(*(p.roots for p in sets)), all(p.distinct for p in sets))
        for sets in zip(*alternatives, strict=True)
    )


def fresh_results(alternatives: Sequence[Sequence[StorageSet]], arguments: Sequence[StorageSet]) -> frozenset[int]:
    """The numbers of the results that lie in storage of their own, whichever of the calls they come from."""
    given = frozenset({BORROWED}).union(*(found.roots for found in arguments))
    joined = join(alternatives)

    def is_fresh(number: int) -> bool:
        roots = joined[number].roots
        others = (found.roots for other, found in enumerate(joined) if other != number)
        return not roots & given and all(map(roots.isdisjoint, others))

    return frozenset(filter(is_fresh, range(len(joined))))


def kept_arguments(alternatives: Sequence[Summary], arguments: Sequence[Sequence[int]]) -> tuple[int | None, ...]:
    """For each result the slot in whose storage it lies whichever of the plans was called, or None."""

    def kept(number: int) -> int | None:
        found: set[int | None] = set()
        for summary, slots in zip(alternatives, arguments, strict=True):
            roots = summary.results[number].roots
            parameter = parameter_of(next(iter(roots))) if len(roots) == 1 else None
            found.add(None if parameter is None else slots[parameter])
        return found.pop() if len(found) == 1 else None

    return tuple(map(kept, range(len(alternatives[0].results))))


@dataclass(frozen=True, slots=True)
class LoopSummary:
    """A loop body's summary, closed over its back edge. ``overwrites`` must come in, and go round, in storage of their
    own; ``copied``: those that the body hands back otherwise, so that the loop copies them at each iteration."""

    body: Summary
    overwrites: frozenset[int]
    copied: frozenset[int]


def close_loop(body: Summary) -> LoopSummary:
    """Finds what must be owned for the body to run again on its own results."""
    overwrites = set(body.overwrites)
    copied: set[int] = set()
    pending = sorted(overwrites)
    while pending:
        index = pending.pop()
        found = body.results[index]
        others = (p for i, p in enumerate(body.results) if i != index and i not in copied)
        shared = any(found.roots & other.roots for other in others)
        if BORROWED in found.roots or not found.distinct or shared:
            copied.add(index)
            continue
        # The storage that goes round into this leaf next iteration must be owned as well.
        for parameter in sorted(p for p in map(parameter_of, found.roots) if p is not None):
            if parameter not in overwrites:
                overwrites.add(parameter)
                pending.append(parameter)
    return LoopSummary(body, frozenset(overwrites), frozenset(copied))


def loop_results(
    ownership: Ownership, loop: LoopSummary, initial: Sequence[StorageSet], runs: bool
) -> tuple[StorageSet, ...]:
    """Where a loop's results lie for its caller, given where the initial values lay. ``runs``: the body runs at least
    once, and otherwise any number of times."""
    count = len(initial)
    fresh: dict[int, int] = {}
    roots: list[set[int]] = [set() if runs else set(p.roots) for p in initial]
    distinct = [runs or p.distinct for p in initial]
    sources: list[list[int]] = [[] for _ in range(count)]
    for index, found in enumerate(loop.body.results):
        if index in loop.copied:
            roots[index].add(ownership.new_root())
            continue
        distinct[index] &= found.distinct
        for root in found.roots:
            parameter = parameter_of(root)
            if parameter is not None:
                # What the last iteration got there: the initial value, or what the iteration before it left.
                sources[index].append(parameter)
                roots[index] |= initial[parameter].roots
                distinct[index] &= initial[parameter].distinct
            elif root == BORROWED:
                roots[index].add(BORROWED)
            else:
                if root not in fresh:
                    fresh[root] = ownership.new_root()
                roots[index].add(fresh[root])
    changed = True
    while changed:
        changed = False
        for index in range(count):
            for source in sources[index]:
                if not roots[source] <= roots[index] or (distinct[index] and not distinct[source]):
                    roots[index] |= roots[source]
                    distinct[index] &= distinct[source]
                    changed = True
    return tuple(StorageSet(frozenset(r), d) for r, d in zip(roots, distinct, strict=True))
