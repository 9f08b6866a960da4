"""Names for the dimensions of values: what a dimension means, followed through the instructions that only move data.

A label is a number that stands for one axis of an attention; a dimension of size 1 has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flagos_backend.ir.attributes import ConstantAttributes, DimensionsAttributes, DotAttributes
from flagos_backend.ir.constants import NUMPY_TYPES, constant_array, scalar_bytes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

Labels = tuple[int | None, ...]


def dims_of(instruction: Instruction) -> tuple[int, ...]:
    return instruction.shape.dims if isinstance(instruction.shape, ArrayShape) else ()


def element_type_of(instruction: Instruction) -> ElementType:
    return instruction.shape.element_type if isinstance(instruction.shape, ArrayShape) else ElementType.TOKEN


def relabel(dims: Sequence[int], labels: Sequence[int | None]) -> Labels:
    """Labels with None where the size is 1."""
    return tuple(None if size == 1 else label for size, label in zip(dims, labels, strict=True))


def reshaped(old: Sequence[int], labels: Labels, new: Sequence[int]) -> Labels | None:
    """Labels of an array of sizes ``old`` seen as ``new``; None when more than dimensions of size 1 come or go."""
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        return None
    rest = iter([label for label in labels if label is not None])
    return tuple(None if size == 1 else next(rest) for size in new)


def moved(instruction: Instruction, labels: Labels) -> Labels | None:
    """Labels of a reshape's, transpose's or convert's result, from those of its operand."""
    if instruction.opcode is Opcode.RESHAPE:
        return reshaped(dims_of(instruction.operands[0]), labels, dims_of(instruction))
    if instruction.opcode is Opcode.TRANSPOSE:
        return tuple(labels[d] for d in instruction.attributes_as(DimensionsAttributes).dimensions)
    return labels


def peel(
    instruction: Instruction, labels: Labels, *, exact: bool, broadcasts: bool = False
) -> tuple[Instruction, Labels]:
    """The value that ``instruction`` is another arrangement of, and its labels, given those of ``instruction``.

    ``exact``: only through conversions that keep every value. ``broadcasts``: also to what was repeated.
    """
    while instruction.operands:
        operand = instruction.operands[0]
        opcode = instruction.opcode
        if opcode is Opcode.CONVERT and _keeps_values(operand, instruction, exact=exact):
            pass
        elif opcode is Opcode.RESHAPE:
            found = reshaped(dims_of(instruction), labels, dims_of(operand))
            if found is None:
                break
            labels = found
        elif opcode is Opcode.TRANSPOSE:
            instruction, labels = untransposed(instruction, labels)
            continue
        elif opcode is Opcode.BROADCAST and broadcasts:
            dimensions = instruction.attributes_as(DimensionsAttributes).dimensions
            labels = relabel(dims_of(operand), [labels[d] for d in dimensions])
        elif opcode is not Opcode.COPY:
            break
        instruction = operand
    return instruction, labels


def untransposed(instruction: Instruction, labels: Labels) -> tuple[Instruction, Labels]:
    """As peel, through transpositions alone."""
    while instruction.opcode is Opcode.TRANSPOSE:
        before: list[int | None] = [None] * len(labels)
        for position, dimension in enumerate(instruction.attributes_as(DimensionsAttributes).dimensions):
            before[dimension] = labels[position]
        instruction, labels = instruction.operands[0], tuple(before)
    return instruction, labels


SIGNIFICAND = {ElementType.BF16: 8, ElementType.F16: 11, ElementType.F32: 24, ElementType.F64: 53}
_EXPONENT = {ElementType.BF16: 8, ElementType.F16: 5, ElementType.F32: 8, ElementType.F64: 11}


def _keeps_values(operand: Instruction, result: Instruction, *, exact: bool) -> bool:
    old, new = element_type_of(operand), element_type_of(result)
    if old not in SIGNIFICAND or new not in SIGNIFICAND:
        return False
    return not exact or (SIGNIFICAND[old] <= SIGNIFICAND[new] and _EXPONENT[old] <= _EXPONENT[new])


def same_value(a: Instruction, a_labels: Labels, b: Instruction, b_labels: Labels) -> bool:
    """Whether two labelled values are rearrangements of one array."""
    a, a_labels = peel(a, a_labels, exact=True)
    b, b_labels = peel(b, b_labels, exact=True)
    return a is b and a_labels == b_labels


def scalar_of(instruction: Instruction) -> float | None:
    """The number that every element of ``instruction`` is, when it is written in the program."""
    if instruction.opcode in (Opcode.BROADCAST, Opcode.RESHAPE, Opcode.COPY):
        return scalar_of(instruction.operands[0])
    if instruction.opcode is Opcode.CONVERT:
        value = scalar_of(instruction.operands[0])
        return None if value is None else _rounded(value, element_type_of(instruction))
    if instruction.opcode is not Opcode.CONSTANT:
        return None
    data, element = instruction.attributes_as(ConstantAttributes).data, element_type_of(instruction)
    if element is ElementType.BF16:
        first = data[:2]
        return _bfloat16(first) if first and first * (len(data) // 2) == data else None
    array = constant_array(instruction)
    if array is None or array.size == 0 or array.dtype.kind not in "biuf":
        return None
    first_value = array.reshape(-1)[0]
    return float(first_value) if array.size == 1 or bool((array == first_value).all()) else None


def _rounded(value: float, element: ElementType) -> float | None:
    if element is ElementType.BF16:
        return _bfloat16(scalar_bytes(value, element))
    if not element.is_float or element not in NUMPY_TYPES:
        return None
    with np.errstate(over="ignore"):
        return float(np.array(value, NUMPY_TYPES[element]))


def _bfloat16(data: bytes) -> float:
    """The value of a bf16, a type that NumPy lacks."""
    return float(np.frombuffer(bytes(2) + data, "<f4")[0])


def dot_operand_labels(dot: Instruction, labels: Labels, contracted: Sequence[int | None]) -> tuple[Labels, Labels]:
    """Labels of a dot's two operands, from those of its result; ``contracted`` labels its contracted dimensions."""
    a = dot.attributes_as(DotAttributes)
    batch, sides = len(a.lhs_batch), []
    position = batch
    for operand, batches, contracting in (
        (dot.operands[0], a.lhs_batch, a.lhs_contracting),
        (dot.operands[1], a.rhs_batch, a.rhs_contracting),
    ):
        found: list[int | None] = [None] * len(dims_of(operand))
        for label, dimension in zip(labels[:batch], batches, strict=True):
            found[dimension] = label
        for label, dimension in zip(contracted, contracting, strict=True):
            found[dimension] = label
        for dimension in range(len(found)):
            if dimension not in batches and dimension not in contracting:
                found[dimension] = labels[position]
                position += 1
        sides.append(relabel(dims_of(operand), found))
    return sides[0], sides[1]
