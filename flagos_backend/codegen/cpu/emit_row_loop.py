"""Writes a region that reduces its last dimensions as a loop over rows, in phases: what a phase reduces, the next ones
use.

Every operation runs once: what several phases need of a row is kept, in the cache. Between emitter.py, which plans the
program, and native/cpu/parse_loop.cc, which reads the bytecode.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from flagos_backend.codegen.cpu.bytecode import ItemKind
from flagos_backend.codegen.cpu.emit_takes import Arrays, is_step, is_taken
from flagos_backend.codegen.cpu.encoding import combine_number, literal_bits, step, tile_type
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import Nest, simplify
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region, Store

#: Elements of a row that tiles hold whole, with others: kShortRow of native/cpu/parse_loop.cc.
SHORT_ROW = 128


class _Extent(enum.IntEnum):
    """What a register holds: a tile of the row, all of it, a scalar with a tile to fill, or a scalar alone."""

    TILE = 0
    ROW = 1
    SCALAR = 2
    SINGLE = 3


def reduces_rows(region: Region, nest: Nest) -> bool:
    """Whether all reductions of the region, at least one, are over the same dimensions, its last ones."""
    rank = len(nest.dims)
    return len({reduction.dims for reduction in region.reductions}) == 1 and nest.reduced == tuple(
        range(rank - len(nest.reduced), rank)
    )


def write(region: Region, slots: Mapping[Instruction, int]) -> list[int]:
    """The bytecode of ``region``, of which ``reduces_rows`` holds."""
    return _Writer(Phases(region), slots).bytecode()


class Phases:
    """When each expression of a region is computed.

    ``stage``: how many reductions, one needing the other, an expression is behind. ``uses``: in which phases what
    varies within a row is needed, or a scalar is needed as a tile.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        self.nest = simplify(region)
        self.stage: dict[Expression, int] = {}
        self.varies: dict[Expression, bool] = {}
        for expression in region.expressions():
            before = max((self.stage[o] for o in expression.operands), default=0)
            self.stage[expression] = before + isinstance(expression, Reduce)
            self.varies[expression] = self._varies(expression)
        self.count = max(self.stage.values()) + 1
        self.uses: defaultdict[Expression, set[int]] = defaultdict(set)
        for store in region.stores:
            if self.stores_row(store):
                self.uses[store.value].add(self.stage[store.value])
        for expression in reversed(region.expressions()):
            if isinstance(expression, Reduce):
                self.uses[expression.value].add(self.stage[expression] - 1)
            elif is_step(expression) and self.varies[expression]:
                for operand in expression.operands:
                    self.uses[operand].add(self.computed(expression))

    def in_row(self, index: Affine) -> bool:
        """Whether ``index`` moves along the row."""
        strides = self.nest.strides(index)
        return any(strides[d] for d in self.nest.reduced)

    def _varies(self, expression: Expression) -> bool:
        if is_step(expression):
            return any(self.varies[operand] for operand in expression.operands)
        if isinstance(expression, Load):
            return self.in_row(expression.index)
        return isinstance(expression, Index) and self.in_row(expression.value)

    def stores_row(self, store: Store) -> bool:
        """Whether ``store`` fills a row, not one element beside it."""
        return self.in_row(store.index) or self.varies[store.value]

    def computed(self, expression: Expression) -> int:
        """The phase in which an operation runs: as late as its first use, if it varies within the row."""
        return min(self.uses[expression]) if self.varies[expression] else self.stage[expression]

    def is_kept(self, expression: Expression) -> bool:
        """Whether the whole row of an operation's results is kept for a later phase."""
        return is_step(expression) and self.varies[expression] and len(self.uses[expression]) > 1

    @property
    def kept_bytes(self) -> int:
        """What is kept of one row."""
        row = prod(self.nest.dims[d] for d in self.nest.reduced)
        kept = (e for e in self.region.expressions() if self.is_kept(e))
        return row * sum(tile_type(e.element_type).bytes for e in kept)


class _Writer:
    def __init__(self, phases: Phases, slots: Mapping[Instruction, int]) -> None:
        self.phases, self.region, self.nest = phases, phases.region, phases.nest
        self.slots = slots
        self.registers: dict[Expression, int] = {}
        self.types: list[tuple[ElementType, _Extent]] = []
        self.free: defaultdict[ElementType, list[int]] = defaultdict(list)
        self.inputs: dict[Expression, int] = {}  # numbers
        self.iotas: dict[Expression, int] = {}
        self.arrays = Arrays(slots)

    def bytecode(self) -> list[int]:
        sources = list(self._sources())
        phases: list[int] = []
        for phase in range(self.phases.count):
            phases += self._phase(phase)
        bytecode = [ItemKind.ROW_LOOP, len(self.nest.dims), *self.nest.dims, len(self.nest.reduced), len(self.types)]
        for element_type, extent in self.types:
            bytecode += [int(element_type), extent]
        return [*bytecode, *sources, self.phases.count, *phases]

    def _register(self, element_type: ElementType, extent: _Extent) -> int:
        self.types.append((tile_type(element_type), extent))
        return len(self.types) - 1

    def _scalar(self, expression: Apply | Load | Reduce) -> int:
        """A register for what is the same within a row."""
        extent = _Extent.SCALAR if self.phases.uses[expression] else _Extent.SINGLE
        return self._register(expression.element_type, extent)

    def _sources(self) -> Iterator[int]:
        inputs: list[list[int]] = []
        literals: list[list[int]] = []
        iotas: list[list[int]] = []
        for expression in self.region.expressions():
            if is_taken(expression):
                self.arrays.add(expression, lambda kind: self._register(kind, _Extent.SCALAR))
                continue
            if isinstance(expression, Apply | Reduce):
                continue
            extent = _Extent.TILE if self.phases.varies[expression] else _Extent.SCALAR
            register = self._register(expression.element_type, extent)
            self.registers[expression] = register
            if isinstance(expression, Load):
                self.inputs[expression] = len(inputs)
                strides = self.nest.strides(expression.index)
                inputs.append([self.slots[expression.source], register, expression.index.offset, *strides])
            elif isinstance(expression, Literal):
                literals.append([register, literal_bits(expression.data)])
            else:
                self.iotas[expression] = len(iotas)
                iotas.append([register, expression.value.offset, *self.nest.strides(expression.value)])
        for group in (inputs, [*literals, *self.arrays.literals()], iotas, self.arrays.entries()):
            yield len(group)
            for entry in group:
                yield from entry

    def _phase(self, phase: int) -> Iterator[int]:
        phases = self.phases
        applies = [e for e in self.region.expressions() if is_step(e) and phases.computed(e) == phase]
        scalar_steps = []
        for expression in applies:
            if not phases.varies[expression]:
                self.registers[expression] = self._scalar(expression)
                scalar_steps.append(self._step(expression))
        stores = [s for s in self.region.stores if phases.stage[s.value] == phase]
        needed = [e for e in self.region.expressions() if phase in phases.uses[e]]
        inputs = [self.inputs[e] for e in needed if e in self.inputs and phases.varies[e]]
        iotas = [self.iotas[e] for e in needed if e in self.iotas and phases.varies[e]]
        yield from _group(scalar_steps)
        yield from _group([self._output(s) for s in stores if not phases.stores_row(s)])
        for numbers in (self._broadcasts(needed, phase), inputs, iotas):
            yield from (len(numbers), *numbers)
        row_stores = [s for s in stores if phases.stores_row(s)]
        reductions = [f for f in self.region.reductions if phases.stage[f] == phase + 1]
        varying = [e for e in applies if phases.varies[e]]
        yield from _group(self._steps(varying, {s.value for s in row_stores}, {f.value for f in reductions}))
        yield from _group([self._output(s) for s in row_stores])
        yield from _group([self._reduction(reduction) for reduction in reductions])

    def _broadcasts(self, needed: list[Expression], phase: int) -> list[int]:
        """Scalars of this row that are needed as tiles from this phase on."""
        return [
            self.registers[e]
            for e in needed
            if not self.phases.varies[e]
            and min(self.phases.uses[e]) == phase
            and not isinstance(e, Literal)
            and not (isinstance(e, Load) and not is_taken(e) and not any(self.nest.strides(e.index)))
        ]

    def _step(self, expression: Apply | Load) -> list[int]:
        if isinstance(expression, Load):
            return self.arrays.take(expression, self.registers)
        return step(expression, self.registers)

    def _steps(
        self, applies: Sequence[Apply | Load], stored: set[Expression], reduced: set[Expression]
    ) -> list[list[int]]:
        """What runs on tiles. A register is free again after the last use, but for those that stores may move."""
        phases = self.phases
        last_use = {o: n for n, e in enumerate(applies) for o in e.operands}
        at_end: list[Apply | Load] = []
        steps = []
        for number, expression in enumerate(applies):
            if phases.is_kept(expression):
                register = self._register(expression.element_type, _Extent.ROW)
            elif expression not in stored and self.free[tile_type(expression.element_type)]:
                register = self.free[tile_type(expression.element_type)].pop()
            else:
                register = self._register(expression.element_type, _Extent.TILE)
            self.registers[expression] = register
            steps.append(self._step(expression))
            for operand in dict.fromkeys(expression.operands):
                if not is_step(operand) or not phases.varies[operand] or phases.is_kept(operand):
                    continue
                if last_use[operand] == number and operand not in stored and operand not in reduced:
                    self.free[tile_type(operand.element_type)].append(self.registers[operand])
            if expression in reduced and expression not in stored and not phases.is_kept(expression):
                at_end.append(expression)
        for expression in at_end:
            self.free[tile_type(expression.element_type)].append(self.registers[expression])
        return steps

    def _output(self, store: Store) -> list[int]:
        strides = self.nest.strides(store.index)
        if not self.phases.stores_row(store):
            strides = strides[: len(strides) - len(self.nest.reduced)]
        return [self.slots[store.target], self.registers[store.value], store.index.offset, *strides]

    def _reduction(self, reduction: Reduce) -> list[int]:
        self.registers[reduction] = self._scalar(reduction)
        value, initial = (self.registers[o] for o in reduction.operands)
        return [combine_number(reduction), value, self.registers[reduction], initial]


def _group(entries: list[list[int]]) -> Iterator[int]:
    yield len(entries)
    for entry in entries:
        yield from entry
