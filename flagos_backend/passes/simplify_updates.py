"""Rules of the pass simplify for updates that a condition decides about: only what they would write is chosen."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from flagos_backend.ir.attributes import (
    ConstantAttributes,
    DimensionsAttributes,
    DynamicSliceAttributes,
    ScatterAttributes,
    TupleIndexAttributes,
)
from flagos_backend.ir.elementwise import is_complex_elementwise, is_elementwise
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import Emitter, Rule, array_shape, with_operands

# Updates that one choice decides about: each choice writes them again.
MAX_UPDATES = 16
# How many instructions of a window are looked through for what it reads, and which, beside what works on elements: they
# are made once more, so they have no effects, and are work of generated kernels.
_MAX_STEPS = 64
_LOOKED_THROUGH = frozenset(
    {
        *(Opcode.BROADCAST, Opcode.CONCATENATE, Opcode.DYNAMIC_SLICE, Opcode.GATHER, Opcode.PAD, Opcode.REDUCE),
        *(Opcode.RESHAPE, Opcode.REVERSE, Opcode.SLICE, Opcode.TRANSPOSE),
    }
)


def is_decidable(update: Instruction) -> bool:
    """Whether ``update`` writes part of its first operand, and can be told to leave all as it is."""
    if update.opcode is Opcode.DYNAMIC_UPDATE_SLICE:
        return True
    if update.opcode is not Opcode.SCATTER or not isinstance(update.shape, ArrayShape):
        return False
    chooses = update.attributes_as(ScatterAttributes).scatter_dims_to_operand_dims
    return bool(chooses) and array_shape(update.operands[1]).element_type.is_signed


def _select(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    """Of an array with some updates and with others: all of them, of what they write or of what is there.

    Arrays that a loop carries are then written where they are, and never read as a whole.
    """
    condition, *values = instruction.operands
    if condition.opcode is Opcode.BROADCAST:
        condition = condition.operands[0]
    if array_shape(condition).dims:
        return None
    found = _updates(*values)
    if found is None or not 0 < sum(map(len, found)) <= MAX_UPDATES:
        return None
    array = (found[0] or found[1])[0].operands[0]
    for taken, updates in enumerate(found):
        rewritten: dict[int, Instruction] = {}
        for update in updates:
            operands = [_on_rewritten(operand, rewritten, emitter) for operand in update.operands[1:]]
            array = _decided(update, array, operands, condition, taken, emitter)
            rewritten[id(update)] = array
    return array


def _updates(a: Instruction, b: Instruction) -> tuple[list[Instruction], list[Instruction]] | None:
    """The updates, in order, after the last value that both are made from; None if there is none near."""
    chains: tuple[list[Instruction], list[Instruction]] = ([a], [b])
    seen: tuple[dict[object, int], dict[object, int]] = ({_identity(a): 0}, {_identity(b): 0})
    while True:
        ends = [chain[-1] for chain in chains]
        for mine, end in enumerate(ends):
            place = seen[1 - mine].get(_identity(end))
            if place is not None:
                lengths = [place, place]
                lengths[mine] = len(chains[mine]) - 1
                return chains[0][: lengths[0]][::-1], chains[1][: lengths[1]][::-1]
        if not any(map(is_decidable, ends)) or max(map(len, chains)) > MAX_UPDATES:
            return None
        for chain, places, end in zip(chains, seen, ends, strict=True):
            if is_decidable(end):
                places[_identity(end.operands[0])] = len(chain)
                chain.append(end.operands[0])


def _identity(value: Instruction) -> object:
    """The same of two instructions that take one element of one tuple."""
    if value.opcode is Opcode.GET_TUPLE_ELEMENT:
        return id(value.operands[0]), value.attributes_as(TupleIndexAttributes).index
    return id(value)


def _on_rewritten(value: Instruction, rewritten: dict[int, Instruction], emitter: Emitter) -> Instruction:
    """``value`` made of the updates as they were rewritten, which are what they were where they are taken, and of which
    nobody needs two. Only where it is made of them in a few steps."""
    if not rewritten:
        return value
    order: list[Instruction] = []
    waiting, met = [value], {id(value)}
    while waiting and len(order) < _MAX_STEPS:
        order.append(waiting.pop(0))
        if id(order[-1]) not in rewritten and _is_looked_through(order[-1]):
            waiting += [o for o in order[-1].operands if id(o) not in met]
            met |= {id(operand) for operand in order[-1].operands}
    made = dict(rewritten)
    for instruction in reversed(order):
        operands = [made.get(id(operand), operand) for operand in instruction.operands]
        changes = any(map(operator.is_not, operands, instruction.operands))
        if changes and id(instruction) not in made and _is_looked_through(instruction):
            made[id(instruction)] = emitter.put(with_operands(instruction, tuple(operands), instruction.called))
    return made.get(id(value), value)


def _is_looked_through(instruction: Instruction) -> bool:
    plain = is_elementwise(instruction) or is_complex_elementwise(instruction)
    return plain or instruction.opcode in _LOOKED_THROUGH


def _decided(
    update: Instruction,
    array: Instruction,
    operands: Sequence[Instruction],
    condition: Instruction,
    taken: int,
    emitter: Emitter,
) -> Instruction:
    """``update`` of ``array`` by ``operands``, which changes nothing where ``condition`` has the other value than
    ``taken``."""

    def choice(values: Sequence[Instruction]) -> Instruction:
        return emitter.emit(Opcode.SELECT, values[0].shape, [condition, *values], like=update)

    if update.opcode is Opcode.DYNAMIC_UPDATE_SLICE:
        window, *starts = operands
        sizes = DynamicSliceAttributes(array_shape(window).dims)
        before = emitter.emit(Opcode.DYNAMIC_SLICE, window.shape, [array, *starts], sizes, like=update)
        changed = [array, choice((before, window) if taken else (window, before)), *starts]
    else:
        indices, updates = operands
        nowhere = _nowhere(indices, emitter, update)
        changed = [array, choice((nowhere, indices) if taken else (indices, nowhere)), updates]
    return emitter.emit(update.opcode, update.shape, changed, update.attributes, update.called, like=update)


def _nowhere(indices: Instruction, emitter: Emitter, like: Instruction) -> Instruction:
    """Indices of windows that lie outside, which are not written."""
    shape = array_shape(indices)
    data = ConstantAttributes(b"\xff" * shape.element_type.bytes)
    minus_one = emitter.emit(Opcode.CONSTANT, ArrayShape(shape.element_type), (), data, like=like)
    return emitter.emit(Opcode.BROADCAST, shape, [minus_one], DimensionsAttributes(()), like=like)


RULES: dict[Opcode, Rule] = {Opcode.SELECT: _select}
