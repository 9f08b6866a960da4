"""A scatter of one window at a place that is known becomes an update of that part of the array.

It is what adding to the inside of an array leaves, as stencils do: the sum fuses with what makes the window.
"""

from __future__ import annotations

from math import prod

import numpy as np

from flagos_backend.ir.attributes import ConstantAttributes, DimensionAttributes, ScatterAttributes, SliceAttributes
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape
from flagos_backend.passes.simplify_indices import combined


def place_windows(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.SCATTER or not isinstance(instruction.shape, ArrayShape):
        return None
    target, indices, updates = instruction.operands
    attributes = instruction.attributes_as(ScatterAttributes)
    # One start for each of the dimensions that the indices choose in, and nothing else: a single window.
    known = (
        _numbers(indices) if array_shape(indices).num_elements == len(attributes.scatter_dims_to_operand_dims) else None
    )
    if known is None or attributes.input_batching_dims:
        return None
    dims = instruction.shape.dims
    sizes = iter([array_shape(updates).dims[d] for d in attributes.update_window_dims])
    window = tuple(1 if d in attributes.inserted_window_dims else next(sizes) for d in range(len(dims)))
    if prod(window) != array_shape(updates).num_elements:
        return None
    starts = [0] * len(dims)
    for d, start in zip(attributes.scatter_dims_to_operand_dims, known, strict=True):
        starts[d] = start
    ends = tuple(start + size for start, size in zip(starts, window, strict=True))
    if min(starts, default=0) < 0 or any(end > size for end, size in zip(ends, dims, strict=True)):
        return target  # a window that lies outside in part is not written
    if max(starts, default=0) > np.iinfo(np.int32).max:
        return None
    shape = ArrayShape(instruction.shape.element_type, window)
    update = emitter.emit(Opcode.RESHAPE, shape, [updates], like=instruction)
    place = SliceAttributes(tuple(starts), ends, (1,) * len(dims))
    before = emitter.emit(Opcode.SLICE, shape, [target], place, like=instruction)
    after = combined(instruction.called[0], before, update, emitter, instruction)
    if after is None:
        return None
    scalars = [_scalar(start, emitter, instruction) for start in starts]
    return emitter.emit(Opcode.DYNAMIC_UPDATE_SLICE, instruction.shape, [target, after, *scalars], like=instruction)


def _scalar(value: int, emitter: Emitter, like: Instruction) -> Instruction:
    data = ConstantAttributes(np.array(value, "<i4").tobytes())
    return emitter.emit(Opcode.CONSTANT, ArrayShape(ElementType.S32, ()), (), data, like=like)


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
