"""How each data-movement instruction maps a position in its result to positions in its operands."""

from __future__ import annotations

from collections.abc import Callable

from flagos_backend.fusion.region import Affine, linear
from flagos_backend.ir.attributes import DimensionsAttributes, SliceAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape

Indices = tuple[Affine, ...]


def dims_of(instruction: Instruction) -> tuple[int, ...]:
    """The dimensions of an array-shaped instruction; TypeError for a tuple."""
    if not isinstance(instruction.shape, ArrayShape):
        raise TypeError(f"{instruction.name} is a tuple, not an array")
    return instruction.shape.dims


def _broadcast(instruction: Instruction, indices: Indices) -> Indices:
    return tuple(indices[d] for d in instruction.attributes_as(DimensionsAttributes).dimensions)


def _transpose(instruction: Instruction, indices: Indices) -> Indices:
    permutation = instruction.attributes_as(DimensionsAttributes).dimensions
    operand: list[Affine] = list(indices)
    for result_dimension, operand_dimension in enumerate(permutation):
        operand[operand_dimension] = indices[result_dimension]
    return tuple(operand)


def _slice(instruction: Instruction, indices: Indices) -> Indices:
    attributes = instruction.attributes_as(SliceAttributes)
    triples = zip(indices, attributes.strides, attributes.starts, strict=True)
    return tuple(index.scaled(stride, start) for index, stride, start in triples)


def _reverse(instruction: Instruction, indices: Indices) -> Indices:
    turned = instruction.attributes_as(DimensionsAttributes).dimensions
    dims = dims_of(instruction)
    return tuple(index.scaled(-1, dims[d] - 1) if d in turned else index for d, index in enumerate(indices))


def _same(instruction: Instruction, indices: Indices) -> Indices:
    return indices


MOVEMENTS: dict[Opcode, Callable[[Instruction, Indices], Indices]] = {
    Opcode.BROADCAST: _broadcast,
    Opcode.COPY: _same,
    Opcode.OPTIMIZATION_BARRIER: _same,
    Opcode.REVERSE: _reverse,
    Opcode.SLICE: _slice,
    Opcode.TRANSPOSE: _transpose,
}


def reshape_indices(
    indices: Indices, dims: tuple[int, ...], operand_dims: tuple[int, ...], rank: int
) -> Indices | None:
    """Where element ``indices`` of an array of ``dims`` stands in the same elements shaped ``operand_dims``.

    None when that takes a division: a dimension of ``dims`` that is several of ``operand_dims`` in one.
    """
    zero = Affine(0, (0,) * rank)
    result: list[Affine] = [zero] * len(operand_dims)
    position = 0
    for start, stop, size in _groups(dims, operand_dims):
        here = [d for d in range(start, stop) if dims[d] != 1]
        there = []
        product = 1
        while product < size:
            if operand_dims[position] != 1:
                there.append(position)
                product *= operand_dims[position]
            position += 1
        if [dims[d] for d in here] == [operand_dims[d] for d in there]:
            for d, operand_d in zip(here, there, strict=True):
                result[operand_d] = indices[d]
        elif len(there) == 1:
            result[there[0]] = linear(tuple(indices[d] for d in here), tuple(dims[d] for d in here), rank)
        else:
            return None
    return tuple(result)


def _groups(dims: tuple[int, ...], operand_dims: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Splits ``dims`` into the shortest runs whose sizes are also products of runs of ``operand_dims``."""
    if 0 in dims:
        return []
    cuts = {1}
    product = 1
    for size in operand_dims:
        product *= size
        cuts.add(product)
    groups = []
    start, product, before = 0, 1, 1
    for d, size in enumerate(dims):
        product *= size
        if product in cuts and product != before:
            groups.append((start, d + 1, product // before))
            start, before = d + 1, product
    return groups
