"""Small matrix products and blocks at run-time starts, as LLVM IR."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from math import prod

from flagos_backend.codegen.cpu.bytecode import ItemKind
from flagos_backend.codegen.cpu.llvm import scalars
from flagos_backend.codegen.cpu.llvm.code import Function, Memory, NotCompilableError, value_type
from flagos_backend.codegen.cpu.llvm.nests import MemoryOf
from flagos_backend.codegen.cpu.lower.dot import MatrixProduct, Operand
from flagos_backend.codegen.cpu.steps import Step, array_of
from flagos_backend.ir.types import ElementType

E = ElementType
# Of a row of sums on the stack.
_MAX_ROW_BYTES = 1 << 13


def write_product(code: Function, product: MatrixProduct, memory_of: MemoryOf) -> None:
    """A sum for each element where the right side has its columns side by side in memory, else rows added up."""
    _Product(code, product, memory_of).write()


class _Product:
    def __init__(self, code: Function, product: MatrixProduct, memory_of: MemoryOf) -> None:
        if product.is_of_half_floats:
            raise NotCompilableError("a product of 16-bit floats")
        self.code = code
        self.product = product
        self.places = {id(o): memory_of(o.buffer) for o in (product.lhs, product.rhs, product.result)}
        self.scopes = tuple(dict.fromkeys(m.scope for m in self.places.values()))

    def write(self) -> None:
        product, code = self.product, self.code
        with contextlib.ExitStack() as stack:
            batch = [stack.enter_context(code.loop(size)) for size in product.batch]
            row = stack.enter_context(code.loop(product.m))
            # Columns that lie along the sum are reduced; else vectors run along the columns of the result.
            if product.rhs.transposed or product.n == 1:
                column = stack.enter_context(code.loop(product.n))
                self._sum(batch, row, column)
            else:
                self._rows(batch, row)

    def _sum(self, batch: Sequence[str], row: str, column: str) -> None:
        code, product = self.code, self.product
        held = value_type(product.element_type)
        cell = code.cell(held)
        code.effect(f"store {held} {self._zero()}, ptr {cell}")
        with code.loop(product.k) as k:
            before = code.value(f"load {held}, ptr {cell}")
            code.effect(f"store {held} {self._added(before, self._term(batch, row, column, k))}, ptr {cell}")
        self._store(batch, row, column, code.value(f"load {held}, ptr {cell}"))

    def _rows(self, batch: Sequence[str], row: str) -> None:
        code, product = self.code, self.product
        held = value_type(product.element_type)
        if product.n * product.element_type.bytes > _MAX_ROW_BYTES:
            raise NotCompilableError(f"a product of {product.n} columns")
        sums = code.row(f"[{product.n} x {held}]")
        with code.loop(product.n) as column:
            place = code.value(f"getelementptr inbounds {held}, ptr {sums}, i64 {column}")
            code.effect(f"store {held} {self._zero()}, ptr {place}")
        with code.loop(product.k) as k, code.loop(product.n) as column:
            place = code.value(f"getelementptr inbounds {held}, ptr {sums}, i64 {column}")
            before = code.value(f"load {held}, ptr {place}")
            code.effect(f"store {held} {self._added(before, self._term(batch, row, column, k))}, ptr {place}")
        with code.loop(product.n) as column:
            place = code.value(f"getelementptr inbounds {held}, ptr {sums}, i64 {column}")
            self._store(batch, row, column, code.value(f"load {held}, ptr {place}"))

    def _zero(self) -> str:
        return "0" if self._is_integer else "0.0"

    @property
    def _is_integer(self) -> bool:
        return self.product.element_type not in (E.F32, E.F64)

    def _term(self, batch: Sequence[str], row: str, column: str, k: str) -> str:
        product = self.product
        left = self._element(product.lhs, batch, row, k, product.operand_types[0])
        right = self._element(product.rhs, batch, k, column, product.operand_types[1])
        held = value_type(product.element_type)
        return self.code.value(f"{'mul' if self._is_integer else 'fmul contract'} {held} {left}, {right}")

    def _added(self, total: str, term: str) -> str:
        held = value_type(self.product.element_type)
        return self.code.value(f"{'add' if self._is_integer else 'fadd reassoc contract'} {held} {total}, {term}")

    def _element(self, operand: Operand, batch: Sequence[str], row: str, column: str, held: ElementType) -> str:
        place = self.places[id(operand)]
        value = self.code.load(place, held, self._index(operand, batch, row, column), self.scopes)
        return scalars.convert(self.code, held, self.product.element_type, value)

    def _store(self, batch: Sequence[str], row: str, column: str, value: str) -> None:
        result = self.product.result
        index = self._index(result, batch, row, column)
        self.code.store(self.places[id(result)], self.product.element_type, index, value, self.scopes)

    def _index(self, operand: Operand, batch: Sequence[str], row: str, column: str) -> str:
        if operand.transposed:
            row, column = column, row
        terms = [*zip(batch, operand.batch_strides, strict=True), (row, operand.leading), (column, 1)]
        return self.code.index(terms, operand.offset)


def write_block(code: Function, step: Step, memory_of: MemoryOf) -> None:
    """A block at run-time starts, which are clamped so that it lies inside: sliced out of an array, or written into it,
    which is copied first unless it is changed where it stands."""
    width, rank, *numbers = step.numbers
    dims, block, types = numbers[:rank], numbers[rank : 2 * rank], numbers[2 * rank :]
    target = memory_of(step.targets[0])
    if step.kind == ItemKind.SLICE:
        array, starts = memory_of(step.sources[0]), step.sources[1:]
        inner = target
    else:
        inner, array, starts = memory_of(step.sources[0]), memory_of(step.sources[1]), step.sources[2:]
        if array.pointer != target.pointer:
            code.copy(target.pointer, array.pointer, array_of(step.targets[0]).num_bytes)
        array = target
    strides = [prod(dims[d + 1 :]) for d in range(rank)]
    scopes = (array.scope, inner.scope)
    first = [
        (_clamped(code, memory_of(start), E(number), size - taken), stride)
        for start, number, size, taken, stride in zip(starts, types, dims, block, strides, strict=True)
    ]
    if 0 in block:
        return
    # Trailing dimensions that are taken whole are one run.
    outer = rank
    while outer > 0 and block[outer:] == dims[outer:]:
        outer -= 1
    run = prod(block[outer:])
    with contextlib.ExitStack() as stack:
        indices = [stack.enter_context(code.loop(size)) for size in block[:outer]]
        last = stack.enter_context(code.loop(run))
        inside = [*zip(indices, strides, strict=False), (last, 1)]
        place = code.index([*first, *inside], 0)
        spans = [prod(block[d + 1 :]) for d in range(outer)]
        other = code.index([*zip(indices, spans, strict=True), (last, 1)], 0)
        moved = moved_type(width)
        if step.kind == ItemKind.SLICE:
            code.store(inner, moved, other, code.load(array, moved, place, scopes), scopes)
        else:
            code.store(array, moved, place, code.load(inner, moved, other, scopes), scopes)


def _clamped(code: Function, start: Memory, element_type: ElementType, limit: int) -> str:
    """A start as an i64 in [0, limit]."""
    value = as_index(code, element_type, code.load(start, element_type, "0", ()))
    above = code.call("i64", "llvm.smax.i64", ("i64", value), ("i64", "0"))
    return code.call("i64", "llvm.smin.i64", ("i64", above), ("i64", str(limit)))


def moved_type(width: int) -> ElementType:
    """As what elements of so many bytes are moved. Raises NotCompilableError."""
    try:
        return {1: E.U8, 2: E.U16, 4: E.U32, 8: E.U64}[width]
    except KeyError:
        raise NotCompilableError(f"elements of {width} bytes") from None


def as_index(code: Function, element_type: ElementType, value: str) -> str:
    """An integer as an i64; what is greater than all of these as the greatest."""
    if element_type is E.U64:
        return code.call("i64", "llvm.umin.i64", ("i64", value), ("i64", str((1 << 63) - 1)))
    return scalars.convert(code, element_type, E.S64, value)
