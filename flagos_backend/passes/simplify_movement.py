"""Rules of the pass simplify for data movement: fewer steps between an array and where its elements go."""

from __future__ import annotations

from itertools import pairwise

from flagos_backend.ir.attributes import (
    DimensionAttributes,
    DimensionsAttributes,
    DynamicSliceAttributes,
    PadAttributes,
    SliceAttributes,
)
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import Emitter, Rule, array_shape


def _dims(instruction: Instruction) -> tuple[int, ...]:
    return instruction.attributes_as(DimensionsAttributes).dimensions


def _increasing(dims: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(dims))


def _reshape(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    source = instruction.operands[0]
    if source.shape == instruction.shape:
        return source
    if source.opcode is Opcode.RESHAPE:
        return emitter.emit(Opcode.RESHAPE, instruction.shape, source.operands, like=instruction)
    if source.opcode is Opcode.BROADCAST and not _dims(source):
        return emitter.emit(
            Opcode.BROADCAST, instruction.shape, source.operands, DimensionsAttributes(()), like=instruction
        )
    return None


def _transpose(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    source, permutation = instruction.operands[0], _dims(instruction)
    if permutation == tuple(range(len(permutation))):
        return source
    sizes = array_shape(source).dims
    moved = [dimension for dimension in permutation if sizes[dimension] != 1]
    if moved == sorted(moved):  # only dimensions of size 1 change places
        return emitter.emit(Opcode.RESHAPE, instruction.shape, (source,), like=instruction)
    if source.opcode is Opcode.TRANSPOSE:
        inner = _dims(source)
        composed = DimensionsAttributes(tuple(inner[dimension] for dimension in permutation))
        return emitter.emit(Opcode.TRANSPOSE, instruction.shape, source.operands, composed, like=instruction)
    if source.opcode is Opcode.BROADCAST:
        place = {dimension: index for index, dimension in enumerate(permutation)}
        dims = tuple(place[dimension] for dimension in _dims(source))
        if _increasing(dims):
            attributes = DimensionsAttributes(dims)
            return emitter.emit(Opcode.BROADCAST, instruction.shape, source.operands, attributes, like=instruction)
    return _stack(instruction, emitter) if source.opcode is Opcode.CONCATENATE else None


def _stack(transpose: Instruction, emitter: Emitter) -> Instruction | None:
    """What is stacked along a dimension that then becomes the last one, as coordinates of points, is stacked there."""
    concatenate, permutation = transpose.operands[0], _dims(transpose)
    stacked = concatenate.attributes_as(DimensionAttributes).dimension
    parts = [array_shape(operand) for operand in concatenate.operands]
    if permutation[-1] != stacked or any(part.dims[stacked] != 1 for part in parts):
        return None
    moved = []
    for operand, part in zip(concatenate.operands, parts, strict=True):
        shape = ArrayShape(part.element_type, tuple(part.dims[dimension] for dimension in permutation))
        attributes = DimensionsAttributes(permutation)
        moved.append(emitter.emit(Opcode.TRANSPOSE, shape, (operand,), attributes, like=transpose))
    last = DimensionAttributes(len(permutation) - 1)
    return emitter.emit(Opcode.CONCATENATE, transpose.shape, moved, last, like=transpose)


def _broadcast(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    source, dims = instruction.operands[0], _dims(instruction)
    if _increasing(dims) and array_shape(source).num_elements == array_shape(instruction).num_elements:
        if source.shape == instruction.shape:
            return source
        return emitter.emit(Opcode.RESHAPE, instruction.shape, (source,), like=instruction)
    if source.opcode is Opcode.BROADCAST:
        composed = DimensionsAttributes(tuple(dims[dimension] for dimension in _dims(source)))
        return emitter.emit(Opcode.BROADCAST, instruction.shape, source.operands, composed, like=instruction)
    if (
        source.opcode is Opcode.RESHAPE
        and array_shape(source).num_elements == 1
        and not array_shape(source.operands[0]).dims
    ):
        attributes = DimensionsAttributes(())
        return emitter.emit(Opcode.BROADCAST, instruction.shape, source.operands, attributes, like=instruction)
    return None


def _concatenate(instruction: Instruction, _: Emitter) -> Instruction | None:
    return instruction.operands[0] if len(instruction.operands) == 1 else None


def _slice(instruction: Instruction, _: Emitter) -> Instruction | None:
    strides = instruction.attributes_as(SliceAttributes).strides
    whole = instruction.operands[0].shape == instruction.shape and all(stride == 1 for stride in strides)
    return instruction.operands[0] if whole else None


def _dynamic_slice(instruction: Instruction, _: Emitter) -> Instruction | None:
    """A slice of the full size can only start at 0: starts are clamped."""
    source = instruction.operands[0]
    return source if instruction.attributes_as(DynamicSliceAttributes).sizes == array_shape(source).dims else None


def _dynamic_update_slice(instruction: Instruction, _: Emitter) -> Instruction | None:
    target, update = instruction.operands[:2]
    if update.shape == target.shape:
        return update
    return target if not array_shape(update).num_elements else None


def _pad(instruction: Instruction, _: Emitter) -> Instruction | None:
    a = instruction.attributes_as(PadAttributes)
    return None if any(a.low) or any(a.high) or any(a.interior) else instruction.operands[0]


def _reverse(instruction: Instruction, _: Emitter) -> Instruction | None:
    sizes, source = array_shape(instruction).dims, instruction.operands[0]
    if not any(sizes[dimension] > 1 for dimension in _dims(instruction)):
        return source
    is_undone = source.opcode is Opcode.REVERSE and set(_dims(source)) == set(_dims(instruction))
    return source.operands[0] if is_undone else None


def _copy(instruction: Instruction, _: Emitter) -> Instruction | None:
    return instruction.operands[0]


RULES: dict[Opcode, Rule] = {
    Opcode.RESHAPE: _reshape,
    Opcode.TRANSPOSE: _transpose,
    Opcode.BROADCAST: _broadcast,
    Opcode.CONCATENATE: _concatenate,
    Opcode.SLICE: _slice,
    Opcode.DYNAMIC_SLICE: _dynamic_slice,
    Opcode.DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
    Opcode.PAD: _pad,
    Opcode.REVERSE: _reverse,
    Opcode.COPY: _copy,
}
