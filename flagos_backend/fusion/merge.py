"""Merges the regions of a schedule, for devices on which a kernel may be large and a trip through memory is expensive.

A region joins the one that reads its result at the same points, or one that reads the same data: softmax and the norms
become one kernel. Between fuse.py and an emitter for accelerators.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

from flagos_backend.fusion.interleaved import is_put_together
from flagos_backend.fusion.recompute import recomputed
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.updates import copied, is_update, sources, targets
from flagos_backend.ir.effects import Effects
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.literals import starts_neutral, uniform_literal
from flagos_backend.loop_ir.region import Apply, Expression, Load, Reduce, Region, Store
from flagos_backend.loop_ir.rewriting import Pool, rewrite, rewrite_store, unmoved
from flagos_backend.loop_ir.spaces import Placement, common_dims, moved_bytes, place, shared_bytes, substitute

# Past these a kernel compiles slowly and spills its registers.
MAX_OPERATIONS = 320
MAX_BUFFERS = 32
# How many operations on scalars cost less than a kernel of their own.
_MAX_SCALAR_OPERATIONS = 16
# How many steps a look for a cycle takes before it gives up and the regions stay apart.
_MAX_VISITS = 512
# How many siblings of a region, or parts beside one, are tried.
_MAX_SIBLINGS = 16
# Siblings are joined when they share this part of what the smaller one moves, or when both are small: then it is the
# start of a kernel that is saved.
_SHARED_PART = 8
_SMALL_BYTES = 1 << 18

# How many elements a row has, at least, for its own values to wait for it.
_LEAST_ROW = 16

Accepts = Callable[[Region], bool]


def merge(
    computation: FlatComputation, schedule: Schedule, accepts: Accepts, expensive_launches: bool = False
) -> Schedule:
    """``schedule`` with fewer, larger regions; ``accepts`` tells whether the emitter takes it and runs it well.

    ``expensive_launches``: starting a kernel takes longer than a few scalar operations in each of its programs.
    """
    merger = _Merger(computation, schedule, accepts, expensive_launches)
    merger.join_producers()
    merger.join_parts()
    merger.join_siblings()
    merger.drop_cheap_buffers()
    items = tuple(merger.ordered())
    merger.take_apart()
    return Schedule(items, schedule.buffers, schedule.views)


@dataclass(eq=False, slots=True, repr=False)
class _Node:
    """An item of the schedule and what must run before and after it. ``number``: its place in a valid order."""

    number: int
    item: Region | Instruction
    reads: tuple[Instruction, ...]
    writes: tuple[Instruction, ...]
    before: dict[_Node, None] = field(default_factory=dict)
    after: dict[_Node, None] = field(default_factory=dict)
    _moved: int = -1

    @property
    def moved(self) -> int:
        """Bytes that the node's region loads and stores."""
        if self._moved < 0 and isinstance(self.item, Region):
            self._moved = moved_bytes(self.item)
        return self._moved


class _Merger:
    def __init__(
        self, computation: FlatComputation, schedule: Schedule, accepts: Accepts, expensive_launches: bool
    ) -> None:
        self.computation, self.accepts, self.expensive_launches = computation, accepts, expensive_launches
        self.schedule = schedule
        self.pool = Pool()
        self.outputs = {schedule.buffers[output] for output in computation.outputs}
        self.updated: set[Instruction] = set()  # what an update may be written over if nobody reads it any more
        self.nodes: list[_Node | None] = []  # by number
        self.awaited = False  # whether any producer is left to a reader that comes later
        self.writers: defaultdict[Instruction, list[_Node]] = defaultdict(list)
        self.readers: defaultdict[Instruction, dict[_Node, None]] = defaultdict(dict)
        effects = Effects()
        last: _Node | None = None  # that does more than compute its values
        for number, item in enumerate(schedule.items):
            node = self._node(number, item)
            self._add(node)
            if not isinstance(item, Region) and effects.of(item):
                if last is not None:
                    _order(last, node)
                last = node

    # ---- The graph

    def _node(self, number: int, item: Region | Instruction) -> _Node:
        if isinstance(item, Region):
            item = _simplified(item, self.pool)
        reads, writes = (of(self.computation, item) for of in (self.schedule.reads, self.schedule.writes))
        return _Node(number, item, reads, writes)

    def _add(self, node: _Node) -> None:
        self.nodes.append(node)
        for buffer in node.reads:
            for writer in self.writers[buffer]:
                _order(writer, node)
            if copied(node.item) is not None:
                self.updated.add(buffer)
                for reader in self.readers[buffer]:
                    _order(reader, node)
            self.readers[buffer][node] = None
        for buffer in node.writes:
            # Another part of the same buffer, which may overwrite. Those of a concatenation do not: they stay in a row,
            # as many as they are.
            parts = self.writers[buffer]
            for writer in parts[-1:] if is_put_together(buffer) else parts:
                _order(writer, node)
            self.writers[buffer].append(node)

    def _replace(self, first: _Node, second: _Node, region: Region) -> _Node:
        """One node in the place of two, of which ``second`` comes later and needs ``first`` at most directly."""
        node = _Node(second.number, region, sources(region), targets(region))
        self._make_room(first, node)
        for gone in (first, second):
            for other in gone.before:
                other.after.pop(gone, None)
                if other is not first:
                    _order(other, node)
            for other in gone.after:
                other.before.pop(gone, None)
                if other is not second:
                    _order(node, other)
            for buffer in gone.reads:
                self.readers[buffer].pop(gone, None)
            for buffer in gone.writes:
                self.writers[buffer].remove(gone)
        for buffer in node.reads:
            self.readers[buffer][node] = None
        for buffer in node.writes:
            self.writers[buffer].append(node)
        self.nodes[node.number] = node
        return node

    def _make_room(self, first: _Node, node: _Node) -> None:
        """Renumbers what comes between ``first`` and ``node``, which replaces it: what needs ``first`` goes behind."""
        between = [n for n in self.nodes[first.number + 1 : node.number] if n is not None]
        behind = set()
        for other in between:
            if first in other.before or any(n in behind for n in other.before):
                behind.add(other)
        moved = [n for n in between if n not in behind] + [node] + [n for n in between if n in behind]
        places = range(node.number - len(moved) + 1, node.number + 1)
        for number in range(first.number, node.number + 1):
            self.nodes[number] = None
        for number, other in zip(places, moved, strict=True):
            other.number = number
            self.nodes[number] = other

    def ordered(self) -> Iterator[Region | Instruction]:
        """The items, each after what it needs."""
        return (node.item for node in self.nodes if node is not None)

    def take_apart(self) -> None:
        """Nodes refer to each other; without that they go when the merger does, not when Python looks for cycles."""
        for node in self.nodes:
            if node is not None:
                node.before.clear()
                node.after.clear()

    # ---- Producers

    def join_producers(self) -> None:
        for waits in (True, False):
            for node in list(self.nodes):
                # Renumbering takes nodes along, merging leaves those behind that are gone.
                if node is not None and self.nodes[node.number] is node:
                    self._join_producers_of(node, waits)
            if not self.awaited:
                return

    def _join_producers_of(self, node: _Node, waits: bool) -> None:
        refused: set[_Node] = set()
        while isinstance(node.item, Region):
            producers = {w for buffer in node.reads for w in self.writers[buffer]} - refused
            if not producers:
                return
            producer = max(producers, key=lambda n: n.number)
            awaited = waits and self._is_awaited(producer, node)
            self.awaited |= awaited
            region = None if awaited else self._joined(producer, node)
            if region is None:
                refused.add(producer)
            else:
                node = self._replace(producer, node, region)

    def _joined(self, producer: _Node, consumer: _Node) -> Region | None:
        """Both as one region, or None."""
        first, second = producer.item, consumer.item
        if not isinstance(first, Region) or not isinstance(second, Region):
            return None
        if any(self._in_parts(buffer, consumer) for buffer in producer.writes):
            return None
        array = copied(second)
        if array is not None and self._is_needed(array, consumer):
            return None  # once the others have read it, the update may be made in its place
        placements = [*_placements(first, second), *self._as_scalar(first, second)]
        if not placements or _reaches(producer, consumer):
            return None
        for here, there in placements:
            placed = place(first, here, self.pool)
            changed = substitute(place(second, there, self.pool), placed.stores, self.pool)
            if changed is None:
                continue
            kept = tuple(s for s in placed.stores if self._is_needed(s.target, consumer))
            region = Region(placed.dims, (*kept, *changed.stores))
            if self._fits(region):
                return region
        return None

    def _is_awaited(self, producer: _Node, consumer: _Node) -> bool:
        """Whether another reader has rows of what ``producer`` has one of, and may take it, and all that the rows are
        made of. It could not any more if it then had to wait for ``consumer``."""
        small, other = producer.item, consumer.item
        if not isinstance(small, Region) or not isinstance(other, Region) or prod(other.dims) > prod(small.dims):
            return False
        readers = {r for buffer in producer.writes for r in self.readers[buffer] if consumer not in r.before}
        rows = [r.item for r in readers - {consumer} if isinstance(r.item, Region)]
        return any(prod(region.dims) >= _LEAST_ROW * prod(small.dims) for region in rows)

    def _as_scalar(self, small: Region, large: Region) -> Iterator[tuple[Placement, Placement]]:
        """The way to compute the one point of ``small`` in each program of ``large``."""
        operations = sum(isinstance(e, Apply) for e in small.expressions())
        cheap = (
            prod(small.dims) == 1 < prod(large.dims) and not small.reductions and operations <= _MAX_SCALAR_OPERATIONS
        )
        if self.expensive_launches and cheap:
            yield (
                Placement(large.dims, ((),) * small.rank),
                Placement(large.dims, tuple((d,) for d in range(large.rank))),
            )

    def _in_parts(self, buffer: Instruction, consumer: _Node) -> bool:
        """Whether another node fills ``buffer`` too, and it is more than an update beside what ``consumer`` reads."""
        return len(self.writers[buffer]) != 1 and (not is_update(buffer) or buffer in consumer.reads)

    def _is_needed(self, buffer: Instruction, consumer: _Node) -> bool:
        """Whether anything but ``consumer`` wants ``buffer``."""
        return buffer in self.outputs or any(reader is not consumer for reader in self.readers[buffer])

    def _fits(self, region: Region) -> bool:
        expressions = region.expressions()
        operations = sum(isinstance(e, Apply) for e in expressions)
        buffers = len(sources(region)) + len(targets(region))
        return operations <= MAX_OPERATIONS and buffers <= MAX_BUFFERS and self.accepts(region)

    # ---- Siblings

    def join_siblings(self) -> None:
        for buffer in list(self.readers):
            self._join_readers(buffer)

    def _join_readers(self, buffer: Instruction) -> None:
        left = [n for n in self.readers[buffer] if isinstance(n.item, Region) and copied(n.item) is None]
        while left:
            left.sort(key=lambda node: node.number)
            first = left.pop(0)
            for second in left[:_MAX_SIBLINGS]:
                region = self._paired(first, second)
                if region is not None:
                    left[left.index(second)] = self._replace(first, second, region)
                    break

    def _paired(self, first: _Node, second: _Node) -> Region | None:
        a, b = first.item, second.item
        assert isinstance(a, Region)
        assert isinstance(b, Region)
        moved = min(first.moved, second.moved)
        wanted = 0 if moved <= _SMALL_BYTES else -(-moved // _SHARED_PART)
        if sum(_size(buffer) for buffer in first.reads if buffer in second.reads) < wanted:
            return None
        found = self._side_by_side(a, b)
        if found is None or first in second.before or _reaches(first, second):
            return None
        here, there = found
        a, b = place(a, here, self.pool), place(b, there, self.pool)
        if shared_bytes(a, b) < wanted:
            return None
        region = Region(a.dims, (*a.stores, *b.stores))
        return region if self._fits(region) else None

    def _side_by_side(self, a: Region, b: Region) -> tuple[Placement, Placement] | None:
        found = common_dims(a.dims, b.dims, range(b.rank))
        if found is None:
            found = next(self._as_scalar(a, b), None)
        if found is None:
            found = next(((here, there) for there, here in self._as_scalar(b, a)), None)
        return found

    # ---- Parts of one buffer

    def join_parts(self) -> None:
        """What is put together of parts of one size is written at once; where starts are cheap, if the parts share
        what they are made of."""
        for buffer in [b for b, nodes in self.writers.items() if len(nodes) > 1 and is_put_together(b)]:
            left = sorted(self.writers[buffer], key=lambda node: node.number)
            while left:
                first = left.pop(0)
                for second in left[:_MAX_SIBLINGS]:
                    region = self._put_together(first, second)
                    if region is not None:
                        left[left.index(second)] = self._replace(first, second, region)
                        break

    def _put_together(self, first: _Node, second: _Node) -> Region | None:
        """Both parts as one region. That they fill one buffer orders them, but they do not meet there."""
        a, b = first.item, second.item
        assert isinstance(a, Region)
        assert isinstance(b, Region)
        found = common_dims(a.dims, b.dims, range(b.rank))
        if found is None or not set(first.writes).isdisjoint(second.reads) or _reaches(first, second):
            return None
        here, there = found
        a, b = place(a, here, self.pool), place(b, there, self.pool)
        if not self.expensive_launches and shared_bytes(a, b) * _SHARED_PART < min(first.moved, second.moved):
            return None
        region = Region(a.dims, (*a.stores, *b.stores))
        return region if self._fits(region) else None

    # ---- Values that are cheaper computed again

    def drop_cheap_buffers(self) -> None:
        for node in self.nodes:
            if node is not None and isinstance(node.item, Region):
                # What goes into others first: they are then made from what it was made from.
                for store in _by_depth(node.item):
                    self._drop(node, store)

    def _drop(self, node: _Node, store: Store) -> None:
        """Computes ``store`` in its readers instead, if every one of them can."""
        target, region = store.target, node.item
        readers = self.readers[target]
        if target in self.outputs or not readers or len(self.writers[target]) != 1 or not isinstance(region, Region):
            return
        alone = recomputed(region, store, self.pool)
        if alone is None or not self.updated.isdisjoint(sources(alone)):
            return
        changed: dict[_Node, Region] = {}
        for reader in readers:
            made = self._with_own(alone, reader.item) if isinstance(reader.item, Region) else None
            if made is None:
                return
            changed[reader] = made
        for reader, made in changed.items():
            self._rewire(reader, made)
        self._rewire(node, Region(region.dims, tuple(s for s in region.stores if s is not store)))

    def _with_own(self, alone: Region, reader: Region) -> Region | None:
        """``reader`` computing for itself what ``alone`` stores; None when it cannot."""
        for here, there in (*_placements(alone, reader), *self._as_scalar(alone, reader)):
            placed = place(alone, here, self.pool)
            region = substitute(place(reader, there, self.pool), placed.stores, self.pool)
            if region is not None and self._fits(region):
                return region
        return None

    def _rewire(self, node: _Node, region: Region) -> None:
        """Gives ``node`` another region, which may read more and stores no more than before."""
        reads, writes = sources(region), targets(region)
        for buffer in node.reads:
            self.readers[buffer].pop(node, None)
        for buffer in reads:
            self.readers[buffer][node] = None
            for writer in self.writers[buffer]:
                _order(writer, node)
        for buffer in node.writes:
            if buffer not in writes:
                self.writers[buffer].remove(node)
        node.item, node.reads, node.writes, node._moved = region, reads, writes, -1
        if not writes:
            self._remove(node)

    def _remove(self, node: _Node) -> None:
        """One that neither reads nor writes: nothing comes before or after another for its sake."""
        self.nodes[node.number] = None
        for other in node.before:
            other.after.pop(node, None)
        for other in node.after:
            other.before.pop(node, None)
        node.before.clear()
        node.after.clear()


def _by_depth(region: Region) -> list[Store]:
    """The stores, what others are computed from first."""
    places = {expression: number for number, expression in enumerate(region.expressions())}
    return sorted(region.stores, key=lambda store: places[store.value])


def _order(first: _Node, second: _Node) -> None:
    first.after[second] = None
    second.before[first] = None


def _reaches(first: _Node, last: _Node) -> bool:
    """Whether ``last`` needs ``first`` through a third node; also True when that takes long to find out.

    Looks where ``last`` is nearest first, and never behind it.
    """
    seen = {first}
    waiting = [(-node.number, node) for node in first.after if node.number < last.number]
    heapq.heapify(waiting)
    while waiting:
        _, node = heapq.heappop(waiting)
        if node in seen:
            continue
        seen.add(node)
        if last in node.after or len(seen) > _MAX_VISITS:
            return True
        for other in node.after:
            if other.number < last.number:
                heapq.heappush(waiting, (-other.number, other))
    return False


def _placements(producer: Region, consumer: Region) -> Iterator[tuple[Placement, Placement]]:
    """Ways to walk both at once: point by point, or one of them once for each row of the other's reductions."""
    found = common_dims(producer.dims, consumer.dims, range(consumer.rank))
    if found is not None:
        yield found
    for inner, outer, swap in ((producer, consumer, False), (consumer, producer, True)):
        for reduced in dict.fromkeys(reduction.dims for reduction in outer.reductions if not inner.reductions):
            found = common_dims(inner.dims, outer.dims, [d for d in range(outer.rank) if d not in reduced])
            if found is not None:
                yield (found[1], found[0]) if swap else found


def _size(buffer: Instruction) -> int:
    assert isinstance(buffer.shape, ArrayShape), buffer
    return buffer.shape.num_bytes


def _simplified(region: Region, pool: Pool) -> Region:
    """Loads of constants that are the same everywhere become literals, reductions over dimensions of size 1 what they
    reduce, equal expressions one."""
    moved: dict[Expression, Expression] = {}

    def replace(expression: Expression) -> Expression | None:
        if isinstance(expression, Load):
            return uniform_literal(expression.source)
        if not isinstance(expression, Reduce) or any(region.dims[d] != 1 for d in expression.dims):
            return None
        value, initial = (moved[operand] for operand in expression.operands)
        if starts_neutral(Reduce(expression.element_type, expression.combine, value, initial, ())):
            return value
        combined = Apply(expression.element_type, expression.combine, (initial, value))
        return pool.apply(combined, combined.operands)

    rewrite(region.expressions(), pool, unmoved, lambda dims: dims, replace, moved)
    return Region(region.dims, tuple(rewrite_store(s, unmoved, moved) for s in region.stores))
