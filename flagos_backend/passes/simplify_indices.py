"""Rules of the pass simplify for gathers and scatters: indices that only count, or have nothing to choose from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from flagos_backend.ir.attributes import (
    DimensionAttributes,
    DimensionsAttributes,
    Dims,
    GatherAttributes,
    ScatterAttributes,
)
from flagos_backend.ir.constants import is_splat_of
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.passes.rewrite import Emitter, Rule, array_shape

_COMBINES = frozenset({Opcode.ADD, Opcode.MULTIPLY, Opcode.MAXIMUM, Opcode.MINIMUM, Opcode.AND, Opcode.OR, Opcode.XOR})


def counted_dimension(value: Instruction) -> int | None:
    """The dimension along which each element of ``value`` is its own position; None if there is none to be seen."""
    shape = array_shape(value)
    if value.opcode is Opcode.IOTA:
        dimension = value.attributes_as(DimensionAttributes).dimension
    elif value.opcode in (Opcode.BROADCAST, Opcode.RESHAPE, Opcode.CONVERT):
        inner = counted_dimension(value.operands[0])
        if inner is None:
            return None
        moved = _moved(value, inner)
        if moved is None:
            return None
        dimension = moved
    else:
        return None
    element_type = shape.element_type
    holds = element_type.is_integer and shape.dims[dimension] <= 1 << (element_type.bits - element_type.is_signed)
    return dimension if holds else None


def _moved(value: Instruction, dimension: int) -> int | None:
    """Where a dimension of the operand is in ``value``."""
    if value.opcode is Opcode.CONVERT:
        return dimension
    if value.opcode is Opcode.BROADCAST:
        return value.attributes_as(DimensionsAttributes).dimensions[dimension]
    before, after = array_shape(value.operands[0]).dims, array_shape(value).dims
    real, kept = ([d for d, size in enumerate(dims) if size != 1] for dims in (before, after))
    same = [before[d] for d in real] == [after[d] for d in kept]
    return kept[real.index(dimension)] if same and dimension in real else None


def combined(
    reducer: Computation, target: Instruction, update: Instruction, emitter: Emitter, like: Instruction
) -> Instruction | None:
    """What an element of ``target`` becomes with one update; None for a combination of more than one operation."""
    root, (old, new) = reducer.root, reducer.parameters
    if root is new:
        return update
    if root.opcode not in _COMBINES or set(root.operands) != {old, new}:
        return None
    return emitter.emit(root.opcode, target.shape, [target, update], like=like)


def _gather(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    source, indices = instruction.operands
    attributes = instruction.attributes_as(GatherAttributes)
    dims = array_shape(source).dims
    if attributes.slice_sizes == dims and array_shape(source).num_elements == array_shape(instruction).num_elements:
        # Starts are clamped: there is one place to begin.
        return emitter.emit(Opcode.RESHAPE, instruction.shape, (source,), like=instruction)
    known = zip(attributes.operand_batching_dims, attributes.start_indices_batching_dims, strict=True)
    choice = _Choice(attributes.start_index_map, attributes.collapsed_slice_dims, tuple(known))
    fewer = _with_batches(choice, indices, attributes.index_vector_dim, dims, emitter, instruction)
    if fewer is None:
        return None
    choice, rest = fewer
    changed = replace(
        attributes,
        collapsed_slice_dims=choice.single,
        start_index_map=choice.chosen,
        operand_batching_dims=tuple(d for d, _ in choice.batching),
        start_indices_batching_dims=tuple(d for _, d in choice.batching),
        indices_are_sorted=False,
    )
    return emitter.emit(Opcode.GATHER, instruction.shape, (source, rest), changed, like=instruction)


def _scatter(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if not isinstance(instruction.shape, ArrayShape):
        return None
    target, indices, updates = instruction.operands
    attributes = instruction.attributes_as(ScatterAttributes)
    dims = instruction.shape.dims
    if array_shape(updates).num_elements == instruction.shape.num_elements and _is_whole_window(instruction):
        update = emitter.emit(Opcode.RESHAPE, instruction.shape, (updates,), like=instruction)
        return combined(instruction.called[0], target, update, emitter, instruction)
    known = zip(attributes.input_batching_dims, attributes.scatter_indices_batching_dims, strict=True)
    choice = _Choice(attributes.scatter_dims_to_operand_dims, attributes.inserted_window_dims, tuple(known))
    fewer = _with_batches(choice, indices, attributes.index_vector_dim, dims, emitter, instruction)
    if fewer is None:
        return None
    choice, rest = fewer
    changed = replace(
        attributes,
        inserted_window_dims=choice.single,
        scatter_dims_to_operand_dims=choice.chosen,
        input_batching_dims=tuple(d for d, _ in choice.batching),
        scatter_indices_batching_dims=tuple(d for _, d in choice.batching),
        indices_are_sorted=False,
    )
    operands = (target, rest, updates)
    return emitter.emit(Opcode.SCATTER, instruction.shape, operands, changed, instruction.called, like=instruction)


def _is_whole_window(scatter: Instruction) -> bool:
    """Whether the one window there is lies over all of the target: it begins at 0, and is as large."""
    target, indices, updates = scatter.operands
    attributes = scatter.attributes_as(ScatterAttributes)
    if attributes.input_batching_dims:
        return False
    source = indices.operands[0] if indices.opcode is Opcode.BROADCAST else indices
    if not is_splat_of(source, bytes(array_shape(source).element_type.bytes)):
        return False
    inserted = set(attributes.inserted_window_dims)
    dims = array_shape(target).dims
    window = [size for d, size in enumerate(dims) if d not in inserted]
    given = [array_shape(updates).dims[d] for d in attributes.update_window_dims]
    return window == given and all(dims[d] == 1 for d in inserted)


@dataclass(frozen=True, slots=True)
class _Choice:
    """How index vectors choose in an array. ``chosen``: its dimension for each of their components; ``single``: those
    of which single elements are chosen; ``batching``: pairs of its dimensions and the indices' that go together."""

    chosen: Dims
    single: Dims
    batching: tuple[tuple[int, int], ...]


def _with_batches(
    choice: _Choice, indices: Instruction, vector: int, dims: Dims, emitter: Emitter, like: Instruction
) -> tuple[_Choice, Instruction] | None:
    """The choice with what only counts as batches, and the indices that are left; None where nothing counts."""
    taken = {along for _, along in choice.batching}
    found = _counting(indices, vector, choice.chosen, dims, choice.single)
    counting = {component: pair for component, pair in found.items() if pair[1] not in taken}
    if not counting:
        return None
    batching = tuple(sorted([*choice.batching, *counting.values()]))
    batched = {d for d, _ in batching}
    chosen, single = (tuple(d for d in those if d not in batched) for those in (choice.chosen, choice.single))
    return _Choice(chosen, single, batching), _without(indices, vector, counting, emitter, like)


# A component of an index vector -> the array's dimension that it chooses in, the indices' along which it counts.
_Counting = dict[int, tuple[int, int]]


def _counting(
    indices: Instruction, vector: int, chosen: Sequence[int], dims: Sequence[int], single: Collection[int]
) -> _Counting:
    """The components that are their own position in an array's dimension of the same size, out of which single elements
    are chosen; not all of them."""
    found: _Counting = {}
    if indices.opcode is not Opcode.CONCATENATE or indices.attributes_as(DimensionAttributes).dimension != vector:
        return found
    component = 0
    for part in indices.operands:
        shape = array_shape(part)
        along = counted_dimension(part) if shape.dims[vector] == 1 else None
        if along is not None and along != vector and along not in {taken for _, taken in found.values()}:
            target = chosen[component]
            if target in single and shape.dims[along] == dims[target]:
                found[component] = target, along
        component += shape.dims[vector]
    return found if len(found) < component else {}


def _without(
    indices: Instruction, vector: int, counting: _Counting, emitter: Emitter, like: Instruction
) -> Instruction:
    """``indices`` without some components of their vectors, each of which is an operand."""
    kept, component = [], 0
    for part in indices.operands:
        if component not in counting:
            kept.append(part)
        component += array_shape(part).dims[vector]
    if len(kept) == 1:
        return kept[0]
    shape = array_shape(indices)
    dims = (*shape.dims[:vector], shape.dims[vector] - len(counting), *shape.dims[vector + 1 :])
    along = DimensionAttributes(vector)
    return emitter.emit(Opcode.CONCATENATE, ArrayShape(shape.element_type, dims), kept, along, like=like)


RULES: dict[Opcode, Rule] = {Opcode.GATHER: _gather, Opcode.SCATTER: _scatter}
