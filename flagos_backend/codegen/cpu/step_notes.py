"""What explain and profiles say of each step of a native program: between emitter.py and compile/explanation.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from flagos_backend.codegen.cpu.bytecode import ItemKind
from flagos_backend.codegen.cpu.lower.dot import MatrixProduct
from flagos_backend.codegen.cpu.steps import Item, Step, array_of, sources, targets
from flagos_backend.ir.cost import instruction_cost
from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.region import Apply, Load, Reduce, Region

_KINDS = {
    ItemKind.CALL: "call",
    ItemKind.PRODUCT: "product",
    ItemKind.WHILE: "control",
    ItemKind.CONDITIONAL: "control",
}
_BLAS = "(BLAS)"


@dataclass(frozen=True, slots=True)
class StepNote:
    """``number``: of the native step; items that are one function of machine code share it. ``called``: what a library
    call computes. ``nested``: the programs that a loop or a choice runs, with how often (once where unknown).

    Everything else is worked out when it is asked for: most programs are never explained.
    """

    number: int
    item: Item
    text: str
    compiled: bool
    called: Instruction | None = None
    nested: tuple[tuple[int, tuple[StepNote, ...]], ...] = ()

    @property
    def kind(self) -> str:
        """loop, reduction, product, call, collective, control or kernel."""
        if isinstance(self.item, Region):
            return "reduction" if self.item.reductions else "loop"
        if self.called is not None and self.called.opcode in COLLECTIVES:
            return "collective"
        return "product" if isinstance(self.item, MatrixProduct) else _KINDS.get(self.item.kind, "kernel")

    @property
    def provider(self) -> str:
        """compiled (machine code of this program's), native, blas or torch."""
        if self.compiled:
            return "compiled"
        if isinstance(self.item, MatrixProduct):
            return "blas" if _BLAS in self.text else "native"
        return "native" if self.called is None else "torch"

    @property
    def metadata(self) -> str:
        """As of the instruction that it computes."""
        computed = (*([self.called] if self.called else ()), *targets(self.item))
        return next((instruction.metadata for instruction in computed if instruction.metadata), "")

    @property
    def work(self) -> tuple[float, float]:
        """Flops and bytes of one run; of a choice, those of its longest branch."""
        if self.nested:
            programs = [(times * flops, times * size) for times, (flops, size) in self._programs()]
            is_choice = isinstance(self.item, Step) and self.item.kind == ItemKind.CONDITIONAL
            taken = [max(programs, key=lambda work: work[1])] if is_choice else programs
            return sum(flops for flops, _ in taken), sum(size for _, size in taken)
        return _work(self.item, self.called)

    def _programs(self) -> Iterator[tuple[int, tuple[float, float]]]:
        for times, notes in self.nested:
            works = [note.work for note in notes]
            yield times, (sum(flops for flops, _ in works), sum(size for _, size in works))


@dataclass(frozen=True, slots=True)
class BufferNote:
    """A temporary, by the positions in the notes of the steps from which on and through which it is used."""

    name: str
    bytes: int
    first: int
    last: int


def label(text: str) -> str:
    """The first line of what a step's text says, without where it stands."""
    return text.partition("\n")[0].strip()


def _work(item: Item, called: Instruction | None) -> tuple[float, float]:
    if called is not None:
        cost = instruction_cost(called)
        return cost.flops + cost.transcendentals, cost.bytes_accessed
    if isinstance(item, Region):
        return _operations(item), _moved(item)
    arrays = sum(array_of(a).num_bytes for a in (*sources(item), *targets(item)))
    if isinstance(item, MatrixProduct):
        return 2.0 * prod(item.batch) * item.m * item.n * item.k, float(arrays)
    # Blocks, windows and rows of an array: what is made of it is read and written, and no more of what it is made of.
    made = sum(array_of(target).num_bytes for target in targets(item))
    return 0.0, float(min(arrays, 2 * made) if made else arrays)


def _points(region: Region, dims: Sequence[int] | frozenset[int]) -> int:
    return prod(region.dims[d] for d in dims)


def _operations(region: Region) -> float:
    total = 0
    for expression in region.expressions():
        if isinstance(expression, Apply):
            total += _points(region, region.reach[expression])
        elif isinstance(expression, Reduce):
            total += _points(region, region.reach[expression] | set(expression.dims))
    return float(total)


def _moved(region: Region) -> float:
    """Each load and store once for each element that it touches, and no array more than once in whole."""
    read: dict[Instruction, int] = {}
    for expression in region.expressions():
        if isinstance(expression, Load) and expression.source.opcode is not Opcode.CONSTANT:
            size = _points(region, region.reach[expression]) * expression.element_type.bytes
            read[expression.source] = read.get(expression.source, 0) + size
    written = 0
    for store in region.stores:
        shape = array_of(store.target)
        written += min(shape.num_bytes, _points(region, store.index.dims) * shape.element_type.bytes)
    return float(sum(min(size, array_of(source).num_bytes) for source, size in read.items()) + written)
