"""Small gathers, scatters, argmin and argmax, as LLVM IR, from the numbers of their steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from flagos_backend.codegen.cpu.bytecode import COMBINES
from flagos_backend.codegen.cpu.llvm import scalars
from flagos_backend.codegen.cpu.llvm.blocks import as_index, moved_type
from flagos_backend.codegen.cpu.llvm.code import Function, NotCompilableError, value_type
from flagos_backend.codegen.cpu.llvm.nests import MemoryOf
from flagos_backend.codegen.cpu.steps import Step, array_of
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ElementType

E = ElementType
_FLOATS = frozenset({E.F32, E.F64})


class _Numbers:
    """The bytecode of Windows.bytecode of lower/window_indices.py, and what follows them."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._rest = iter(numbers)
        self.width, self.index_type = self.word(), E(self.word())
        self.batch = [(self.word(), self.word(), self.word(), self.word()) for _ in range(self.word())]
        self.vector_stride = self.word()
        self.starts = [(self.word(), self.word(), self.word()) for _ in range(self.word())]
        self.window = [(self.word(), self.word(), self.word()) for _ in range(self.word())]

    def word(self) -> int:
        return next(self._rest)


def write_gather(code: Function, step: Step, memory_of: MemoryOf) -> None:
    """Starts are clamped so that each window lies inside the array."""
    numbers = _Numbers(step.numbers)
    moved = moved_type(numbers.width)
    array, target = memory_of(step.sources[0]), memory_of(step.targets[0])
    scopes = tuple(dict.fromkeys(memory_of(b).scope for b in (*step.sources, *step.targets)))
    with _windows(code, numbers) as indices:
        first = []
        starts = _starts(code, numbers, step.sources[1:], indices, memory_of)
        for (limit, stride, wrap), start in zip(numbers.starts, starts, strict=True):
            raised = _raised(code, start, wrap)
            low = code.call("i64", "llvm.smax.i64", ("i64", raised), ("i64", "0"))
            first.append((code.call("i64", "llvm.smin.i64", ("i64", low), ("i64", str(limit))), stride))
        first += [(index, batch[2]) for index, batch in zip(indices, numbers.batch, strict=True)]
        inside = [(index, batch[3]) for index, batch in zip(indices, numbers.batch, strict=True)]
        with _window(code, numbers) as steps:
            place = code.index([*first, *((i, w[1]) for i, w in zip(steps, numbers.window, strict=True))], 0)
            other = code.index([*inside, *((i, w[2]) for i, w in zip(steps, numbers.window, strict=True))], 0)
            code.store(target, moved, other, code.load(array, moved, place, scopes), scopes)


def write_scatter(code: Function, step: Step, memory_of: MemoryOf) -> None:
    """Windows that do not lie inside the array are left out; one that is met again is updated again, in order."""
    numbers = _Numbers(step.numbers)
    combine = numbers.word()
    element_type = moved_type(numbers.width) if combine < 0 else E(numbers.word())
    source, *indices_of, updates_of = step.sources
    array, target, updates = memory_of(source), memory_of(step.targets[0]), memory_of(updates_of)
    if array.pointer != target.pointer:
        code.copy(target.pointer, array.pointer, array_of(step.targets[0]).num_bytes)
    scopes = tuple(dict.fromkeys((target.scope, *(memory_of(b).scope for b in (*indices_of, updates_of)))))
    with _windows(code, numbers) as indices:
        first, inside_array = [], "true"
        starts = _starts(code, numbers, indices_of, indices, memory_of)
        for (limit, stride, wrap), start in zip(numbers.starts, starts, strict=True):
            raised = _raised(code, start, wrap)
            holds = code.value(f"icmp ule i64 {raised}, {limit}")
            inside_array = holds if inside_array == "true" else code.value(f"and i1 {inside_array}, {holds}")
            first.append((raised, stride))
        first += [(index, batch[2]) for index, batch in zip(indices, numbers.batch, strict=True)]
        inside = [(index, batch[3]) for index, batch in zip(indices, numbers.batch, strict=True)]
        with code.when(inside_array), _window(code, numbers) as steps:
            place = code.index([*first, *((i, w[1]) for i, w in zip(steps, numbers.window, strict=True))], 0)
            other = code.index([*inside, *((i, w[2]) for i, w in zip(steps, numbers.window, strict=True))], 0)
            value = code.load(updates, element_type, other, scopes)
            if combine >= 0:
                before = code.load(target, element_type, place, scopes)
                value = scalars.operation(code, COMBINES[combine], element_type, [before, value])
            code.store(target, element_type, place, value, scopes)


def write_argminmax(code: Function, step: Step, memory_of: MemoryOf) -> None:
    """argmax (or argmin) along a dimension, and these elements. A NaN comes before all
    numbers; of equal elements it is the first."""
    kind, index_kind, outer, size, inner, largest = step.numbers
    element_type, index_type = E(kind), E(index_kind)
    source, (values, positions) = memory_of(step.sources[0]), map(memory_of, step.targets)
    scopes = (source.scope, values.scope, positions.scope)
    held = value_type(element_type)
    best, at = code.cell(held), code.cell("i64")
    with code.loop(outer) as row, code.loop(inner) as column:
        terms = [(row, size * inner), (column, 1)]
        code.effect(f"store {held} {code.load(source, element_type, code.index(terms, 0), scopes)}, ptr {best}")
        code.effect(f"store i64 0, ptr {at}")
        with code.loop(size) as position:
            value = code.load(source, element_type, code.index([*terms, (position, inner)], 0), scopes)
            before = code.value(f"load {held}, ptr {best}")
            before_at = code.value(f"load i64, ptr {at}")
            better = _precedes(code, element_type, bool(largest), value, before)
            chosen = code.value(f"select i1 {better}, {held} {value}, {held} {before}")
            chosen_at = code.value(f"select i1 {better}, i64 {position}, i64 {before_at}")
            code.effect(f"store {held} {chosen}, ptr {best}")
            code.effect(f"store i64 {chosen_at}, ptr {at}")
        place = code.index([(row, inner), (column, 1)], 0)
        code.store(values, element_type, place, code.value(f"load {held}, ptr {best}"), scopes)
        found = scalars.convert(code, E.S64, index_type, code.value(f"load i64, ptr {at}"))
        code.store(positions, index_type, place, found, scopes)


def _precedes(code: Function, element_type: ElementType, largest: bool, x: str, y: str) -> str:
    held = value_type(element_type)
    if element_type in _FLOATS:
        beyond = code.value(f"fcmp {'ogt' if largest else 'olt'} {held} {x}, {y}")
        is_nan = code.value(f"fcmp uno {held} {x}, {x}")
        was_number = code.value(f"fcmp ord {held} {y}, {y}")
        return code.value(f"or i1 {beyond}, {code.value(f'and i1 {is_nan}, {was_number}')}")
    if element_type not in scalars.INTEGERS:
        raise NotCompilableError(f"argmax of {element_type.name}")
    sign = "s" if element_type in scalars.SIGNED else "u"
    return code.value(f"icmp {sign}{'gt' if largest else 'lt'} {held} {x}, {y}")


@contextlib.contextmanager
def _windows(code: Function, numbers: _Numbers) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(code.loop(size)) for size, *_ in numbers.batch]


@contextlib.contextmanager
def _window(code: Function, numbers: _Numbers) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(code.loop(size)) for size, *_ in numbers.window]


def _starts(
    code: Function, numbers: _Numbers, buffers: Sequence[Instruction], indices: Sequence[str], memory_of: MemoryOf
) -> Iterator[str]:
    """The numbers of the index at a position of the batch, as i64: of one array, or of one each."""
    place = [(index, batch[1]) for index, batch in zip(indices, numbers.batch, strict=True)]
    for n in range(len(numbers.starts)):
        buffer = buffers[0] if len(buffers) == 1 else buffers[n]
        offset = n * numbers.vector_stride if len(buffers) == 1 else 0
        value = code.load(memory_of(buffer), numbers.index_type, code.index(place, offset), ())
        yield as_index(code, numbers.index_type, value)


def _raised(code: Function, start: str, wrap: int) -> str:
    """Negative numbers, raised by ``wrap``."""
    if wrap == 0:
        return start
    negative = code.value(f"icmp slt i64 {start}, 0")
    raised = code.value(f"add i64 {start}, {wrap}")
    return code.value(f"select i1 {negative}, i64 {raised}, i64 {start}")
