"""Collectives in whose groups every device is alone give what they are given: so programs that are written for many
devices run on one as if they had none, and are fused and recorded whole.

First of all passes, for programs whose participants are their own replicas and partitions.
"""

from __future__ import annotations

import struct

from flagos_backend.ir.attributes import CollectiveAttributes, CollectivePermuteAttributes, ConstantAttributes
from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.participants import Position, group_mode, participants_of
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import Emitter, apply_rule

_GROUPED = COLLECTIVES - {Opcode.COLLECTIVE_PERMUTE, Opcode.RAGGED_ALL_TO_ALL}


def eliminate_trivial_collectives(module: Module) -> Module:
    """And the number of the only replica, or partition, is zero."""
    positions = [
        Position(replica, partition, module.num_replicas, module.num_partitions)
        for replica in range(module.num_replicas)
        for partition in range(module.num_partitions)
    ]
    numbers = {Opcode.REPLICA_ID: module.num_replicas, Opcode.PARTITION_ID: module.num_partitions}

    def rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
        if numbers.get(instruction.opcode) == 1:
            zero = ConstantAttributes(struct.pack("<I", 0))
            return emitter.emit(Opcode.CONSTANT, instruction.shape, (), zero, like=instruction)
        if not _is_alone(instruction, positions):
            return None
        if isinstance(instruction.shape, ArrayShape):
            return instruction.operands[0]
        return emitter.emit(Opcode.TUPLE, instruction.shape, instruction.operands, like=instruction)

    return apply_rule(module, rule)


def _is_alone(instruction: Instruction, positions: list[Position]) -> bool:
    if instruction.opcode is Opcode.COLLECTIVE_PERMUTE:
        attributes = instruction.attributes_as(CollectivePermuteAttributes)
        mode = group_mode(instruction.opcode, attributes.channel_id, use_global_device_ids=False)
        everybody = tuple((number, number) for number in positions[0].all_numbers(mode))
        return tuple(sorted(attributes.source_target_pairs)) == everybody
    if instruction.opcode not in _GROUPED:
        return False
    groups = instruction.attributes_as(CollectiveAttributes)
    if any(len(group) > 1 for group in groups.replica_groups):
        return False
    return all(participants_of(instruction.opcode, groups, place) == (place.flattened,) for place in positions)
