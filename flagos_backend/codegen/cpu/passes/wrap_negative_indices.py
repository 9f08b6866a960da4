"""Gathers and scatters that raise negative indices by themselves, as frameworks let indices count from an array's end,
and that read each number of an index where it was made: no loop prepares them.

A pass of what emitter.py emits; gather.py and scatter.py write the bytecode.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from flagos_backend.codegen.cpu.lower.gather import gather_numbers
from flagos_backend.codegen.cpu.lower.scatter import scatter_numbers
from flagos_backend.codegen.cpu.lower.window_indices import Numbers, WrappedGather, WrappedScatter
from flagos_backend.ir.attributes import (
    CompareAttributes,
    ConstantAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    GatherAttributes,
    ScatterAttributes,
)
from flagos_backend.ir.elementwise import element_type
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.indexing import dims_of
from flagos_backend.passes.rewrite import Emitter, apply_rule


def with_wrapped_indices(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    attributes = instruction.attributes
    if isinstance(attributes, WrappedGather | WrappedScatter):
        return None
    if isinstance(attributes, GatherAttributes):
        array, indices = instruction.operands
        arrays, numbers = _numbers(indices, attributes.index_vector_dim, len(attributes.start_index_map))
        gather = WrappedGather(**_fields(attributes), numbers=numbers)
        wrapped = replace(instruction, operands=(array, *arrays), attributes=gather)
        supported = gather_numbers(wrapped)
    elif isinstance(attributes, ScatterAttributes) and len(instruction.operands) == 3:
        array, indices, updates = instruction.operands
        count = len(attributes.scatter_dims_to_operand_dims)
        arrays, numbers = _numbers(indices, attributes.index_vector_dim, count)
        scatter = WrappedScatter(**_fields(attributes), numbers=numbers)
        wrapped = replace(instruction, operands=(array, *arrays, updates), attributes=scatter)
        supported = scatter_numbers(wrapped)
    else:
        return None
    gains = any(numbers.wraps) or len(arrays) > 1
    return emitter.put(wrapped) if supported is not None and gains else None


def _fields(attributes: GatherAttributes | ScatterAttributes) -> dict[str, Any]:
    return {field.name: getattr(attributes, field.name) for field in fields(attributes)}


def _numbers(indices: Instruction, vector_dim: int, count: int) -> tuple[tuple[Instruction, ...], Numbers]:
    """The arrays of ``count`` numbers for each index, and what is to be done with them."""
    parts: tuple[Instruction, ...] = (indices,)
    if indices.opcode is Opcode.CONCATENATE and len(indices.operands) == count > 1:
        along = indices.attributes_as(DimensionAttributes).dimension
        if along == vector_dim and all(dims_of(part)[along] == 1 for part in indices.operands):
            parts = indices.operands
    found = [_unwrapped(part) for part in parts]
    wraps = tuple(wrap for _, wrap in found) * (count if len(parts) == 1 else 1)
    return tuple(array for array, _ in found), Numbers(dims_of(parts[0]), wraps)


def _unwrapped(index: Instruction) -> tuple[Instruction, int]:
    """An array of the same numbers in the same order, and what its negative ones are raised by."""
    wrapped = _in_order(index)
    if wrapped.opcode is Opcode.SELECT:
        is_negative, raised, number = wrapped.operands
        if _is_negative(is_negative, number) and raised.opcode is Opcode.ADD and number in raised.operands:
            wrap = _splat(next((o for o in raised.operands if o is not number), number))
            if wrap is not None and wrap >= 0:
                return _in_order(number), wrap
    return index, 0


def _in_order(value: Instruction) -> Instruction:
    """What ``value`` is but for its dimensions."""
    while value.opcode is Opcode.RESHAPE or (
        value.opcode is Opcode.BROADCAST
        and _elements(value) == _elements(value.operands[0])
        and list(dims := value.attributes_as(DimensionsAttributes).dimensions) == sorted(dims)
    ):
        value = value.operands[0]
    return value


def _is_negative(test: Instruction, number: Instruction) -> bool:
    if test.opcode is not Opcode.COMPARE or test.operands[0] is not number:
        return False
    type_ = element_type(number)
    is_less = test.attributes_as(CompareAttributes).direction is Comparison.LT
    return is_less and type_ is not None and type_.is_signed and _splat(test.operands[1]) == 0


def _splat(value: Instruction) -> int | None:
    """The number that every element of an array of integers is."""
    while value.opcode in (Opcode.BROADCAST, Opcode.RESHAPE):
        value = value.operands[0]
    type_ = element_type(value)
    if value.opcode is not Opcode.CONSTANT or _elements(value) != 1 or type_ is None or not type_.is_integer:
        return None
    return int.from_bytes(value.attributes_as(ConstantAttributes).data, "little", signed=type_.is_signed)


def _elements(value: Instruction) -> int:
    return value.shape.num_elements if isinstance(value.shape, ArrayShape) else 0
