"""A region as LLVM IR: loops over its points; where it reduces dimensions, a pass over these for each reduction that
needs the one before, and a last one for what is stored along them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from flagos_backend.codegen.cpu.llvm import scalars
from flagos_backend.codegen.cpu.llvm.code import Function, Memory, NotCompilableError, value_type
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region, Store

E = ElementType
MemoryOf = Callable[[Instruction], Memory]


def write(code: Function, region: Region, memory_of: MemoryOf) -> None:
    """Adds ``region`` to the function. Raises NotCompilableError, after which the function is of no use."""
    _Writer(code, region, memory_of).write()


class _Writer:
    def __init__(self, code: Function, region: Region, memory_of: MemoryOf) -> None:
        self.code = code
        self.region = region
        self.memory_of = memory_of
        self.reduced = region.reduced
        if len({reduction.dims for reduction in region.reductions}) > 1:
            raise NotCompilableError("reductions over different dimensions")
        buffers = [s.target for s in region.stores] + [e.source for e in region.expressions() if isinstance(e, Load)]
        self.disjoint = tuple(dict.fromkeys(memory_of(buffer).scope for buffer in buffers))
        # How many reductions, one needing the other, each expression is behind.
        self.stage: dict[Expression, int] = {}
        for expression in region.expressions():
            before = max((self.stage[operand] for operand in expression.operands), default=0)
            self.stage[expression] = before + isinstance(expression, Reduce)
        self.indices = ["0"] * region.rank

    def write(self) -> None:
        with self._loops([d for d in range(self.region.rank) if d not in self.reduced]):
            values: dict[Expression, str] = {}
            for stage in range(max(self.stage.values(), default=0) + 1):
                stores = [s for s in self.region.stores if self.stage[s.value] == stage]
                self._store([s for s in stores if not self._runs_along(s)], values)
                along = [s for s in stores if self._runs_along(s)]
                reductions = [f for f in self.region.reductions if self.stage[f] == stage + 1]
                if along or reductions:
                    self._pass(along, reductions, values)

    def _runs_along(self, store: Store) -> bool:
        reduced = frozenset(self.reduced)
        return bool(reduced & (store.index.dims | self.region.reach[store.value]))

    @contextlib.contextmanager
    def _loops(self, dims: Sequence[int]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for d in dims:
                self.indices[d] = stack.enter_context(self.code.loop(self.region.dims[d]))
            yield

    def _pass(self, stores: Sequence[Store], reductions: Sequence[Reduce], known: dict[Expression, str]) -> None:
        """Over the reduced dimensions of one point of the others. ``known`` gets what is reduced."""
        code = self.code
        cells = {}
        for reduction in reductions:
            held = value_type(_accumulator(reduction))
            cells[reduction] = code.cell(held)
            initial = self._value(reduction.initial, known)
            code.effect(f"store {held} {self._widened(reduction, initial)}, ptr {cells[reduction]}")
        if 0 not in [self.region.dims[d] for d in self.reduced]:
            with self._loops(self.reduced):
                values = dict(known)
                for reduction in reductions:
                    held = value_type(_accumulator(reduction))
                    term = self._widened(reduction, self._value(reduction.value, values))
                    before = code.value(f"load {held}, ptr {cells[reduction]}")
                    after = scalars.combine(code, reduction.combine, _accumulator(reduction), [before, term])
                    code.effect(f"store {held} {after}, ptr {cells[reduction]}")
                self._store(stores, values)
        for reduction, cell in cells.items():
            total = code.value(f"load {value_type(_accumulator(reduction))}, ptr {cell}")
            known[reduction] = scalars.convert(code, _accumulator(reduction), reduction.element_type, total)

    def _widened(self, reduction: Reduce, value: str) -> str:
        return scalars.convert(self.code, reduction.element_type, _accumulator(reduction), value)

    def _store(self, stores: Sequence[Store], values: dict[Expression, str]) -> None:
        """All values before the first store, which may be where something is loaded from."""
        found = [self._value(store.value, values) for store in stores]
        for start in (start for store in stores for start in store.index.starts):
            self._value(start, values)
        for store, value in zip(stores, found, strict=True):
            memory = self.memory_of(store.target)
            index = self._index(store.index, values)
            self.code.store(memory, store.value.element_type, index, value, self.disjoint)

    def _index(self, index: Affine, values: dict[Expression, str]) -> str:
        """``values`` has those of its starts."""
        terms = list(zip(self.indices, index.coefficients, strict=True))
        for shift in index.shifts:
            start = scalars.convert(self.code, shift.start.element_type, E.S64, values[shift.start])
            terms.append((start, shift.factor))
        return self.code.index(tuple(terms), index.offset)

    def _value(self, root: Expression, values: dict[Expression, str]) -> str:
        """The name of an expression's value at the current point."""
        stack = [root]
        while stack:
            expression = stack[-1]
            if expression in values:
                stack.pop()
                continue
            missing = [operand for operand in expression.operands if operand not in values]
            if missing:
                stack += missing
                continue
            values[expression] = self._computed(expression, values)
            stack.pop()
        return values[root]

    def _computed(self, expression: Expression, values: dict[Expression, str]) -> str:
        if isinstance(expression, Literal):
            return scalars.literal(expression)
        if isinstance(expression, Load):
            if expression.guard is not None:
                raise NotCompilableError("a load with a guard")
            memory = self.memory_of(expression.source)
            return self.code.load(memory, expression.element_type, self._index(expression.index, values), self.disjoint)
        if isinstance(expression, Index):
            return scalars.convert(self.code, E.S64, expression.element_type, self._index(expression.value, values))
        assert isinstance(expression, Apply), expression
        return scalars.apply(self.code, expression, [values[operand] for operand in expression.operands])


def _accumulator(reduction: Reduce) -> ElementType:
    """As for tiles: sums and products of floats are doubles, maxima and minima of 16-bit ones floats."""
    if reduction.element_type not in (E.F32, E.BF16):
        return reduction.element_type
    return E.F64 if reduction.combine in (Opcode.ADD, Opcode.MULTIPLY) else E.F32
