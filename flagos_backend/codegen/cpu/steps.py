"""What a native program is made of, loops, products and steps, and what memory each of them reads and writes.

Used by emitter.py, which plans where everything stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flagos_backend.codegen.cpu.bytecode import ItemKind
from flagos_backend.codegen.cpu.encoding import is_movable
from flagos_backend.codegen.cpu.lower.dot import MatrixProduct
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.region import Apply, Load, Reduce, Region


class NotNativeError(Exception):
    """The computation holds something that a native program cannot express; the message names it."""


# What a token is in memory: it orders the steps that have it, and holds nothing.
_NOTHING = ArrayShape(ElementType.U8, (0,))


def array_of(instruction: Instruction) -> ArrayShape:
    """What the value is in memory."""
    if not isinstance(instruction.shape, ArrayShape):
        raise NotNativeError(f"{instruction.opcode} {instruction.name} is a tuple")
    return _NOTHING if instruction.shape.element_type is ElementType.TOKEN else instruction.shape


# Pairs of a target and the source that a step changes into it.
Over = tuple[tuple[Instruction, Instruction], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A library call as the native program runs it: kind, buffers it reads, buffers it fills, numbers in between.

    ``over``: a target may stand where its source does, and otherwise begins as a copy of it. ``scratch``: buffers that
    only this step uses.
    """

    kind: ItemKind
    sources: tuple[Instruction, ...]
    targets: tuple[Instruction, ...]
    text: str
    numbers: tuple[int, ...] = ()
    over: Over = ()
    scratch: tuple[Instruction, ...] = ()
    nested: tuple[int, ...] = ()


Item = Region | MatrixProduct | Step


def scratch_of(item: Instruction, size: int) -> Instruction:
    return Instruction(Opcode.COPY, ArrayShape(ElementType.U8, (size,)), (item,), name=f"{item.name}.scratch")


def movable(shape: ArrayShape) -> ArrayShape:
    if not is_movable(shape.element_type):
        raise NotNativeError(f"{shape} has elements that tiles cannot move")
    return shape


def is_empty(item: Item) -> bool:
    """A loop that stores nothing. A reduction over nothing still stores its initial value."""
    if not isinstance(item, Region):
        return False
    return 0 in [size for d, size in enumerate(item.dims) if d not in item.reduced]


def writes_over(item: Item, target: Instruction, source: Instruction) -> bool:
    """Whether ``item`` may write ``target`` where it reads ``source``: each element only after its last use."""
    if isinstance(item, Region):
        store, *parts = (s for s in item.stores if s.target is target)
        loads = [e for e in item.expressions() if isinstance(e, Load) and e.source is source]
        widths = {array_of(target).element_type.bytes, *(load.element_type.bytes for load in loads)}
        # Stores come after the operations, so what another store moves must not have been overwritten by then.
        moved = any(s.value in loads for s in item.stores if s is not store)
        same = len(widths) == 1 and all(load.index == store.index for load in loads)
        return not item.reductions and not parts and not moved and same
    return (target, source) in overwritten(item)


def overwritten(item: Item) -> Over:
    """Targets that ``item`` may write over sources which it changes."""
    return item.over if isinstance(item, Step) else ()


def over(target: Instruction, source: Instruction, operands: Sequence[Instruction]) -> Over:
    """A target and the operand that a step changes into it, if it reads that only as this one."""
    return ((target, source),) if operands.count(source) == 1 else ()


def targets(item: Item) -> Sequence[Instruction]:
    if isinstance(item, MatrixProduct):
        return [item.result.buffer]
    if isinstance(item, Step):
        return item.targets
    return [store.target for store in item.stores]


def sources(item: Item) -> Sequence[Instruction]:
    if isinstance(item, MatrixProduct):
        return [item.lhs.buffer, item.rhs.buffer]
    if isinstance(item, Step):
        return item.sources
    return [e.source for e in item.expressions() if isinstance(e, Load)]


def scratches(item: Item) -> Sequence[Instruction]:
    return item.scratch if isinstance(item, Step) else ()


def operations(item: Item) -> int:
    """How many operations of arrays the item stands for, without those that its host runs."""
    if isinstance(item, Region):
        return max(1, sum(isinstance(e, Apply | Reduce) for e in item.expressions()))
    return int(isinstance(item, MatrixProduct) or item.kind != ItemKind.CALL)


def text_of(item: Item) -> str:
    if isinstance(item, Step):
        return item.text
    if isinstance(item, MatrixProduct):
        shape = "x".join(map(str, (*item.batch, item.m, item.n, item.k)))
        types = " ".join(t.name.lower() for t in dict.fromkeys(item.operand_types))
        by = "integers" if item.element_type is ElementType.S32 else "vectors" if item.is_of_half_floats else "BLAS"
        return f"native product {item.result.buffer.name} {types} {shape} ({by})"
    operations = [str(e.opcode) for e in item.expressions() if isinstance(e, Apply)]
    kind = (
        f"{len(item.reductions)} reductions" if len(item.reductions) > 1 else "reduction" if item.reductions else "loop"
    )
    names = ", ".join(dict.fromkeys(t.name for t in targets(item)))
    return f"native {kind} {names} over {'x'.join(map(str, item.dims)) or 'scalar'}: {' '.join(operations) or 'copy'}"
