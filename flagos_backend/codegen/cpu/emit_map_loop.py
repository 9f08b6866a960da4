"""Writes a region as a loop over points, which may reduce columns. Tiles run along the last dimension of the nest, or
are boxes where native/cpu/boxes.cc finds those better.

Between emitter.py, which plans the program, and native/cpu/parse_loop.cc, which reads the bytecode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flagos_backend.codegen.cpu.bytecode import ItemKind
from flagos_backend.codegen.cpu.emit_takes import Arrays, is_step, is_taken
from flagos_backend.codegen.cpu.encoding import combine_number, literal_bits, step, tile_type
from flagos_backend.codegen.cpu.transforms.choose_tile_dimension import tiled
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import simplify
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region, Store, below

_MAP, _COLUMNS = 0, 1


def write(region: Region, slots: Mapping[Instruction, int]) -> list[int]:
    """The bytecode of ``region``, whose reductions, if there are any, are what it stores and leave its last
    dimension."""
    return _Writer(region, slots).bytecode()


class _Writer:
    """Registers are assigned here: sources keep theirs, results of steps are reused once read."""

    def __init__(self, region: Region, slots: Mapping[Instruction, int]) -> None:
        self.region = region
        self.slots = slots
        self.nest = simplify(region) if region.reduced else tiled(region)
        # What tiles compute: of a reduction the value that goes in.
        values = ((s.value.value if isinstance(s.value, Reduce) else s.value, s) for s in region.stores)
        self.tiles = Region(region.dims, tuple(Store(s.target, value, s.index) for value, s in values))
        self.types: list[ElementType] = []
        self.registers: dict[Expression, int] = {}
        self.arrays = Arrays(slots)

    def bytecode(self) -> list[int]:
        initials = below((reduction.initial for reduction in self.region.reductions), stop=self.tiles.expressions())
        expressions = tuple(dict.fromkeys((*self.tiles.expressions(), *initials)))
        inputs, literals, indices = self._sources(expressions)
        steps = self._steps(expressions)
        ends = self._ends()
        mode = _COLUMNS if self.region.reduced else _MAP
        bytecode = [ItemKind.LOOP, mode, len(self.nest.dims), *self.nest.dims, len(self.nest.reduced)]
        bytecode += [len(self.types), *map(int, self.types)]
        for group in (inputs, literals, indices, self.arrays.entries(), steps, *ends):
            bytecode.append(len(group))
            for entry in group:
                bytecode += entry
        return bytecode

    def _register(self, element_type: ElementType) -> int:
        self.types.append(tile_type(element_type))
        return len(self.types) - 1

    def _strides(self, index: Affine) -> tuple[int, ...]:
        return self.nest.strides(index)

    def _sources(self, expressions: Sequence[Expression]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        inputs, literals, indices = [], [], []
        for expression in expressions:
            if is_taken(expression):
                self.arrays.add(expression, self._register)
                continue
            if isinstance(expression, Apply | Reduce):
                continue
            register = self.registers[expression] = self._register(expression.element_type)
            if isinstance(expression, Load):
                index = expression.index
                inputs.append([self.slots[expression.source], register, index.offset, *self._strides(index)])
            elif isinstance(expression, Literal):
                literals.append([register, literal_bits(expression.data)])
            elif isinstance(expression, Index):
                indices.append([register, expression.value.offset, *self._strides(expression.value)])
        return inputs, [*literals, *self.arrays.literals()], indices

    def _steps(self, expressions: Sequence[Expression]) -> list[list[int]]:
        last_use = {o: n for n, e in enumerate(expressions) if is_step(e) for o in e.operands}
        # What is the same in all rows that are reduced is computed before them and has to stay.
        reduced = frozenset(self.region.reduced)
        fixed = {e for e in expressions if is_step(e) and reduced and not self.region.reach[e] & reduced}
        pinned = {*self.tiles.roots(), *fixed}
        free: dict[ElementType, list[int]] = {}
        steps = []
        for number, expression in enumerate(expressions):
            if not is_step(expression):
                continue
            waiting = free.get(tile_type(expression.element_type))
            reuse = waiting.pop() if waiting and expression not in pinned else None
            self.registers[expression] = self._register(expression.element_type) if reuse is None else reuse
            if isinstance(expression, Load):
                steps.append(self.arrays.take(expression, self.registers))
            else:
                steps.append(step(expression, self.registers))
            for operand in dict.fromkeys(expression.operands):
                if is_step(operand) and operand not in pinned and last_use[operand] == number:
                    free.setdefault(tile_type(operand.element_type), []).append(self.registers[operand])
        return steps

    def _ends(self) -> tuple[list[list[int]], list[list[int]]]:
        entries: list[list[int]] = []
        outputs: list[list[int]] = []
        results: dict[Reduce, int] = {}
        kept = [position for position in range(len(self.nest.dims)) if position not in self.nest.reduced]
        for store in self.region.stores:
            strides = self._strides(store.index)
            reduction = store.value
            if not isinstance(reduction, Reduce):
                outputs.append([self.slots[store.target], self.registers[reduction], store.index.offset, *strides])
                continue
            if reduction not in results:
                results[reduction] = self._register(reduction.element_type)
                value, initial = (self.registers[o] for o in reduction.operands)
                entries.append([combine_number(reduction), value, results[reduction], initial])
            strides = tuple(strides[k] for k in kept)
            outputs.append([self.slots[store.target], results[reduction], store.index.offset, *strides])
        return entries, outputs
