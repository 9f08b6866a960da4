"""How each data-movement instruction maps a position in its result to positions in its operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flagos_backend.ir.attributes import DimensionsAttributes, GatherAttributes, IndexNumber, SliceAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.strided_view import StridedView
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.region import Affine, Expression, Shift, axis, linear

Indices = tuple[Affine, ...]
# Where in its first operand an instruction's element stands.
Movement = Callable[[Instruction, Indices], Indices]


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
    reversed_dims = instruction.attributes_as(DimensionsAttributes).dimensions
    dims = dims_of(instruction)
    return tuple(index.scaled(-1, dims[d] - 1) if d in reversed_dims else index for d, index in enumerate(indices))


def _same(instruction: Instruction, indices: Indices) -> Indices:
    return indices


_MOVEMENTS: dict[Opcode, Movement] = {
    Opcode.BROADCAST: _broadcast,
    Opcode.COPY: _same,
    Opcode.OPTIMIZATION_BARRIER: _same,
    Opcode.REVERSE: _reverse,
    Opcode.SLICE: _slice,
    Opcode.TRANSPOSE: _transpose,
}


def _strided(view: StridedView, _: Instruction, indices: Indices) -> Indices:
    rank = len(indices[0].coefficients)
    position = Affine(view.offset, (0,) * rank)
    for index, stride in zip(indices, view.strides, strict=True):
        position += index.scaled(stride)
    return (position,)


def movement_of(instruction: Instruction) -> Movement | None:
    """How an instruction moves elements that it does not change; None where it computes, and for a reshape."""
    if instruction.opcode is not Opcode.CUSTOM_CALL:
        return _MOVEMENTS.get(instruction.opcode)
    view = StridedView.of(instruction)
    # A scalar's indices do not tell the rank of the region that wants it.
    return functools.partial(_strided, view) if view is not None and view.strides else None


def shifted(
    indices: Indices,
    dims: tuple[int, ...],
    window: tuple[int, ...],
    start: Callable[[int, int], int | Expression],
) -> Indices:
    """Where element ``indices`` of a window of an array of ``dims`` stands in the array.

    ``start(d, limit)``: where the window starts in dimension d, which lies in [0, limit].
    """
    found = []
    for d, (index, size, part) in enumerate(zip(indices, dims, window, strict=True)):
        first = start(d, size - part) if size > part else 0
        if isinstance(first, int):
            found.append(index.scaled(1, first))
        else:
            found.append(index + _shift(first, size - part, len(index.coefficients)))
    return tuple(found)


def _shift(start: Expression, limit: int, rank: int) -> Affine:
    return Affine(0, (0,) * rank, (Shift(start, limit),))


def gathered(
    instruction: Instruction,
    indices: Indices,
    rank: int,
    start: Callable[[IndexNumber, Indices, int], int | Expression],
) -> Indices:
    """Where element ``indices`` of a gather stands in its operand. ``rank``: of the region.

    ``start(number, place, limit)``: where a window starts, which lies in [0, limit], as the number at ``place`` says.
    """
    attributes = instruction.attributes_as(GatherAttributes)
    array, *positions = (dims_of(operand) for operand in instruction.operands)
    zero = Affine(0, (0,) * rank)
    batch = [index for d, index in enumerate(indices) if d not in attributes.offset_dims]
    offsets = (indices[d] for d in attributes.offset_dims)
    found = []
    for d, size in enumerate(array):
        if d in attributes.operand_batching_dims:
            source = attributes.start_indices_batching_dims[attributes.operand_batching_dims.index(d)]
            found.append(batch[source - (source > attributes.index_vector_dim)])
            continue
        index = zero if d in attributes.collapsed_slice_dims else next(offsets)
        limit = size - attributes.slice_sizes[d]
        if d in attributes.start_index_map and limit > 0:
            number = attributes.index_number(attributes.start_index_map.index(d), tuple(positions))
            place = list(batch)
            if attributes.index_vector_dim < len(number.dims):
                place.insert(attributes.index_vector_dim, zero.scaled(1, number.component))
            first = start(number, tuple(place), limit)
            index += Affine(first, zero.coefficients) if isinstance(first, int) else _shift(first, limit, rank)
        found.append(index)
    return tuple(found)


def reduction_order(instruction: Instruction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """In which order a reduce walks its operand's dimensions, and which positions of that order are reduced.

    The reduced ones stand together, and what is contiguous in memory after them stays after them.
    """
    rank = len(dims_of(instruction.operands[0]))
    reduced = sorted(instruction.attributes_as(DimensionsAttributes).dimensions)
    outer = [d for d in range(rank) if d not in reduced and d < max(reduced)]
    inner = [d for d in range(rank) if d not in reduced and d > max(reduced)]
    order = (*outer, *reduced, *inner)
    return order, tuple(range(len(outer), len(outer) + len(reduced)))


@dataclass(frozen=True, slots=True)
class View:
    """An array inside a buffer: element i is the buffer's element ``offset + sum(strides[d] * i[d])``."""

    buffer: Instruction
    strides: tuple[int, ...]
    offset: int = 0


def row_major(buffer: Instruction, dims: tuple[int, ...]) -> View:
    """The whole buffer, as an array of ``dims``."""
    return View(buffer, linear(tuple(axis(d, len(dims)) for d in range(len(dims))), dims, len(dims)).coefficients)


def view_of_source(instruction: Instruction, operands: Callable[[Instruction], Sequence[Instruction]]) -> View | None:
    """Where an instruction that only moves elements finds them in the value that it moves, not itself a movement.

    ``operands``: the flat ones of an instruction. None for an instruction that moves nothing, and where no strides (or
    negative ones) describe it.
    """
    dims = dims_of(instruction)
    rank = len(dims)
    indices = tuple(axis(d, rank) for d in range(rank))
    source = instruction
    while source.opcode is Opcode.RESHAPE or movement_of(source) is not None:
        movement = movement_of(source)
        (operand,) = operands(source)
        found = (
            movement(source, indices)
            if movement is not None
            else reshape_indices(indices, dims_of(source), dims_of(operand), rank)
        )
        if found is None:
            return None
        indices, source = found, operand
    place = linear(indices, dims_of(source), rank)
    if source is instruction or min(place.coefficients, default=0) < 0:
        return None
    return View(source, place.coefficients, place.offset)


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
