"""What collectives split or join along another dimension than the first, they do along a new first one: what a device
sends and receives then lies in one piece, and the movement around is fused with what it is made from and read by.

Between create_reduce_scatters and combine_collectives, for devices whose transport takes arrays as they lie.
"""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.ir.attributes import CollectiveAttributes, DimensionsAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import Emitter, Substitution, rewrite_computations, with_callees

_MOVED = frozenset({Opcode.ALL_GATHER, Opcode.ALL_TO_ALL, Opcode.REDUCE_SCATTER})


def make_split_dimension_major(module: Module) -> Module:
    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        if not any(map(_is_inside, computation.instructions)):
            return with_callees(computation, replaced)
        substitution, emitter = Substitution(replaced), Emitter()
        for original in computation.instructions:
            made = substitution.apply(original)
            value = _moved(made, module, emitter) if _is_inside(original) else emitter.put(made)
            substitution.record(original, value)
        return Computation(computation.name, tuple(emitter.instructions), substitution.value(computation.root))

    return rewrite_computations(module, transform)


def _is_inside(instruction: Instruction) -> bool:
    """Whether it is a collective of one array along an inner dimension."""
    if instruction.opcode not in _MOVED or not isinstance(instruction.shape, ArrayShape):
        return False
    return bool(instruction.attributes_as(CollectiveAttributes).dimension) and instruction.shape.num_elements > 0


def _moved(collective: Instruction, module: Module, emitter: Emitter) -> Instruction:
    """The same along a first dimension that has one part for each device."""
    attributes = collective.attributes_as(CollectiveAttributes)
    dimension, (operand,) = attributes.dimension, collective.operands
    assert dimension is not None and isinstance(collective.shape, ArrayShape) and isinstance(operand.shape, ArrayShape)
    element_type, given, made = collective.shape.element_type, operand.shape.dims, collective.shape.dims
    size = _parts(collective, module)

    def shaped(value: Instruction, dims: tuple[int, ...]) -> Instruction:
        return emitter.emit(Opcode.RESHAPE, ArrayShape(element_type, dims), (value,), like=collective)

    def transposed(value: Instruction, dims: tuple[int, ...], order: tuple[int, ...]) -> Instruction:
        shape = ArrayShape(element_type, tuple(dims[d] for d in order))
        return emitter.emit(Opcode.TRANSPOSE, shape, (value,), DimensionsAttributes(order), like=collective)

    if collective.opcode is Opcode.ALL_GATHER:
        parts = shaped(operand, (1, *given))
        arrived: tuple[int, ...] = (size, *given)
    else:
        inner = (*given[:dimension], size, given[dimension] // size, *given[dimension + 1 :])
        to_front = (dimension, *(d for d in range(len(inner)) if d != dimension))
        parts = transposed(shaped(operand, inner), inner, to_front)
        rest = tuple(inner[d] for d in to_front[1:])
        arrived = (1 if collective.opcode is Opcode.REDUCE_SCATTER else size, *rest)
    moved = emitter.put(
        replace(
            collective,
            shape=ArrayShape(element_type, arrived),
            operands=(parts,),
            attributes=replace(attributes, dimension=0),
        )
    )
    if collective.opcode is Opcode.REDUCE_SCATTER:
        return shaped(moved, made)
    back = (*range(1, dimension + 1), 0, *range(dimension + 1, len(arrived)))
    return shaped(transposed(moved, arrived, back), made)


def _parts(collective: Instruction, module: Module) -> int:
    """How many participants a group has."""
    attributes = collective.attributes_as(CollectiveAttributes)
    dimension = attributes.dimension
    if collective.opcode is Opcode.ALL_TO_ALL:
        if attributes.replica_groups:
            return len(attributes.replica_groups[0])
        return module.num_replicas if attributes.channel_id is None else module.num_partitions
    (operand,) = collective.operands
    assert dimension is not None and isinstance(collective.shape, ArrayShape) and isinstance(operand.shape, ArrayShape)
    sizes = operand.shape.dims[dimension], collective.shape.dims[dimension]
    return max(sizes) // min(sizes)
