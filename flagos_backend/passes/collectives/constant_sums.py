"""An all-reduce of what is the same constant on every device needs no meeting: so begin gradients of sums over devices.

After constants are folded, before combine_collectives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flagos_backend.ir.attributes import CollectiveAttributes, ConstantAttributes
from flagos_backend.ir.constants import Array, constant_array
from flagos_backend.ir.hlo import Instruction, Module, parameter_number
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.participants import Position, participants_of
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import Emitter, apply_rule


def _times(array: Array, count: int) -> Array:
    """Rounded once; integers wrap as their sums do."""
    with np.errstate(over="ignore"):
        total: Array = np.multiply(array, np.asarray(count).astype(array.dtype), dtype=array.dtype)
    return total


_OF_EQUALS: dict[Opcode, Callable[[Array, int], Array]] = {
    Opcode.ADD: _times,
    Opcode.MINIMUM: lambda array, count: array,
    Opcode.MAXIMUM: lambda array, count: array,
}


def fold_constant_sums(module: Module) -> Module:
    """Of programs whose participants are their own replicas and partitions, all of which run this module."""
    positions = [
        Position(replica, partition, module.num_replicas, module.num_partitions)
        for replica in range(module.num_replicas)
        for partition in range(module.num_partitions)
    ]

    def rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
        if instruction.opcode is not Opcode.ALL_REDUCE or not isinstance(instruction.shape, ArrayShape):
            return None
        (operand,) = instruction.operands
        spread = operand if operand.opcode is Opcode.BROADCAST else None
        constant = spread.operands[0] if spread is not None else operand
        count = _members(instruction, positions)
        combiner = instruction.called[0].root
        is_plain = {parameter_number(operand) for operand in combiner.operands} == {0, 1}
        combine = _OF_EQUALS.get(combiner.opcode) if is_plain else None
        value = constant_array(constant)
        if value is None or combine is None or not count or value.dtype.kind not in "fiu" or value.dtype.itemsize < 4:
            return None
        data = ConstantAttributes(combine(value, count).tobytes())
        total = emitter.emit(Opcode.CONSTANT, constant.shape, (), data, like=instruction)
        if spread is None:
            return total
        return emitter.emit(Opcode.BROADCAST, spread.shape, (total,), spread.attributes, like=instruction)

    return apply_rule(module, rule)


def _members(instruction: Instruction, positions: list[Position]) -> int:
    """How many each group has; 0 where they differ, or a device is in none."""
    groups = instruction.attributes_as(CollectiveAttributes)
    sizes = {len(participants_of(instruction.opcode, groups, position)) for position in positions}
    return sizes.pop() if len(sizes) == 1 else 0
