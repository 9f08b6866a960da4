"""Rules of the pass simplify for updates that a condition decides about: only what they would write is chosen."""

from __future__ import annotations

from collections.abc import Sequence

from flagos_backend.ir.attributes import (
    ConstantAttributes,
    DimensionsAttributes,
    DynamicSliceAttributes,
    ScatterAttributes,
)
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import Emitter, Rule, array_shape


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
    if found is None or not any(found):
        return None
    first = (found[0] or found[1])[0]
    array = first.operands[0]
    for taken, updates in enumerate(found):
        for update in updates:
            array = _decided(update, array, condition, taken, emitter)
    return array


def _updates(a: Instruction, b: Instruction) -> tuple[list[Instruction], list[Instruction]] | None:
    """The updates, in order, after the last value that both are made from; None if there is none."""
    chains: tuple[list[Instruction], list[Instruction]] = ([a], [b])
    seen: tuple[dict[int, int], dict[int, int]] = ({id(a): 0}, {id(b): 0})
    while True:
        ends = [chain[-1] for chain in chains]
        for mine, end in enumerate(ends):
            place = seen[1 - mine].get(id(end))
            if place is not None:
                lengths = [place, place]
                lengths[mine] = len(chains[mine]) - 1
                return chains[0][: lengths[0]][::-1], chains[1][: lengths[1]][::-1]
        if not any(map(is_decidable, ends)):
            return None
        for chain, places, end in zip(chains, seen, ends, strict=True):
            if is_decidable(end):
                places[id(end.operands[0])] = len(chain)
                chain.append(end.operands[0])


def _decided(
    update: Instruction, array: Instruction, condition: Instruction, taken: int, emitter: Emitter
) -> Instruction:
    """``update`` of ``array``, which changes nothing where ``condition`` has the other value than ``taken``."""

    def choice(values: Sequence[Instruction]) -> Instruction:
        return emitter.emit(Opcode.SELECT, values[0].shape, [condition, *values], like=update)

    if update.opcode is Opcode.DYNAMIC_UPDATE_SLICE:
        _, window, *starts = update.operands
        sizes = DynamicSliceAttributes(array_shape(window).dims)
        before = emitter.emit(Opcode.DYNAMIC_SLICE, window.shape, [array, *starts], sizes, like=update)
        operands = [array, choice((before, window) if taken else (window, before)), *starts]
    else:
        _, indices, updates = update.operands
        nowhere = _nowhere(indices, emitter, update)
        operands = [array, choice((nowhere, indices) if taken else (indices, nowhere)), updates]
    return emitter.emit(update.opcode, update.shape, operands, update.attributes, update.called, like=update)


def _nowhere(indices: Instruction, emitter: Emitter, like: Instruction) -> Instruction:
    """Indices of windows that lie outside, which are not written."""
    shape = array_shape(indices)
    data = ConstantAttributes(b"\xff" * shape.element_type.bytes)
    minus_one = emitter.emit(Opcode.CONSTANT, ArrayShape(shape.element_type), (), data, like=like)
    return emitter.emit(Opcode.BROADCAST, shape, [minus_one], DimensionsAttributes(()), like=like)


RULES: dict[Opcode, Rule] = {Opcode.SELECT: _select}
