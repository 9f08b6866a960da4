"""An all-reduce of which each device takes its part alone becomes a reduce-scatter, which moves half as much. So the
partitioner writes gradients of weights that are spread over devices: a dynamic-slice begins where a table says.

Before combine_collectives.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import replace

from flagos_backend.ir.attributes import CollectiveAttributes, ConstantAttributes, DynamicSliceAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Substitution, rewrite_computations, with_callees

_TABLES = {ElementType.S32: "i", ElementType.U32: "I", ElementType.S64: "q", ElementType.U64: "Q"}
# What moves a number from the table to where it is a start.
_MOVES = frozenset({Opcode.RESHAPE, Opcode.COPY, Opcode.CONVERT})


def create_reduce_scatters(module: Module) -> Module:
    """Of programs whose participants are partitions."""
    if module.num_replicas != 1 or module.num_partitions == 1:
        return module

    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        parts = _parts(computation, module.num_partitions)
        if not parts:
            return with_callees(computation, replaced)
        sums = {part.operands[0] for part in parts}
        substitution = Substitution(replaced)
        instructions = []
        for original in computation.instructions:
            if original in sums:
                continue
            made = original
            if original in parts:
                total = original.operands[0]
                attributes = replace(total.attributes_as(CollectiveAttributes), dimension=parts[original])
                made = replace(total, opcode=Opcode.REDUCE_SCATTER, shape=original.shape, attributes=attributes)
            instructions.append(substitution.apply(made))
            substitution.record(original, instructions[-1])
        return Computation(computation.name, tuple(instructions), substitution.value(computation.root))

    return rewrite_computations(module, transform)


def _parts(computation: Computation, partitions: int) -> dict[Instruction, int]:
    """The slices that are each device's own part of a sum that nobody else reads, with the dimension of the parts."""
    uses = Counter(operand for instruction in computation.instructions for operand in instruction.operands)
    uses[computation.root] += 1
    found = {}
    for instruction in computation.instructions:
        if instruction.opcode is Opcode.DYNAMIC_SLICE and uses[instruction.operands[0]] == 1:
            dimension = _own_part(instruction, partitions)
            if dimension is not None:
                found[instruction] = dimension
    return found


def _own_part(part: Instruction, partitions: int) -> int | None:
    """The dimension along which the slice of a sum has a part for each device of a group, in their order."""
    total, *starts = part.operands
    if total.opcode is not Opcode.ALL_REDUCE or not isinstance(total.shape, ArrayShape):
        return None
    attributes = total.attributes_as(CollectiveAttributes)
    if attributes.channel_id is None or not attributes.use_global_device_ids:
        return None
    groups = attributes.replica_groups or (tuple(range(partitions)),)
    sizes = part.attributes_as(DynamicSliceAttributes).sizes
    divided = [d for d, (size, whole) in enumerate(zip(sizes, total.shape.dims, strict=True)) if size != whole]
    if len(divided) != 1 or {len(group) for group in groups} != {total.shape.dims[divided[0]] // sizes[divided[0]]}:
        return None
    (dimension,) = divided
    table = _table(starts[dimension], partitions)
    if table is None or total.shape.dims[dimension] % sizes[dimension]:
        return None
    own = {member: rank * sizes[dimension] for group in groups for rank, member in enumerate(group)}
    return dimension if all(table[member] == start for member, start in own.items()) else None


def _table(start: Instruction, partitions: int) -> tuple[int, ...] | None:
    """The start of each partition, where a constant says it."""
    while start.opcode in _MOVES:
        (start,) = start.operands
    if start.opcode is not Opcode.DYNAMIC_SLICE or start.operands[0].opcode is not Opcode.CONSTANT:
        return None
    table, *place = start.operands
    if len(place) != 1 or not isinstance(table.shape, ArrayShape) or table.shape.dims != (partitions,):
        return None
    number = place[0]
    while number.opcode in _MOVES:
        (number,) = number.operands
    letter = _TABLES.get(table.shape.element_type)
    if number.opcode is not Opcode.PARTITION_ID or letter is None:
        return None
    return struct.unpack(f"<{partitions}{letter}", table.attributes_as(ConstantAttributes).data)
