"""Which items of a schedule must come after which: what overlap.py and memory_order.py keep when they reorder one."""

from __future__ import annotations

from collections import defaultdict

from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.updates import copied
from flagos_backend.ir.effects import COLLECTIVES, Effects
from flagos_backend.ir.hlo import Instruction
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.region import Region


def needs_of(computation: FlatComputation, schedule: Schedule, effects: Effects) -> list[list[int]]:
    """For each item of ``schedule`` the numbers of those that it must come after, of the parts of one buffer the last:
    each comes after the one before. Effects keep their order, also around collectives; that of collectives among
    themselves is left to the caller."""
    writers: dict[Instruction, int] = {}
    readers: defaultdict[Instruction, list[int]] = defaultdict(list)
    rendezvous: list[int] = []
    effectful: list[int] = []
    needs = []
    for number, item in enumerate(schedule.items):
        reads, writes = (of(computation, item) for of in (schedule.reads, schedule.writes))
        found = [writers[buffer] for buffer in (*reads, *writes) if buffer in writers]
        array = copied(item)
        if array is not None:  # which the update may be written over
            found += readers[array]
        if not isinstance(item, Region) and item.opcode in COLLECTIVES:
            found += effectful[-1:]
            rendezvous.append(number)
        elif not isinstance(item, Region) and effects.of(item):
            found += [*effectful[-1:], *rendezvous[-1:]]
            effectful.append(number)
        needs.append(found)
        for buffer in reads:
            readers[buffer].append(number)
        writers.update(dict.fromkeys(writes, number))
    return needs
