"""Which values of a native program share memory, and which results stand where parameters do.

Used by emitter.py, which gives every place its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from flagos_backend.codegen.cpu.bytecode import ItemKind
from flagos_backend.codegen.cpu.encoding import is_movable
from flagos_backend.codegen.cpu.steps import (
    Item,
    Over,
    Step,
    array_of,
    movable,
    overwritten,
    sources,
    targets,
    writes_over,
)
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.region import Load, Region, Store, axis


class BufferAssignment:
    """Of one computation. ``buffers``: as in its schedule; ``items``: what it runs, to which copies of results join."""

    def __init__(self, flat: FlatComputation, buffers: Mapping[Instruction, Instruction], items: list[Item]) -> None:
        self.flat = flat
        self.items = items
        self.in_place: dict[Instruction, Instruction] = {}  # result -> parameter whose buffer it overwrites
        self.aliases: dict[Instruction, Instruction] = {}  # loop result -> the operand that the loop leaves unchanged
        self.shared: dict[Instruction, Instruction] = {}  # temporary -> what a step makes of it where it stands
        self._buffers = buffers
        # Once the items are known: the buffers of the results, and which of these are no new arrays; what each place is
        # first written as, and when; when each buffer is last read.
        self._outputs: list[Instruction] = []
        self._returned: Counter[Instruction] = Counter()
        self._copied: set[int] = set()
        self._first: dict[Instruction, tuple[int, Instruction]] = {}
        self._last: dict[Instruction, int] = {}

    def buffer_of(self, value: Instruction) -> Instruction:
        """Where ``value`` stands in memory."""
        buffer = self._buffers.get(value, value)
        while buffer in self.aliases:
            buffer = self.aliases[buffer]
        return buffer

    def allocation_of(self, buffer: Instruction) -> Instruction:
        """The value whose place ``buffer`` has."""
        while buffer in self.shared:
            buffer = self.shared[buffer]
        return buffer

    def is_changed_in_place(self, target: Instruction, source: Instruction) -> bool:
        """Whether a step that may write ``target`` over ``source`` does."""
        place = self.allocation_of(target)
        return self.allocation_of(source) is place or self.in_place.get(place) is source

    def share(self) -> None:
        """Finds temporaries that a step changes instead of a copy of them, because nobody reads them from then on."""
        self._outputs = [self.buffer_of(output) for output in self.flat.outputs]
        self._returned = Counter(self._outputs)
        writer = {target: item for item in self.items for target in targets(item)}
        self._last = {self.buffer_of(s): number for number, item in enumerate(self.items) for s in sources(item)}
        made: set[Instruction] = set()
        for number, item in enumerate(self.items):
            for target, array in overwritten(item):
                if array in self._returned or array in self.shared or target in made or self._last[array] != number:
                    continue
                made_by = writer.get(array)
                if made_by is not None and not (isinstance(made_by, Step) and made_by.kind == ItemKind.CALL):
                    self.shared[array] = target
                    made.add(target)
        for number, item in enumerate(self.items):
            for target in targets(item):
                self._first.setdefault(self.allocation_of(target), (number, target))
        self._copied = {
            number
            for number, output in enumerate(self._outputs)
            if output not in self._first or self._outputs.index(output) < number
        }

    def assign(self, aliases: Mapping[int, int], *, copied_back: bool) -> list[Instruction]:
        """One buffer for each output; outputs that are parameters, constants or repeated are copied.

        ``aliases``: results that may be written over parameters, by their numbers; a parameter that is its own result
        stays where it is. ``copied_back``: where such a result is neither, it is copied over the parameter in the end.
        """
        over = {result: self.flat.parameters[number] for result, number in aliases.items()}
        outputs = self._outputs
        self.in_place = {outputs[n]: p for n, p in over.items() if self._may_replace(outputs[n], p)}
        results = list(outputs)
        taken: set[Instruction] = set()
        moved: dict[int, Instruction] = {}
        for number, output in enumerate(outputs):
            parameter = over.get(number)
            if output is parameter:
                continue
            if copied_back and parameter is not None and output not in self.in_place:
                moved[number] = output
            elif output in taken or output not in self._first:
                results[number] = self._copy(output)
            taken.add(output)
        while moved:
            number = min(moved)
            output, parameter = moved.pop(number), over[number]
            if parameter in moved.values():
                saved = self._copy(parameter)
                moved = {n: saved if o is parameter else o for n, o in moved.items()}
            results[number] = self._copy(output)
            self.in_place[results[number]] = parameter
        return results

    def copies_saved(self, result: int, parameter: int) -> int:
        """How many copies fewer a result costs where a parameter stands than in memory of its own."""
        output, source = self._outputs[result], self.flat.parameters[parameter]
        if output is source:
            return 1
        if self._may_replace(output, source):
            changes = (pair for item in self.items for pair in overwritten(item))
            return int(any(array is source and self.allocation_of(target) is output for target, array in changes))
        return 0 if result in self._copied else -1

    def check_copies(self) -> None:
        """Raises NotNativeError for results that are copies of what cannot be copied."""
        for number in self._copied:
            movable(array_of(self._outputs[number]))

    def _may_replace(self, output: Instruction, parameter: Instruction) -> bool:
        """Whether an output may be written over a parameter, because nobody reads that from then on."""
        if output not in self._first or self._returned[output] > 1 or parameter in self._returned:
            return False
        if array_of(output).num_bytes != array_of(parameter).num_bytes:
            return False
        number, target = self._first[output]
        last = self._last.get(parameter, -1)
        return last < number or (last == number and writes_over(self.items[last], target, parameter))

    def _copy(self, buffer: Instruction) -> Instruction:
        shape = array_of(buffer)
        copy = Instruction(Opcode.COPY, shape, (buffer,), name=f"{buffer.name}.copy")
        value = Load(movable(shape).element_type, buffer, axis(0, 1))
        self.items.append(Region((shape.num_elements,), stores=(Store(copy, value, axis(0, 1)),)))
        return copy


def changed_by_branches(
    branches: Sequence[BufferAssignment], operands: Sequence[Sequence[Instruction]], targets: Sequence[Instruction]
) -> Over:
    """The ``over`` of a conditional: where no more copies are saved in some branches than are made in others, the best
    first. ``operands``: the buffers that each branch takes."""
    numbers = [{array: number for number, array in enumerate(taken)} for taken in operands]
    repeated = {array for taken in operands for array, times in Counter(taken).items() if times > 1}
    arrays = [array for array in dict.fromkeys(chain(*operands)) if array not in repeated]
    saved: dict[tuple[Instruction, Instruction], int] = {}
    for result, target in enumerate(targets):
        shape = array_of(target)
        for array in arrays:
            if array_of(array).num_bytes != shape.num_bytes:
                continue
            copies = [
                branch.copies_saved(result, number[array])
                for branch, number in zip(branches, numbers, strict=True)
                if array in number
            ]
            can_copy = is_movable(shape.element_type)
            if max(copies) > 0 and sum(copies) >= 0 and (can_copy or min(copies) >= 0):
                saved[target, array] = sum(copies)
    return tuple(sorted(saved, key=lambda pair: -saved[pair]))
