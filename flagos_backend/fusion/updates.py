"""Updates of arrays in the schedule: which region only begins one, and that the old array is read before it. Used by
fuse.py and merge.py; what it says lets a plan write an update over its array instead of copying that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import prod

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.indexing import dims_of
from flagos_backend.loop_ir.region import Load, Region

Item = Region | Instruction
Buffers = Callable[[Item], tuple[Instruction, ...]]


def is_update(instruction: Instruction) -> bool:
    return instruction.opcode is Opcode.DYNAMIC_UPDATE_SLICE


def copied(item: Item) -> Instruction | None:
    """The buffer that ``item`` does nothing but copy into one that another region then updates; else None."""
    if not isinstance(item, Region) or len(item.stores) != 1 or not is_update(item.stores[0].target):
        return None
    (store,) = item.stores
    if not isinstance(store.value, Load) or store.value.index != store.index:
        return None
    sizes = {prod(item.dims), prod(dims_of(store.target)), prod(dims_of(store.value.source))}
    return store.value.source if len(sizes) == 1 else None


def sources(region: Region) -> tuple[Instruction, ...]:
    """The buffers that ``region`` loads."""
    return tuple(dict.fromkeys(e.source for e in region.expressions() if isinstance(e, Load)))


def targets(region: Region) -> tuple[Instruction, ...]:
    """The buffers that ``region`` stores."""
    return tuple(dict.fromkeys(store.target for store in region.stores))


def read_first(items: Sequence[Item], reads: Buffers, writes: Buffers) -> tuple[Item, ...]:
    """``items`` with regions that read an array, and need nothing of its update, moved before that.

    Programs come in an order in which values stand just before what uses them first.
    """
    ordered = list(items)
    readers: defaultdict[Instruction, list[Item]] = defaultdict(list)
    for item in ordered:
        for buffer in reads(item):
            readers[buffer].append(item)
    places = {id(item): place for place, item in enumerate(ordered)}
    for item in items:
        array = copied(item)
        if array is None:
            continue
        first, last = places[id(item)], max(places[id(reader)] for reader in readers[array])
        moved = _moved_up(ordered[first : last + 1], array, reads, writes)
        ordered[first : last + 1] = moved
        places.update((id(other), first + number) for number, other in enumerate(moved))
    return tuple(ordered)


def _moved_up(items: list[Item], array: Instruction, reads: Buffers, writes: Buffers) -> list[Item]:
    """``items``, the first of which begins the update of ``array``, with all that read it first, if that can be."""
    changed = set(writes(items[0]))
    behind = {id(items[0])}
    for item in items[1:]:
        if not changed.isdisjoint((*reads(item), *writes(item))):
            changed.update(writes(item))
            behind.add(id(item))
    needed: set[Instruction] = set()
    moved = set()
    for item in reversed(items[1:]):
        if array in reads(item) or not needed.isdisjoint(writes(item)):
            if id(item) in behind or not isinstance(item, Region):
                return items
            needed.update((*reads(item), *writes(item)))
            moved.add(id(item))
    return [i for i in items if id(i) in moved] + [i for i in items if id(i) not in moved]
