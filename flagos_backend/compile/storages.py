"""Which buffers of a schedule will share memory, as the plan writes steps over what dies there. Used by
memory_order.py, before there is a plan; what the plan then does is ownership.py's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flagos_backend.compile.plan_builder import RUN_OTHERS, WITHOUT_KERNEL
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.updates import copied
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.kernels.reference.registry import Storage, storage_of
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.region import Load, Region


class Storages:
    """``touched``: for each item, the storages that it reads or writes; ``sizes``: their bytes, 0 of what holds a
    parameter, a constant or a result. ``handed_on``: the bytes of results in storages of their own, which are over no
    parameter or constant. ``behind``: (item, other readers of what it may be written over), which must come
    before it."""

    def __init__(self, computation: FlatComputation, schedule: Schedule) -> None:
        self._schedule = schedule
        self._parent: dict[Instruction, Instruction] = {}
        self._reads = [schedule.reads(computation, item) for item in schedule.items]
        self._writes = [schedule.writes(computation, item) for item in schedule.items]
        self._writers: defaultdict[Instruction, list[int]] = defaultdict(list)
        self._readers: defaultdict[Instruction, list[int]] = defaultdict(list)
        self._over_lent: set[Instruction] = set()
        for number, (reads, writes) in enumerate(zip(self._reads, self._writes, strict=True)):
            for buffer in dict.fromkeys(reads):
                self._readers[buffer].append(number)
            for buffer in dict.fromkeys(writes):
                self._writers[buffer].append(number)
        outputs = {schedule.buffers.get(output, output) for output in computation.outputs}
        self.behind: list[tuple[int, list[int]]] = []
        for number in range(len(schedule.items)):
            self._share(number, outputs)
        self.touched = [
            tuple(dict.fromkeys(map(self._find, (*reads, *writes))))
            for reads, writes in zip(self._reads, self._writes, strict=True)
        ]
        self.sizes: dict[Instruction, int] = defaultdict(int)
        for buffer in (*self._readers, *self._writers):
            storage = self._find(buffer)
            self.sizes[storage] = max(self.sizes[storage], _bytes(buffer))
        lent = (buffer for buffer in self._readers if buffer not in self._writers)
        own = {self._find(output) for output in outputs if output in self._writers}
        over = set(map(self._find, self._over_lent))
        self.handed_on = sum(self.sizes[storage] for storage in own - over)
        self.sizes.update((self._find(buffer), 0) for buffer in (*lent, *outputs))

    def _find(self, buffer: Instruction) -> Instruction:
        root = buffer
        while (parent := self._parent.get(root, root)) is not root:
            root = parent
        while (parent := self._parent.get(buffer, root)) is not root:
            self._parent[buffer], buffer = root, parent
        return root

    def _unite(self, first: Instruction, second: Instruction) -> None:
        first, second = self._find(first), self._find(second)
        if first is not second:
            self._parent[second] = first

    def _put_over(self, buffer: Instruction, made: Instruction) -> None:
        """``made`` lies where ``buffer`` does. What is lent keeps a storage of its own: it is the caller's."""
        if buffer in self._writers:
            self._unite(buffer, made)
        else:
            self._over_lent.add(made)

    def _share(self, number: int, outputs: set[Instruction]) -> None:
        """Decides what the buffers that ``number`` makes lie in."""
        item = self._schedule.items[number]
        dying = [b for b in dict.fromkeys(self._reads[number]) if self._readers[b][-1] == number and b not in outputs]
        made = [buffer for buffer in self._writes[number] if self._writers[buffer][0] == number]
        if (array := copied(item)) is not None:
            self._share_update(number, array, outputs)
        elif isinstance(item, Region):
            for buffer, output in _over(item, dying, made):
                self._put_behind(number, buffer)
                self._put_over(buffer, output)
        else:
            sizes = {_bytes(buffer) for buffer in made}
            for buffer in dying:
                if _bytes(buffer) in sizes:
                    self._put_behind(number, buffer)
            self._share_call(item, number, dying)

    def _share_update(self, number: int, array: Instruction, outputs: set[Instruction]) -> None:
        """The region behind the one that begins an update makes it, over ``array`` if that is not read again."""
        (target,) = self._writes[number]
        last = self._readers[array][-1]
        update = next((n for n in self._writers[target] if n > number), number)
        if last in (number, update) and array not in outputs:
            self._put_over(array, target)

    def _share_call(self, call: Instruction, number: int, dying: list[Instruction]) -> None:
        if call.opcode is Opcode.WHILE:
            for operand, result in zip(self._reads[number], self._writes[number], strict=True):
                if operand in dying:
                    self._put_over(operand, result)
        elif call.opcode in WITHOUT_KERNEL or (call.opcode not in RUN_OTHERS and storage_of(call) is not Storage.FRESH):
            for operand in self._reads[number]:
                for result in self._writes[number]:
                    self._unite(operand, result)

    def _put_behind(self, number: int, buffer: Instruction) -> None:
        self.behind.append((number, [reader for reader in self._readers[buffer] if reader != number]))


def _over(
    region: Region, dying: list[Instruction], made: list[Instruction]
) -> Iterator[tuple[Instruction, Instruction]]:
    """(buffer, output that may lie where it does), each once: as RegionKernel.may_overwrite, without reductions."""
    if region.reductions:
        return
    loads: defaultdict[Instruction, list[Load]] = defaultdict(list)
    for expression in region.expressions():
        if isinstance(expression, Load):
            loads[expression.source].append(expression)
    taken: set[Instruction] = set()
    for output in made:
        stores = [store for store in region.stores if store.target is output]
        if len(stores) != 1:
            continue
        (store,) = stores
        if not all(store.index.coefficients[d] for d, size in enumerate(region.dims) if size > 1):
            continue
        for buffer in dying:
            fits = _bytes(buffer) == _bytes(output) and buffer not in taken and loads[buffer]
            if fits and all(
                load.index == store.index and load.element_type.bytes == store.value.element_type.bytes
                for load in loads[buffer]
            ):
                taken.add(buffer)
                yield buffer, output
                break


def _bytes(buffer: Instruction) -> int:
    return buffer.shape.num_bytes if isinstance(buffer.shape, ArrayShape) else 0
