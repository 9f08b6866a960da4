"""A region as LLVM IR: loops over its points; where it folds dimensions, a pass over these for each fold that needs the
one before, and a last one for what is stored along them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from flagos_backend.codegen.cpu.llvm import scalars
from flagos_backend.codegen.cpu.llvm.code import Function, Memory, NotCompilableError, value_type
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Fold, Index, Literal, Load, Region, Store

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
        self.folded = region.folded
        if len({fold.dims for fold in region.folds}) > 1:
            raise NotCompilableError("folds over different dimensions")
        buffers = [s.target for s in region.stores] + [e.source for e in region.expressions() if isinstance(e, Load)]
        self.disjoint = tuple(dict.fromkeys(memory_of(buffer).scope for buffer in buffers))
        # How many folds, one needing the other, each expression is behind.
        self.stage: dict[Expression, int] = {}
        for expression in region.expressions():
            before = max((self.stage[operand] for operand in expression.operands), default=0)
            self.stage[expression] = before + isinstance(expression, Fold)
        self.indices = ["0"] * region.rank

    def write(self) -> None:
        with self._loops([d for d in range(self.region.rank) if d not in self.folded]):
            values: dict[Expression, str] = {}
            for stage in range(max(self.stage.values(), default=0) + 1):
                stores = [s for s in self.region.stores if self.stage[s.value] == stage]
                self._store([s for s in stores if not self._runs_along(s)], values)
                along = [s for s in stores if self._runs_along(s)]
                folds = [f for f in self.region.folds if self.stage[f] == stage + 1]
                if along or folds:
                    self._pass(along, folds, values)

    def _runs_along(self, store: Store) -> bool:
        folded = frozenset(self.folded)
        return bool(folded & (store.index.dims | self.region.reach[store.value]))

    @contextlib.contextmanager
    def _loops(self, dims: Sequence[int]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for d in dims:
                self.indices[d] = stack.enter_context(self.code.loop(self.region.dims[d]))
            yield

    def _pass(self, stores: Sequence[Store], folds: Sequence[Fold], known: dict[Expression, str]) -> None:
        """Over the folded dimensions of one point of the others. ``known`` gets what is folded."""
        code = self.code
        cells = {}
        for fold in folds:
            held = value_type(_accumulator(fold))
            cells[fold] = code.cell(held)
            initial = self._value(fold.initial, known)
            code.effect(f"store {held} {self._widened(fold, initial)}, ptr {cells[fold]}")
        if 0 not in [self.region.dims[d] for d in self.folded]:
            with self._loops(self.folded):
                values = dict(known)
                for fold in folds:
                    held = value_type(_accumulator(fold))
                    term = self._widened(fold, self._value(fold.value, values))
                    before = code.value(f"load {held}, ptr {cells[fold]}")
                    after = scalars.combine(code, fold.combine, _accumulator(fold), [before, term])
                    code.effect(f"store {held} {after}, ptr {cells[fold]}")
                self._store(stores, values)
        for fold, cell in cells.items():
            total = code.value(f"load {value_type(_accumulator(fold))}, ptr {cell}")
            known[fold] = scalars.convert(code, _accumulator(fold), fold.element_type, total)

    def _widened(self, fold: Fold, value: str) -> str:
        return scalars.convert(self.code, fold.element_type, _accumulator(fold), value)

    def _store(self, stores: Sequence[Store], values: dict[Expression, str]) -> None:
        """All values before the first store, which may be where something is loaded from."""
        found = [self._value(store.value, values) for store in stores]
        for store, value in zip(stores, found, strict=True):
            memory = self.memory_of(store.target)
            self.code.store(memory, store.value.element_type, self._index(store.index), value, self.disjoint)

    def _index(self, index: Affine) -> str:
        if index.shifts:
            raise NotCompilableError("an index that starts at run time")
        return self.code.index(tuple(zip(self.indices, index.coefficients, strict=True)), index.offset)

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
            return self.code.load(memory, expression.element_type, self._index(expression.index), self.disjoint)
        if isinstance(expression, Index):
            return scalars.convert(self.code, E.S64, expression.element_type, self._index(expression.value))
        assert isinstance(expression, Apply), expression
        return scalars.apply(self.code, expression, [values[operand] for operand in expression.operands])


def _accumulator(fold: Fold) -> ElementType:
    """As for tiles: sums and products of floats are doubles, maxima and minima of 16-bit ones floats."""
    if fold.element_type not in (E.F32, E.BF16):
        return fold.element_type
    return E.F64 if fold.combine in (Opcode.ADD, Opcode.MULTIPLY) else E.F32
