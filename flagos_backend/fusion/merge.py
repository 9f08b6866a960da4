"""Merges the regions of a schedule, for devices on which a kernel may be large and a trip through memory is dear.

A region joins the one that reads its result at the same points, or one that reads the same data: softmax and the norms
become one kernel. Between fuse.py and an emitter for accelerators.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flagos_backend.fusion.flat import FlatComputation
from flagos_backend.fusion.fuse import Schedule, uniform_literal
from flagos_backend.fusion.literals import starts_neutral
from flagos_backend.fusion.region import Apply, Expression, Fold, Load, Region, Store
from flagos_backend.fusion.rewriting import Pool, rewrite
from flagos_backend.fusion.spaces import Placement, common_dims, place, shared_bytes, substitute
from flagos_backend.ir.hlo import Instruction

# Past these a kernel compiles slowly and spills its registers.
MAX_OPERATIONS = 320
MAX_BUFFERS = 32
# How many steps a look for a cycle takes before it gives up and the regions stay apart.
_MAX_VISITS = 512
# Sharing less than this does not pay for a kernel whose programs do two things.
_MIN_SHARED_BYTES = 1

Accepts = Callable[[Region], bool]


def merge(computation: FlatComputation, schedule: Schedule, accepts: Accepts) -> Schedule:
    """``schedule`` with fewer, larger regions; ``accepts`` tells whether the emitter takes it and runs it well."""
    merger = _Merger(computation, schedule, accepts)
    merger.join_producers()
    merger.join_siblings()
    return Schedule(tuple(merger.ordered()), schedule.buffers)


@dataclass(eq=False, slots=True)
class _Node:
    """An item of the schedule and what must run before and after it."""

    number: int
    item: Region | Instruction
    reads: tuple[Instruction, ...]
    writes: tuple[Instruction, ...]
    before: dict[_Node, None] = field(default_factory=dict)
    after: dict[_Node, None] = field(default_factory=dict)


class _Merger:
    def __init__(self, computation: FlatComputation, schedule: Schedule, accepts: Accepts) -> None:
        self.computation, self.buffers, self.accepts = computation, schedule.buffers, accepts
        self.pool = Pool()
        self.outputs = {schedule.buffers[output] for output in computation.outputs}
        self.nodes: dict[_Node, None] = {}
        self.writers: defaultdict[Instruction, list[_Node]] = defaultdict(list)
        self.readers: defaultdict[Instruction, dict[_Node, None]] = defaultdict(dict)
        for number, item in enumerate(schedule.items):
            self._add(self._node(number, item))

    # ---- The graph

    def _node(self, number: int, item: Region | Instruction) -> _Node:
        if isinstance(item, Region):
            item = _simplified(item, self.pool)
            return _Node(number, item, _sources(item), _targets(item))
        reads = tuple(self.buffers[operand] for operand in self.computation.operands(item))
        return _Node(number, item, reads, self.computation.leaves_of[item])

    def _add(self, node: _Node) -> None:
        self.nodes[node] = None
        for buffer in node.reads:
            for writer in self.writers[buffer]:
                _order(writer, node)
            self.readers[buffer][node] = None
        for buffer in node.writes:
            for writer in self.writers[buffer]:  # another part of the same buffer, which may overwrite
                _order(writer, node)
            self.writers[buffer].append(node)

    def _replace(self, old: tuple[_Node, _Node], region: Region) -> _Node:
        """One node in the place of two."""
        node = _Node(old[1].number, region, _sources(region), _targets(region))
        for gone in old:
            del self.nodes[gone]
            for other in gone.before:
                other.after.pop(gone, None)
                if other not in old:
                    _order(other, node)
            for other in gone.after:
                other.before.pop(gone, None)
                if other not in old:
                    _order(node, other)
            for buffer in gone.reads:
                self.readers[buffer].pop(gone, None)
            for buffer in gone.writes:
                self.writers[buffer].remove(gone)
        for buffer in node.reads:
            self.readers[buffer][node] = None
        for buffer in node.writes:
            self.writers[buffer].append(node)
        self.nodes[node] = None
        return node

    def ordered(self) -> Iterator[Region | Instruction]:
        """The items, each after what it needs, otherwise as they were."""
        waiting = {node: len(node.before) for node in self.nodes}
        numbered = {node.number: node for node in self.nodes}
        ready = [number for number, node in numbered.items() if not node.before]
        heapq.heapify(ready)
        while ready:
            node = numbered[heapq.heappop(ready)]
            yield node.item
            for other in node.after:
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, other.number)

    # ---- Producers

    def join_producers(self) -> None:
        for node in list(self.nodes):
            if node in self.nodes:
                self._join_producers_of(node)

    def _join_producers_of(self, node: _Node) -> None:
        refused: set[_Node] = set()
        while isinstance(node.item, Region):
            producers = {w for buffer in node.reads for w in self.writers[buffer]} - refused
            if not producers:
                return
            producer = max(producers, key=lambda n: n.number)
            region = self._joined(producer, node)
            if region is None:
                refused.add(producer)
            else:
                node = self._replace((producer, node), region)

    def _joined(self, producer: _Node, consumer: _Node) -> Region | None:
        """Both as one region, or None."""
        first, second = producer.item, consumer.item
        if not isinstance(first, Region) or not isinstance(second, Region):
            return None
        if any(len(self.writers[buffer]) != 1 for buffer in producer.writes) or _reaches(producer, consumer):
            return None
        for here, there in _placements(first, second):
            placed = place(first, here, self.pool)
            changed = substitute(place(second, there, self.pool), placed.stores, self.pool)
            if changed is None:
                continue
            kept = tuple(s for s in placed.stores if self._is_needed(s.target, consumer))
            region = Region(placed.dims, (*kept, *changed.stores))
            if self._fits(region):
                return region
        return None

    def _is_needed(self, buffer: Instruction, consumer: _Node) -> bool:
        """Whether anything but ``consumer`` wants ``buffer``."""
        return buffer in self.outputs or any(reader is not consumer for reader in self.readers[buffer])

    def _fits(self, region: Region) -> bool:
        expressions = region.expressions()
        operations = sum(isinstance(e, Apply) for e in expressions)
        buffers = len(_sources(region)) + len(_targets(region))
        return operations <= MAX_OPERATIONS and buffers <= MAX_BUFFERS and self.accepts(region)

    # ---- Siblings

    def join_siblings(self) -> None:
        for buffer in list(self.readers):
            self._join_readers(buffer)

    def _join_readers(self, buffer: Instruction) -> None:
        left = [node for node in self.readers[buffer] if isinstance(node.item, Region)]
        left.sort(key=lambda node: node.number)
        while left:
            first = left.pop(0)
            for second in left:
                region = self._paired(first, second)
                if region is not None:
                    left[left.index(second)] = self._replace((first, second), region)
                    break

    def _paired(self, first: _Node, second: _Node) -> Region | None:
        a, b = first.item, second.item
        assert isinstance(a, Region)
        assert isinstance(b, Region)
        if first in second.before or second in first.before or _reaches(first, second) or _reaches(second, first):
            return None
        found = common_dims(a.dims, b.dims, range(b.rank))
        if found is None:
            return None
        here, there = found
        a, b = place(a, here, self.pool), place(b, there, self.pool)
        region = Region(a.dims, (*a.stores, *b.stores))
        return region if shared_bytes(a, b) >= _MIN_SHARED_BYTES and self._fits(region) else None


def _order(first: _Node, second: _Node) -> None:
    first.after[second] = None
    second.before[first] = None


def _reaches(first: _Node, last: _Node) -> bool:
    """Whether ``last`` needs ``first`` through a third node; also True when that takes long to find out."""
    seen = {first}
    stack = [node for node in first.after if node is not last]
    while stack:
        node = stack.pop()
        if node is last or len(seen) > _MAX_VISITS:
            return True
        if node not in seen:
            seen.add(node)
            stack.extend(node.after)
    return False


def _placements(producer: Region, consumer: Region) -> Iterator[tuple[Placement, Placement]]:
    """Ways to walk both at once: point by point, or one of them once for each row of the other's folds."""
    found = common_dims(producer.dims, consumer.dims, range(consumer.rank))
    if found is not None:
        yield found
    for inner, outer, swap in ((producer, consumer, False), (consumer, producer, True)):
        for folded in dict.fromkeys(fold.dims for fold in outer.folds if not inner.folds):
            found = common_dims(inner.dims, outer.dims, [d for d in range(outer.rank) if d not in folded])
            if found is not None:
                yield (found[1], found[0]) if swap else found


def _sources(region: Region) -> tuple[Instruction, ...]:
    return tuple(dict.fromkeys(e.source for e in region.expressions() if isinstance(e, Load)))


def _targets(region: Region) -> tuple[Instruction, ...]:
    return tuple(dict.fromkeys(store.target for store in region.stores))


def _simplified(region: Region, pool: Pool) -> Region:
    """Loads of constants that are the same everywhere become literals, folds over dimensions of size 1 what they fold,
    equal expressions one."""
    moved: dict[Expression, Expression] = {}

    def replace(expression: Expression) -> Expression | None:
        if isinstance(expression, Load):
            return uniform_literal(expression.source)
        if not isinstance(expression, Fold) or any(region.dims[d] != 1 for d in expression.dims):
            return None
        value, initial = (moved[operand] for operand in expression.operands)
        if starts_neutral(Fold(expression.element_type, expression.combine, value, initial, ())):
            return value
        combined = Apply(expression.element_type, expression.combine, (initial, value))
        return pool.apply(combined, combined.operands)

    rewrite(region.expressions(), pool, lambda index: index, lambda dims: dims, replace, moved)
    return Region(region.dims, tuple(Store(s.target, moved[s.value], s.index) for s in region.stores))
