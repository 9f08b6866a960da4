"""Rules of the pass simplify for windows that are known while compiling: a gather at constant indices is a few slices,
put together; a slice of what is put together, within one part, is a slice of that part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from flagos_backend.ir.attributes import (
    DimensionAttributes,
    DimensionsAttributes,
    GatherAttributes,
    SliceAttributes,
)
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import Emitter, Rule, array_shape

# More parts than this are copied in less time one by one, by the gather; and more windows are not looked at.
_MOST_PARTS = 8
_MOST_WINDOWS = 1 << 12
# Of two windows, the way from one to the other tells nothing unless they are neighbours.
_LEAST_RUN = 3


def gather(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    """Whole rows, columns or elements at places that are known: slices, forwards or backwards."""
    source, indices = instruction.operands
    attributes = instruction.attributes_as(GatherAttributes)
    if (
        len(attributes.start_index_map) != 1
        or attributes.operand_batching_dims
        or not _reads_batch_at_once(instruction)
    ):
        return None
    (chosen,) = attributes.start_index_map
    if attributes.slice_sizes[chosen] != 1:
        return None
    count = array_shape(indices).num_elements
    numbers = constant_array(indices) if 0 < count <= _MOST_WINDOWS else None
    if numbers is None or not array_shape(instruction).num_elements:
        return None
    last = array_shape(source).dims[chosen] - 1
    runs = _runs([min(max(int(number), 0), last) for number in numbers.reshape(-1)])
    if len(runs) > _MOST_PARTS:
        return None
    sizes = attributes.slice_sizes
    parts = [_rows(source, chosen, sizes, run, emitter, instruction) for run in runs]
    value = parts[0]
    if len(parts) > 1:
        whole = _like(source, (count if d == chosen else size for d, size in enumerate(sizes)))
        value = emitter.emit(Opcode.CONCATENATE, whole, parts, DimensionAttributes(chosen), like=instruction)
    # As windows are: without dimensions that are dropped, and those of the batch, as one, where the result has them.
    kept = [d for d in range(len(sizes)) if d == chosen or d not in attributes.collapsed_slice_dims]
    windows = _like(source, (count if d == chosen else sizes[d] for d in kept))
    value = emitter.emit(Opcode.RESHAPE, windows, (value,), like=instruction)
    order = _order_in_result(instruction, kept.index(chosen), len(kept))
    turned = _like(source, (windows.dims[d] for d in order))
    value = emitter.emit(Opcode.TRANSPOSE, turned, (value,), DimensionsAttributes(order), like=instruction)
    return emitter.emit(Opcode.RESHAPE, instruction.shape, (value,), like=instruction)


def _like(source: Instruction, dims: Iterable[int]) -> ArrayShape:
    return ArrayShape(array_shape(source).element_type, tuple(dims))


def _rows(
    source: Instruction, dimension: int, sizes: Sequence[int], run: Sequence[int], emitter: Emitter, like: Instruction
) -> Instruction:
    """The positions ``run`` of ``dimension``, and of the others the first ``sizes``."""
    step = abs(run[1] - run[0]) if len(run) > 1 else 1
    rank = len(sizes)
    where = SliceAttributes(
        tuple(min(run) if d == dimension else 0 for d in range(rank)),
        tuple(max(run) + 1 if d == dimension else size for d, size in enumerate(sizes)),
        tuple(step if d == dimension else 1 for d in range(rank)),
    )
    shape = _like(source, (len(run) if d == dimension else size for d, size in enumerate(sizes)))
    rows = emitter.emit(Opcode.SLICE, shape, (source,), where, like=like)
    if run[0] <= run[-1]:
        return rows
    return emitter.emit(Opcode.REVERSE, shape, (rows,), DimensionsAttributes((dimension,)), like=like)


def _reads_batch_at_once(instruction: Instruction) -> bool:
    """Whether the dimensions of the batch stand together in the result, and the one that is chosen in is dropped."""
    attributes = instruction.attributes_as(GatherAttributes)
    batch = [d for d in range(len(array_shape(instruction).dims)) if d not in attributes.offset_dims]
    return (
        all(a + 1 == b for a, b in pairwise(batch)) and attributes.start_index_map[0] in attributes.collapsed_slice_dims
    )


def _order_in_result(instruction: Instruction, chosen: int, rank: int) -> tuple[int, ...]:
    """Which dimension of the windows, of which ``chosen`` counts them, each of the result's is."""
    attributes = instruction.attributes_as(GatherAttributes)
    windows = iter([d for d in range(rank) if d != chosen])
    order: list[int] = []
    for d in range(len(array_shape(instruction).dims)):
        if d in attributes.offset_dims:
            order.append(next(windows))
        elif chosen not in order:
            order.append(chosen)
    return tuple(order) if chosen in order else (chosen, *order)


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """``numbers`` cut into runs whose numbers are the same distance, which is not 0, apart."""
    runs: list[list[int]] = []
    place = 0
    while place < len(numbers):
        end = place + 1
        if end < len(numbers) and (step := numbers[end] - numbers[place]) != 0:
            while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
                end += 1
            if end - place < _LEAST_RUN and abs(step) != 1:
                end = place + 1
        runs.append(list(numbers[place:end]))
        place = end
    return runs


def slice_of_parts(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    """What lies within one operand of a concatenate is read there."""
    source = instruction.operands[0]
    if source.opcode is not Opcode.CONCATENATE or not array_shape(instruction).num_elements:
        return None
    dimension = source.attributes_as(DimensionAttributes).dimension
    where = instruction.attributes_as(SliceAttributes)
    begins = accumulate((array_shape(part).dims[dimension] for part in source.operands), initial=0)
    for part, begin in zip(source.operands, begins, strict=False):
        end = begin + array_shape(part).dims[dimension]
        if begin <= where.starts[dimension] < end and where.limits[dimension] <= end:
            starts, limits = list(where.starts), list(where.limits)
            starts[dimension] -= begin
            limits[dimension] -= begin
            inside = SliceAttributes(tuple(starts), tuple(limits), where.strides)
            return emitter.emit(Opcode.SLICE, instruction.shape, (part,), inside, like=instruction)
    return None


RULES: dict[Opcode, Rule] = {Opcode.GATHER: gather, Opcode.SLICE: slice_of_parts}
