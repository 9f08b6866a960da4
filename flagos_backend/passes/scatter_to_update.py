"""A scatter of one window becomes an update of that part of the array.

It is what adding to the inside of an array leaves, as stencils do, and writing rows in a loop: the combination fuses
with what makes the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from flagos_backend.ir.attributes import (
    NONE,
    Attributes,
    CompareAttributes,
    ConstantAttributes,
    DimensionAttributes,
    DynamicSliceAttributes,
    ScatterAttributes,
    SliceAttributes,
)
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape
from flagos_backend.passes.simplify_indices import combined

_PRED = ArrayShape(ElementType.PRED)


def scatter_to_dynamic_update_slice(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.SCATTER or not isinstance(instruction.shape, ArrayShape):
        return None
    target, indices, updates = instruction.operands
    attributes = instruction.attributes_as(ScatterAttributes)
    chosen = attributes.scatter_dims_to_operand_dims
    # One start for each of the dimensions that the indices choose in, and nothing else: a single window.
    if array_shape(indices).num_elements != len(chosen) or attributes.input_batching_dims:
        return None
    dims = instruction.shape.dims
    sizes = iter([array_shape(updates).dims[d] for d in attributes.update_window_dims])
    window = tuple(1 if d in attributes.inserted_window_dims else next(sizes) for d in range(len(dims)))
    if prod(window) != array_shape(updates).num_elements:
        return None
    room = [size - part for size, part in zip(dims, window, strict=True)]
    shape = ArrayShape(instruction.shape.element_type, window)
    update = emitter.emit(Opcode.RESHAPE, shape, [updates], like=instruction)
    known = _numbers(indices)
    if known is None:
        return _at_unknown(instruction, update, room, emitter)
    starts = [0] * len(dims)
    for d, start in zip(chosen, known, strict=True):
        starts[d] = start
    if any(not 0 <= start <= last for start, last in zip(starts, room, strict=True)):
        return target  # a window that lies outside in part is not written
    if max(starts, default=0) > np.iinfo(np.int32).max:
        return None
    ends = tuple(start + size for start, size in zip(starts, window, strict=True))
    place = SliceAttributes(tuple(starts), ends, (1,) * len(dims))
    before = emitter.emit(Opcode.SLICE, shape, [target], place, like=instruction)
    after = combined(instruction.called[0], before, update, emitter, instruction)
    if after is None:
        return None
    scalars = [_scalar(start, ElementType.S32, emitter, instruction) for start in starts]
    return emitter.emit(Opcode.DYNAMIC_UPDATE_SLICE, instruction.shape, [target, after, *scalars], like=instruction)


def _at_unknown(scatter: Instruction, update: Instruction, room: Sequence[int], emitter: Emitter) -> Instruction | None:
    """What is there is written again where the window would lie outside."""
    target, indices, _ = scatter.operands
    if min(room, default=0) < 0:
        return target
    element_type = array_shape(indices).element_type
    starts = [_scalar(0, element_type, emitter, scatter)] * len(room)
    inside: Instruction | None = None

    def emit(
        opcode: Opcode, shape: ArrayShape, operands: Sequence[Instruction], attributes: Attributes = NONE
    ) -> Instruction:
        return emitter.emit(opcode, shape, operands, attributes, like=scatter)

    chosen = scatter.attributes_as(ScatterAttributes).scatter_dims_to_operand_dims
    row = emit(Opcode.RESHAPE, ArrayShape(element_type, (len(chosen),)), [indices])
    for number, d in enumerate(chosen):
        one = SliceAttributes((number,), (number + 1,), (1,))
        part = emit(Opcode.SLICE, ArrayShape(element_type, (1,)), [row], one)
        starts[d] = emit(Opcode.RESHAPE, ArrayShape(element_type), [part])
        bounds = [(Comparison.GE, 0)] if element_type.is_signed else []
        if room[d] < 1 << (element_type.bits - element_type.is_signed):  # others are larger than all its numbers
            bounds.append((Comparison.LE, room[d]))
        for direction, bound in bounds:
            limit = _scalar(bound, element_type, emitter, scatter)
            holds = emit(Opcode.COMPARE, _PRED, [starts[d], limit], CompareAttributes(direction))
            inside = holds if inside is None else emit(Opcode.AND, _PRED, [inside, holds])
    sizes = DynamicSliceAttributes(array_shape(update).dims)
    before = emit(Opcode.DYNAMIC_SLICE, array_shape(update), [target, *starts], sizes)
    after = combined(scatter.called[0], before, update, emitter, scatter)
    if after is None:
        return None
    if inside is not None:
        after = emit(Opcode.SELECT, array_shape(update), [inside, after, before])
    return emit(Opcode.DYNAMIC_UPDATE_SLICE, array_shape(scatter), [target, after, *starts])


def _scalar(value: int, element_type: ElementType, emitter: Emitter, like: Instruction) -> Instruction:
    data = ConstantAttributes(value.to_bytes(element_type.bytes, "little"))
    return emitter.emit(Opcode.CONSTANT, ArrayShape(element_type), (), data, like=like)


def _numbers(value: Instruction) -> list[int] | None:
    """The few integers that ``value`` is; None if they are not known."""
    shape = array_shape(value)
    array = constant_array(value)
    if array is not None:
        return [int(number) for number in array.reshape(-1)] if shape.element_type.is_integer else None
    if value.opcode is Opcode.RESHAPE:
        return _numbers(value.operands[0])
    if value.opcode is Opcode.BROADCAST and prod(array_shape(value.operands[0]).dims) == 1:
        one = _numbers(value.operands[0])
        return one and one * shape.num_elements
    if (
        value.opcode is Opcode.CONCATENATE
        and shape.num_elements == shape.dims[value.attributes_as(DimensionAttributes).dimension]
    ):
        parts = [_numbers(part) for part in value.operands]
        return None if None in parts else [number for part in parts for number in part or ()]
    return None
