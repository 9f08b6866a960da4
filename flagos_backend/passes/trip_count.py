"""Recognises counted loops, so that they run without asking the device whether to go on: sets WhileAttributes."""

from __future__ import annotations

from flagos_backend.ir.attributes import CompareAttributes, WhileAttributes
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import MIRRORED, Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule, index_in


def find_trip_counts(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.WHILE or instruction.attributes_as(WhileAttributes).trip_count is not None:
        return None
    count = trip_count(instruction)
    if count is None:
        return None
    return emitter.emit(
        Opcode.WHILE,
        instruction.shape,
        instruction.operands,
        WhileAttributes(count),
        instruction.called,
        like=instruction,
    )


def trip_count(loop: Instruction) -> int | None:
    """How often the body of a ``while`` runs, when its condition compares an integer carried element, that starts at a
    constant and moves by a constant, with a constant; None otherwise."""
    condition, body = loop.called
    test = condition.root
    if test.opcode is not Opcode.COMPARE or not test.operands:
        return None
    direction = test.attributes_as(CompareAttributes).direction
    lhs, rhs = test.operands
    for counter, bound, order in ((lhs, rhs, direction), (rhs, lhs, MIRRORED[direction])):
        index = _carried_index(counter, condition)
        if index is None:
            continue
        limit, start, step = _invariant(bound, condition, body, loop), _initial(loop, index), _step(body, index)
        element_type = counter.shape.element_type if isinstance(counter.shape, ArrayShape) else None
        if limit is None or start is None or step is None or element_type is None:
            continue
        return _count(start, limit, step, order, element_type)
    return None


def _carried_index(value: Instruction, computation: Computation) -> int | None:
    """i, when ``value`` is element i of the computation's parameter."""
    index = index_in(value, computation.parameters[0])
    return index if index >= 0 else None


def _integer(value: Instruction) -> int | None:
    """The value of an integer scalar constant."""
    array = constant_array(value)
    return int(array) if array is not None and array.ndim == 0 and array.dtype.kind in "iu" else None


def _initial(loop: Instruction, index: int) -> int | None:
    initial = loop.operands[0]
    return _integer(initial.operands[index]) if initial.opcode is Opcode.TUPLE else None


def _invariant(bound: Instruction, condition: Computation, body: Computation, loop: Instruction) -> int | None:
    """The bound, when it is a constant, or a carried element that starts as one and never changes."""
    index = _carried_index(bound, condition)
    if index is None:
        return _integer(bound)
    if body.root.opcode is not Opcode.TUPLE or _carried_index(body.root.operands[index], body) != index:
        return None
    return _initial(loop, index)


def _step(body: Computation, index: int) -> int | None:
    """What one iteration adds to the carried element ``index``."""
    if body.root.opcode is not Opcode.TUPLE:
        return None
    update = body.root.operands[index]
    if update.opcode not in (Opcode.ADD, Opcode.SUBTRACT):
        return None
    lhs, rhs = update.operands
    if update.opcode is Opcode.ADD and _carried_index(rhs, body) == index:
        lhs, rhs = rhs, lhs
    if _carried_index(lhs, body) != index:
        return None
    step = _integer(rhs)
    return -step if step is not None and update.opcode is Opcode.SUBTRACT else step


def _count(start: int, limit: int, step: int, order: Comparison, element_type: ElementType) -> int | None:
    """Iterations until ``counter order limit`` fails; None when it would wrap around or never ends."""
    low = -(1 << (element_type.bits - 1)) if element_type.is_signed else 0
    greatest = low + (1 << element_type.bits) - 1
    if order in (Comparison.GT, Comparison.GE):  # count upwards on the mirrored number line
        start, limit, step, greatest = -start, -limit, -step, -low
        order = MIRRORED[order]
    if order is Comparison.LE:
        limit += 1
    elif order is Comparison.NE:
        if start == limit:
            return 0
        if step == 0 or (limit - start) % step or (limit - start) // step < 0:
            return None
        return (limit - start) // step
    elif order is Comparison.EQ:
        return None if start == limit else 0
    if start >= limit:
        return 0
    if step <= 0:
        return None
    count = -(-(limit - start) // step)
    return count if start + count * step <= greatest else None
