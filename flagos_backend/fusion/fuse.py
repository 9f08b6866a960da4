"""Splits a computation into regions and library calls.

One walk from the results backwards decides for every instruction whether it becomes a buffer or is computed inside the
regions that want it; a second walk forwards builds the regions. Both take time linear in the program.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from flagos_backend.fusion.choices import MAX_LIGHT, Choices, common_source, light_operations
from flagos_backend.fusion.expressions import Expressions, typed
from flagos_backend.fusion.interleaved import Part as Interleaved
from flagos_backend.fusion.interleaved import interleaved, joined
from flagos_backend.fusion.pads import borders_of, is_growing_pad, part_of_pad
from flagos_backend.fusion.policy import HOST, Policy
from flagos_backend.fusion.recompute import CHEAP, bytes_of, cost_of_remaking
from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.seams import Reader, can_be_cut, cut_readers
from flagos_backend.fusion.updates import copied, is_update, read_first
from flagos_backend.ir.attributes import DimensionAttributes, IndexNumber
from flagos_backend.ir.effects import Effects
from flagos_backend.ir.elementwise import (
    is_arithmetic,
    is_complex_elementwise,
    is_elementwise,
    is_regular,
    reduction_opcode,
    widens,
)
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.indexing import (
    Indices,
    View,
    dims_of,
    gathered,
    movement_of,
    reduction_order,
    reshape_indices,
    shifted,
    view_of_source,
)
from flagos_backend.loop_ir.region import Affine, Expression, Load, Reduce, Region, Store, axis, linear

# Of operations that are repeated; each takes no longer than a square root.
_MAX_REPEATED = 6
_REPEATED = frozenset(
    {
        *(Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY, Opcode.DIVIDE, Opcode.NEGATE, Opcode.MAXIMUM, Opcode.MINIMUM),
        *(Opcode.CONVERT, Opcode.SQRT, Opcode.RSQRT),
    }
)
# Concatenates of more operands are copied by a kernel that only moves them.
_MAX_CHOICES = 8
# In how many places a choice is made instead of read, and of how many times its elements each region has points.
_MAX_CHOOSING = 16
_MAX_SPREAD = 4
# A region of no more points, and operations, than these is done sooner than another kernel is started.
_SMALL_POINTS = 1 << 16
_MAX_SMALL_OPERATIONS = 80


@dataclass(frozen=True, slots=True)
class _Key:
    """One region in the making: the instruction it stores, and which part of it.

    Concatenate has several, and a sum of two that alternate has those. Dynamic-update-slice has two: all of the result,
    then what lies in it. Pad has its borders, then what lies between them.
    """

    target: Instruction
    part: int = 0


def fuse(computation: FlatComputation, policy: Policy = HOST) -> Schedule:
    """Regions and library calls of ``computation``."""
    fuser = _Fuser(computation, policy)
    fuser.decide()
    return fuser.build()


class _Fuser:
    def __init__(self, computation: FlatComputation, policy: Policy) -> None:
        self.computation = computation
        self.policy = policy
        self.effects = Effects()
        # Made once: each part of a concatenation asks for them. No method of this object, which would be a cycle.
        self._operands = functools.cache(computation.operands)
        self._starts: dict[Instruction, tuple[int, ...]] = {}
        self.loops: dict[_Key, tuple[int, ...]] = {}  # region -> its dimensions
        self.keys: dict[Instruction, list[_Key]] = {}  # buffer made by regions -> those, in order
        self.demands: defaultdict[Instruction, dict[tuple[_Key, Indices], None]] = defaultdict(dict)
        self.wanted: set[Instruction] = set()  # must be a buffer
        self.sizes: defaultdict[_Key, int] = defaultdict(int)
        self.buffers: dict[Instruction, Instruction] = {}
        self.library: set[Instruction] = set()
        self.views: dict[tuple[Instruction, int], View] = {}
        self.parameters = frozenset(computation.parameters)
        self.starts: set[Instruction] = set()  # and what those are computed from
        self.chosen: set[Instruction] = set()  # concatenates and pads that are no parts of a buffer
        self.light: set[Instruction] = set()  # computed wherever they may be chosen
        self.choices: dict[_Key, Choices] = {}
        self.cut: dict[_Key, Reader] = {}  # regions that are cut into boxes
        self.updated = {self._same(self._operands(i)[0]) for i in computation.instructions if self._is_updated(i)}

    # ---- backwards: what becomes a buffer ----

    def decide(self) -> None:
        self.wanted.update(self.computation.outputs)
        for instruction in reversed(self.computation.instructions):
            leaves = self.computation.leaves_of[instruction]
            used = any(leaf in self.wanted or leaf in self.demands for leaf in leaves)
            if used or self.effects.of(instruction):
                self._decide(instruction)

    def _decide(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode is Opcode.CONSTANT:
            return
        if not isinstance(instruction.shape, ArrayShape):
            self._make_library_call(instruction)
        elif opcode in (Opcode.RESHAPE, Opcode.COPY, Opcode.OPTIMIZATION_BARRIER) and instruction in self.wanted:
            self.wanted.add(self._operands(instruction)[0])
        elif opcode in (Opcode.RESHAPE, Opcode.IOTA) or movement_of(instruction) is not None:
            if not is_regular(instruction) or (opcode is Opcode.IOTA and not is_arithmetic(instruction)):
                self._make_library_call(instruction)
            elif instruction in self.wanted:
                self._make_buffer(instruction)
            else:
                self._fuse_everywhere(instruction)
        elif opcode is Opcode.REDUCE and reduction_opcode(instruction, self.policy.half_sums) is not None:
            self._make_reduction(instruction)
        elif opcode in (Opcode.CONCATENATE, Opcode.PAD) and (self._is_choice(instruction) or self._is_cut(instruction)):
            self.chosen.add(instruction)
            if instruction in self.wanted:
                self._make_buffer(instruction)
            else:
                self._fuse_everywhere(instruction)
        elif opcode is Opcode.CONCATENATE and is_regular(instruction):
            for part, operand in enumerate(self._operands(instruction)):
                self._open(_Key(instruction, part), dims_of(operand), (operand,))
        elif (parts := self._alternating(instruction)) is not None:
            for number, alternating in enumerate(parts):
                self._open(_Key(instruction, number), dims_of(alternating.operand), (alternating.operand,))
        elif opcode is Opcode.PAD and is_growing_pad(instruction):
            array, value = self._operands(instruction)
            borders = borders_of(instruction)
            for part, border in enumerate(borders):
                self._open(_Key(instruction, part), border.dims, ())
                self._want(value, _Key(instruction, part), ())
            self._open(_Key(instruction, len(borders)), dims_of(array), (array,))
        elif self._is_window(instruction):
            self._decide_window(instruction)
        elif self._is_gather(instruction):
            self._decide_gather(instruction)
        elif self._is_elementwise(instruction):
            self._decide_elementwise(instruction)
        else:
            self._make_library_call(instruction)

    def _alternating(self, instruction: Instruction) -> tuple[Interleaved, ...] | None:
        """The parts that ``instruction`` is put together of, element by element, where no region chooses them."""
        return None if self.policy.chooses else interleaved(instruction, self._operands)

    def _decide_elementwise(self, instruction: Instruction) -> None:
        uses = self.demands[instruction]
        elements = prod(dims_of(instruction))
        once = len(uses) == 1 or (instruction.opcode is Opcode.CONVERT and len(uses) <= 4)
        once = once or (self.policy.parts and sum(prod(self.loops[k]) for k, _ in uses) <= elements)
        fits = all(prod(self.loops[k]) <= elements for k, _ in uses)
        if instruction in self.starts and instruction.opcode in CHEAP:
            # A few operations of each program, or for each row, where a kernel of its own would take microseconds.
            once, fits = once or elements == 1, True
        fits = fits or instruction in self.light
        short = all(self.sizes[k] < self.policy.max_operations for k, _ in uses)
        again = self._is_repeated, self._is_chosen_again, self._is_remade
        if instruction not in self.wanted and any(is_again(instruction) for is_again in again):
            self._fuse_everywhere(instruction)
        elif instruction in self.wanted or not once or not fits or not short:
            self._make_buffer(instruction)
        else:
            self._fuse_everywhere(instruction)

    def _is_choice(self, instruction: Instruction) -> bool:
        """Whether regions choose between the operands, rather than write each of them where it belongs."""
        if not self.policy.chooses or not is_regular(instruction) or 0 in dims_of(instruction):
            return False
        is_pad = instruction.opcode is Opcode.PAD
        operands = self._operands(instruction)[:1] if is_pad else self._operands(instruction)
        operands = tuple(operand for operand in operands if 0 not in dims_of(operand))
        if len(operands) > _MAX_CHOICES:
            return False
        moves = not is_pad and common_source(instruction, self._operands) is not None
        if not moves and not is_arithmetic(instruction):
            return False
        light = [[] if moves else self._light_operations(operand) for operand in operands]
        elements = prod(dims_of(instruction))
        if instruction in self.wanted:
            # One kernel writes parts of one size, and reads once what they have in common; what is computed for one
            # part alone is in the kernel that writes it, unless that takes longer to start.
            alike = len({dims_of(operand) for operand in operands}) == 1
            one = all(o is not None if elements <= _SMALL_POINTS else o == [] for o in light) and (is_pad or not alike)
            return one or (is_pad and not is_growing_pad(instruction))
        uses = self.demands[instruction]
        most = max(_SMALL_POINTS, _MAX_SPREAD * elements)
        near = moves or all(prod(self.loops[key]) <= most for key, _ in uses)
        short = all(self.sizes[key] + _MAX_CHOICES < self.policy.max_operations for key, _ in uses)
        return near and short and len(uses) <= _MAX_CHOOSING and (is_pad or any(o is not None for o in light))

    def _is_cut(self, instruction: Instruction) -> bool:
        """Whether the regions that read it are cut where its operands meet, rather than it is written before."""
        uses, is_pad = self.demands[instruction], instruction.opcode is Opcode.PAD
        if not self.policy.splits or instruction in self.wanted or not can_be_cut(instruction):
            return False
        operands = self._operands(instruction)[: 1 if is_pad else None]
        is_moved = not is_pad and common_source(instruction, self._operands) is not None
        if not is_moved and not all(map(self._is_read, operands)):
            return False  # what is computed for a part is written where it belongs, beside parts of the same data
        return cut_readers(instruction, [(self._reader(key), indices, self.sizes[key]) for key, indices in uses])

    def _reader(self, key: _Key) -> Reader:
        reduced = reduction_order(key.target)[1] if key.target.opcode is Opcode.REDUCE else ()
        return self.cut.setdefault(key, Reader(self.loops[key], reduced, {}))

    def _is_read(self, value: Instruction) -> bool:
        """Whether ``value`` only moves elements of what is in memory anyway, and stays there."""
        while value.opcode is Opcode.RESHAPE or movement_of(value) is not None:
            value = self._operands(value)[0]
        is_kept = self._is_memory(value) or value in self.demands
        return value.opcode is Opcode.IOTA or (is_kept and self._same(value) not in self.updated)

    def _light_operations(self, value: Instruction) -> list[Instruction] | None:
        """Few cheap ones that ``value`` takes, which are then no buffers for being chosen; None where it takes more."""
        found = light_operations(value, self._operands, lambda v: self._is_memory(v) or v in self.demands)
        self.light.update(found or ())
        return found

    def _is_memory(self, value: Instruction) -> bool:
        """Whether ``value`` is a buffer that no region computes, or wanted as one."""
        if value.opcode is Opcode.CONSTANT or value in self.parameters or value in self.wanted:
            return True
        computed = self._is_elementwise(value) or self._is_window(value) or self._is_gather(value)
        reduced = value.opcode is Opcode.REDUCE and reduction_opcode(value, self.policy.half_sums) is not None
        return not (computed or reduced or value.opcode in (Opcode.IOTA, Opcode.CONCATENATE, Opcode.PAD))

    def _is_elementwise(self, instruction: Instruction) -> bool:
        return is_elementwise(instruction) or (self.policy.complex_numbers and is_complex_elementwise(instruction))

    def _is_window(self, instruction: Instruction) -> bool:
        """Whether it is a part of an array, or an update of one, that starts where a region can find out."""
        if instruction.opcode not in (Opcode.DYNAMIC_SLICE, Opcode.DYNAMIC_UPDATE_SLICE):
            return False
        array, *others = self._operands(instruction)
        starts = others[1:] if is_update(instruction) else others
        if is_update(instruction) and dims_of(others[0]) == dims_of(array):
            return False  # simplified away before, as a rule
        return self.policy.runtime_starts and is_regular(instruction) and all(map(is_arithmetic, starts))

    def _is_updated(self, instruction: Instruction) -> bool:
        """Whether it changes its first operand where that stands, if nobody reads that later."""
        if self._is_window(instruction):
            return is_update(instruction)
        return not self.policy.runtime_starts and instruction.opcode in (Opcode.DYNAMIC_UPDATE_SLICE, Opcode.SCATTER)

    def _decide_window(self, instruction: Instruction) -> None:
        if is_update(instruction):
            array, update, *starts = self._operands(instruction)
            self._open(_Key(instruction, 0), dims_of(array), (array,))
            self._open(_Key(instruction, 1), dims_of(update), (update,))
            self._want_starts(starts, _Key(instruction, 1))
        elif instruction in self.wanted or self._same(self._operands(instruction)[0]) in self.updated:
            # Read where it stands, not where it is used: the update can then write over the array.
            self._make_buffer(instruction)
        else:
            self._fuse_everywhere(instruction)

    def _is_gather(self, instruction: Instruction) -> bool:
        """Whether a region can find out where each element of it stands."""
        if instruction.opcode is not Opcode.GATHER or not is_regular(instruction):
            return False
        array, *indices = self._operands(instruction)
        if 0 in (*dims_of(array), *dims_of(instruction)) or not all(map(is_arithmetic, indices)):
            return False
        return self.policy.reads_gather(instruction)

    def _decide_gather(self, instruction: Instruction) -> None:
        uses, elements = self.demands[instruction], prod(dims_of(instruction))
        once = len(uses) == 1 and all(prod(self.loops[key]) <= elements for key, _ in uses)
        if instruction in self.wanted or not once or self._same(self._operands(instruction)[0]) in self.updated:
            self._make_buffer(instruction)
        else:
            self._fuse_everywhere(instruction)

    def _want_starts(self, starts: Iterable[Instruction], key: _Key) -> None:
        for start in starts:
            self.starts.add(start)
            self._want(start, key, ())

    def _is_repeated(self, instruction: Instruction) -> bool:
        """Whether ``instruction`` is computed again in each region that reads it; all of them spread it over more."""
        elements, regions = prod(dims_of(instruction)), {key for key, _ in self.demands[instruction]}
        most = _MAX_REPEATED
        if elements > self.policy.repeated_elements:
            # Many elements are still read in less time narrow, and widened again, than wide.
            most = 1 if self.policy.repeated_elements and widens(instruction) else 0
        if len(regions) > _MAX_REPEATED:
            return False
        for key in regions:
            if prod(self.loops[key]) <= elements or self.sizes[key] + _MAX_REPEATED > self.policy.max_operations:
                return False
        count, waiting = 0, [instruction]
        while waiting:
            value = waiting.pop()
            if value.opcode is Opcode.CONSTANT or value in self.parameters:
                continue
            moves = value.opcode is Opcode.RESHAPE or movement_of(value) is not None
            count += not moves
            if value in self.wanted or count > most or not (moves or value.opcode in _REPEATED):
                return False
            waiting.extend(self._operands(value))
        return True

    def _is_chosen_again(self, instruction: Instruction) -> bool:
        """Whether the one small region that reads ``instruction``, at several places, computes it at each of them: as
        a step of an associative scan does with what the step before made."""
        uses = self.demands[instruction]
        keys = {key for key, _ in uses}
        if (
            not self.policy.chooses
            or len(keys) != 1
            or len(uses) == 1
            or not keys <= self.choices.keys()
            or instruction.opcode not in CHEAP
        ):
            return False
        (key,) = keys
        # With a choice comes what it chooses from.
        chooses = any(o.opcode in (Opcode.CONCATENATE, Opcode.PAD) for o in self._operands(instruction))
        operations = self.sizes[key] + len(uses) * (MAX_LIGHT if chooses else 1)
        return prod(self.loops[key]) <= _SMALL_POINTS and operations <= _MAX_SMALL_OPERATIONS

    def _is_remade(self, instruction: Instruction) -> bool:
        """Whether the regions that read ``instruction``, which spread it no further, each make it of smaller arrays."""
        total, elements = bytes_of(instruction), prod(dims_of(instruction))
        uses = Counter(key for key, _ in self.demands[instruction])
        if not 0 < self.policy.remade_bytes <= total or any(prod(self.loops[key]) > elements for key in uses):
            return False
        cost = cost_of_remaking(instruction, self._operands, lambda v: v in self.wanted or v in self.parameters)
        if cost is None or cost.loaded_bytes * len(uses) > total:
            return False
        return all(self.sizes[key] + cost.operations * n < self.policy.max_operations for key, n in uses.items())

    def _make_library_call(self, instruction: Instruction) -> None:
        self.library.add(instruction)
        operands = self._operands(instruction)
        views = [self._view(instruction, number, operand) for number, operand in enumerate(operands)]
        read = Counter[Instruction]()
        for operand, view in zip(operands, views, strict=True):
            if view is not None:
                read[view.buffer] += prod(dims_of(operand))
        for number, (operand, view) in enumerate(zip(operands, views, strict=True)):
            if view is not None and (read[view.buffer] >= prod(dims_of(view.buffer)) or self._stands(view.buffer)):
                self.views[instruction, number] = view
                self.wanted.add(view.buffer)
            else:
                self.wanted.add(operand)

    def _view(self, call: Instruction, number: int, operand: Instruction) -> View | None:
        view = view_of_source(operand, self._operands)
        if view is None or view.buffer.opcode is Opcode.IOTA or view.buffer is self._same(operand):
            return None
        return view if self.policy.reads_view(call, number, view) else None

    def _same(self, value: Instruction) -> Instruction:
        """What has the same elements in the same order, so that it is no other buffer."""
        while value.opcode is Opcode.RESHAPE:
            (value,) = self._operands(value)
        return value

    def _stands(self, value: Instruction) -> bool:
        """Whether ``value`` is a buffer, whoever reads it; else it may be computed just where it is read."""
        return value in self.wanted or value in self.parameters or not self._is_elementwise(value)

    def _starts_of_parts(self, concatenation: Instruction, dimension: int) -> tuple[int, ...]:
        found = self._starts.get(concatenation)
        if found is None:
            sizes = (dims_of(operand)[dimension] for operand in concatenation.operands)
            found = self._starts[concatenation] = tuple(itertools.accumulate(sizes, initial=0))
        return found

    def _make_buffer(self, instruction: Instruction) -> None:
        key = _Key(instruction)
        dims = dims_of(instruction)
        self.loops[key] = dims
        self.keys.setdefault(instruction, []).append(key)
        self._spread(instruction, key, tuple(axis(d, len(dims)) for d in range(len(dims))))

    def _make_reduction(self, instruction: Instruction) -> None:
        array, initial = self._operands(instruction)
        self.wanted.add(initial)
        order, _ = reduction_order(instruction)
        dims = dims_of(array)
        key = _Key(instruction)
        self.loops[key] = tuple(dims[d] for d in order)
        self.keys.setdefault(instruction, []).append(key)
        self._want(array, key, tuple(axis(order.index(d), len(dims)) for d in range(len(dims))))

    def _open(self, key: _Key, dims: tuple[int, ...], operands: tuple[Instruction, ...]) -> None:
        self.loops[key] = dims
        self.keys.setdefault(key.target, []).append(key)
        for operand in operands:
            self._want(operand, key, tuple(axis(d, len(dims)) for d in range(len(dims))))

    def _fuse_everywhere(self, instruction: Instruction) -> None:
        for key, indices in self.demands[instruction]:
            self._spread(instruction, key, indices)

    def _spread(self, instruction: Instruction, key: _Key, indices: Indices) -> None:
        """Passes the wish for ``instruction`` at ``indices`` on to its operands."""
        if instruction.opcode is Opcode.DYNAMIC_SLICE:
            array, *starts = self._operands(instruction)
            self._want(array, key, shifted(indices, dims_of(array), dims_of(instruction), _unresolved(starts)))
            self._want_starts(starts, key)
            return
        if instruction.opcode is Opcode.GATHER:
            self._spread_gather(instruction, key, indices)
            return
        if instruction in self.chosen:
            self._spread_choice(instruction, key, indices)
            return
        if instruction.opcode is not Opcode.RESHAPE and movement_of(instruction) is None:
            self.sizes[key] += 1
        if instruction in self.starts:
            self.starts.update(self._operands(instruction))
        for operand in self._operands(instruction):
            operand_indices = self._operand_indices(instruction, operand, indices, len(self.loops[key]))
            if operand_indices is None:
                self.wanted.add(operand)
            else:
                self._want(operand, key, operand_indices)

    def _spread_choice(self, instruction: Instruction, key: _Key, indices: Indices) -> None:
        if instruction in self.starts:
            self.starts.update(self._operands(instruction))
        for part in self._choices_of(key).of(instruction, indices):
            self.sizes[key] += 1
            self._want(part.operand, key, part.indices)

    def _choices_of(self, key: _Key) -> Choices:
        return self.choices.setdefault(key, Choices(self.loops[key], self._operands))

    def _spread_gather(self, instruction: Instruction, key: _Key, indices: Indices) -> None:
        array, *_ = self._operands(instruction)
        rank = len(self.loops[key])

        def start(number: IndexNumber, place: Indices, _: int) -> Expression:
            """Tells indices apart, before it is known where they are computed."""
            positions = self._operands(instruction)[number.operand]
            found = reshape_indices(place, number.dims, dims_of(positions), rank)
            if found is None:
                self.wanted.add(positions)
                return Load(typed(positions), positions, linear(place, number.dims, rank))
            part, there = self.part_at(positions, found)
            self.starts.add(part)
            self._want(part, key, there)
            return Load(typed(part), part, linear(there, dims_of(part), rank))

        self._want(array, key, gathered(instruction, indices, rank, start))

    def part_at(self, value: Instruction, indices: Indices) -> tuple[Instruction, Indices]:
        """What ``value`` is put together of there, if that is the same at all points, as it is of start indices."""
        while value.opcode is Opcode.CONCATENATE and value not in self.wanted:
            dimension = value.attributes_as(DimensionAttributes).dimension
            at = indices[dimension]
            if not at.is_constant:
                break
            for operand in self._operands(value):
                size = dims_of(operand)[dimension]
                if at.offset < size:
                    break
                at = at.scaled(1, -size)
            value, indices = operand, (*indices[:dimension], at, *indices[dimension + 1 :])
        return value, indices

    def _want(self, operand: Instruction, key: _Key, indices: Indices) -> None:
        self.demands[operand][key, indices] = None

    @staticmethod
    def _operand_indices(instruction: Instruction, operand: Instruction, indices: Indices, rank: int) -> Indices | None:
        movement = movement_of(instruction)
        if movement is not None:
            return movement(instruction, indices)
        if instruction.opcode is Opcode.RESHAPE:
            return reshape_indices(indices, dims_of(instruction), dims_of(operand), rank)
        return indices if dims_of(operand) else ()  # select and clamp take scalars beside arrays

    # ---- forwards: regions ----

    def build(self) -> Schedule:
        items: list[Region | Instruction] = []
        self.buffers.update((parameter, parameter) for parameter in self.computation.parameters)
        for instruction in self.computation.instructions:
            if instruction in self.keys:
                regions = [self._build_region(key) for key in self.keys[instruction]]
                if is_update(instruction):
                    regions = self._read_before_overwritten(instruction, *regions)
                items.extend(regions)
                self.buffers[instruction] = instruction
            elif instruction in self.library:
                items.append(instruction)
                self.buffers.update((leaf, leaf) for leaf in self.computation.leaves_of[instruction])
            elif instruction.opcode is Opcode.CONSTANT:
                self.buffers[instruction] = instruction
            elif instruction in self.wanted and instruction.opcode in (
                Opcode.RESHAPE,
                Opcode.COPY,
                Opcode.OPTIMIZATION_BARRIER,
            ):
                self.buffers[instruction] = self.buffers[self._operands(instruction)[0]]
        schedule = Schedule(tuple(items), self.buffers, self.views)
        if not self.updated:
            return schedule
        reads, writes = (functools.partial(of, self.computation) for of in (schedule.reads, schedule.writes))
        return replace(schedule, items=read_first(items, reads, writes))

    def _build_region(self, key: _Key) -> Region:
        target, dims = key.target, self.loops[key]
        rank = len(dims)
        expressions = Expressions(self._choices_of(key), self._operands, self.buffers, self.part_at)
        here = tuple(axis(d, rank) for d in range(rank))
        if target.opcode is Opcode.REDUCE:
            return self._build_reduction(target, dims, expressions)
        if target in self.chosen:
            return Region(dims, (Store(target, expressions.compute(target, here), linear(here, dims, rank)),))
        if target.opcode is Opcode.CONCATENATE:
            dimension = target.attributes_as(DimensionAttributes).dimension
            before = self._starts_of_parts(target, dimension)[key.part]
            there = tuple(index.scaled(1, before) if d == dimension else index for d, index in enumerate(here))
            value = expressions.of(self._operands(target)[key.part], here)
            return Region(dims, (Store(target, value, linear(there, dims_of(target), rank)),))
        if (parts := self._alternating(target)) is not None:
            part = parts[key.part]
            value = joined(expressions.of(part.operand, here), target)
            return Region(dims, (Store(target, value, linear(part.places(here), dims_of(target), rank)),))
        if target.opcode is Opcode.PAD:
            return part_of_pad(target, key.part, expressions, here)
        if is_update(target):
            return self._build_update(key, expressions, here)
        return Region(dims, (Store(target, expressions.compute(target, here), linear(here, dims, rank)),))

    def _build_update(self, key: _Key, expressions: Expressions, here: Indices) -> Region:
        target, dims = key.target, self.loops[key]
        array, update, *starts = self._operands(target)
        if key.part == 0:
            return Region(dims, (Store(target, expressions.of(array, here), linear(here, dims, len(dims))),))
        there = shifted(here, dims_of(array), dims_of(update), expressions.starts(starts))
        return Region(dims, (Store(target, expressions.of(update, here), linear(there, dims_of(array), len(dims))),))

    def _read_before_overwritten(self, target: Instruction, begin: Region, change: Region) -> list[Region]:
        """The regions of a dynamic-update-slice. What is computed from the array that it changes comes first, or the
        array would have to be copied."""
        source = copied(begin)
        if source is None or not any(isinstance(e, Load) and e.source is source for e in change.expressions()):
            return [begin, change]
        update = self._operands(target)[1]
        here = tuple(axis(d, change.rank) for d in range(change.rank))
        place = linear(here, change.dims, change.rank)
        (store,) = change.stores
        self.buffers[update] = update
        first = Region(change.dims, (Store(update, store.value, place),))
        load = Load(typed(update), update, place)
        return [first, begin, Region(change.dims, (Store(target, load, store.index),))]

    def _build_reduction(self, target: Instruction, dims: tuple[int, ...], expressions: Expressions) -> Region:
        order, reduced = reduction_order(target)
        array, initial = self._operands(target)
        rank = len(dims)
        value = expressions.of(array, tuple(axis(order.index(d), rank) for d in range(rank)))
        kept = tuple(axis(position, rank) for position in range(rank) if position not in reduced)
        combine = reduction_opcode(target, self.policy.half_sums)
        if combine is None:
            raise AssertionError(f"{target.name} was taken for a reduction that a region can reduce")
        start = Load(typed(initial), self.buffers[initial], Affine(0, (0,) * rank))
        reduction = Reduce(typed(target), combine, value, start, reduced)
        return Region(dims, (Store(target, reduction, linear(kept, dims_of(target), rank)),))


def _unresolved(starts: Sequence[Instruction]) -> Callable[[int, int], int | Expression]:
    """Starts that tell indices apart, before it is known where they are computed."""
    return lambda d, limit: Load(typed(starts[d]), starts[d], Affine(0, ()))
