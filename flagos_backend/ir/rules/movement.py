"""Shape rules: broadcasts, slices, gathers and whatever else only moves elements."""

from __future__ import annotations

from flagos_backend.ir.attributes import (
    DimensionAttributes,
    DimensionsAttributes,
    DynamicSliceAttributes,
    GatherAttributes,
    PadAttributes,
    ScatterAttributes,
    SliceAttributes,
)
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.rules.common import (
    Operation,
    Rule,
    as_result,
    broken,
    expect_combiner,
    expect_distinct,
    expect_same_dims,
)
from flagos_backend.ir.types import ArrayShape, ElementType, Shape


def _iota(operation: Operation) -> Shape:
    operation.expect_operands(0)
    shape = operation.declared_array()
    dimension = operation.attributes_as(DimensionAttributes).dimension
    expect_distinct([dimension], shape.rank, "iota's dimension")
    if shape.element_type is ElementType.PRED:
        broken("iota does not make pred")
    return shape


def _broadcast(operation: Operation) -> Shape:
    operation.expect_operands(1)
    source, result = operation.array(0), operation.declared_array()
    dims = operation.attributes_as(DimensionsAttributes).dimensions
    if len(dims) != source.rank:
        broken(f"broadcast needs a result dimension for each of {source}'s, got {list(dims)}")
    expect_distinct(dims, result.rank, "broadcast's dimensions")
    if any(result.dims[dimension] != size for dimension, size in zip(dims, source.dims, strict=True)):
        broken(f"{source} does not keep its sizes at dimensions {list(dims)} of {result}")
    return ArrayShape(source.element_type, result.dims)


def _concatenate(operation: Operation) -> Shape:
    arrays = operation.arrays()
    if not arrays:
        broken("concatenate takes at least one operand")
    first, dimension = arrays[0], operation.attributes_as(DimensionAttributes).dimension
    expect_distinct([dimension], first.rank, "concatenate's dimension")
    for shape in arrays:
        others_equal = shape.rank == first.rank and all(
            a == b for i, (a, b) in enumerate(zip(shape.dims, first.dims, strict=True)) if i != dimension
        )
        if shape.element_type is not first.element_type or not others_equal:
            broken(f"concatenate takes shapes that differ only in dimension {dimension}, got {first} and {shape}")
    size = sum(shape.dims[dimension] for shape in arrays)
    return ArrayShape(first.element_type, (*first.dims[:dimension], size, *first.dims[dimension + 1 :]))


def _get_dimension_size(operation: Operation) -> Shape:
    operation.expect_operands(1)
    dimension = operation.attributes_as(DimensionAttributes).dimension
    expect_distinct([dimension], operation.array(0).rank, "get-dimension-size's dimension")
    return ArrayShape(ElementType.S32)


def _pad(operation: Operation) -> Shape:
    operation.expect_operands(2)
    source, value = operation.array(0), operation.array(1)
    if value != ArrayShape(source.element_type):
        broken(f"the padding value must be a scalar of {source.element_type.name.lower()}, not {value}")
    attributes = operation.attributes_as(PadAttributes)
    if not len(attributes.low) == len(attributes.high) == len(attributes.interior) == source.rank:
        broken(f"pad needs low, high and interior for each dimension of {source}")
    if any(interior < 0 for interior in attributes.interior):
        broken(f"interior padding {list(attributes.interior)} must not be negative")
    dims = tuple(
        low + high + size + max(size - 1, 0) * interior
        for size, low, high, interior in zip(
            source.dims, attributes.low, attributes.high, attributes.interior, strict=True
        )
    )
    if any(size < 0 for size in dims):
        broken(f"pad crops {source} to negative sizes {list(dims)}")
    return ArrayShape(source.element_type, dims)


def _reshape(operation: Operation) -> Shape:
    operation.expect_operands(1)
    source, result = operation.array(0), operation.declared_array()
    if source.num_elements != result.num_elements:
        broken(
            f"reshape keeps the number of elements, {source} has {source.num_elements}, {result} {result.num_elements}"
        )
    return ArrayShape(source.element_type, result.dims)


def _reverse(operation: Operation) -> Shape:
    operation.expect_operands(1)
    shape = operation.array(0)
    expect_distinct(operation.attributes_as(DimensionsAttributes).dimensions, shape.rank, "reverse's dimensions")
    return shape


def _transpose(operation: Operation) -> Shape:
    operation.expect_operands(1)
    shape = operation.array(0)
    permutation = operation.attributes_as(DimensionsAttributes).dimensions
    if sorted(permutation) != list(range(shape.rank)):
        broken(f"{list(permutation)} does not permute the dimensions of {shape}")
    return ArrayShape(shape.element_type, tuple(shape.dims[dimension] for dimension in permutation))


def _slice(operation: Operation) -> Shape:
    operation.expect_operands(1)
    shape = operation.array(0)
    attributes = operation.attributes_as(SliceAttributes)
    if not len(attributes.starts) == len(attributes.limits) == len(attributes.strides) == shape.rank:
        broken(f"slice needs start, limit and stride for each dimension of {shape}")
    dims = []
    for size, start, limit, stride in zip(
        shape.dims, attributes.starts, attributes.limits, attributes.strides, strict=True
    ):
        if not (0 <= start <= limit <= size and stride >= 1):
            broken(f"slice [{start}:{limit}:{stride}] does not fit a dimension of {size}")
        dims.append(-(-(limit - start) // stride))
    return ArrayShape(shape.element_type, tuple(dims))


def _expect_indices(operation: Operation, first: int, rank: int) -> None:
    operation.expect_operands(first + rank)
    for index in range(first, first + rank):
        shape = operation.array(index)
        if shape.dims or not shape.element_type.is_integer:
            broken(f"a start index must be an integer scalar, not {shape}")


def _dynamic_slice(operation: Operation) -> Shape:
    shape = operation.array(0)
    sizes = operation.attributes_as(DynamicSliceAttributes).sizes
    _expect_indices(operation, 1, shape.rank)
    if len(sizes) != shape.rank or any(not 0 <= size <= full for size, full in zip(sizes, shape.dims, strict=True)):
        broken(f"slice sizes {list(sizes)} do not fit {shape}")
    return ArrayShape(shape.element_type, sizes)


def _dynamic_update_slice(operation: Operation) -> Shape:
    shape, update = operation.array(0), operation.array(1)
    _expect_indices(operation, 2, shape.rank)
    fits = update.rank == shape.rank and all(a <= b for a, b in zip(update.dims, shape.dims, strict=True))
    if not fits or update.element_type is not shape.element_type:
        broken(f"the update {update} does not fit {shape}")
    return shape


def _index_batch(indices: ArrayShape, index_vector_dim: int) -> tuple[int, tuple[int, ...]]:
    """The length of an index vector, and the dimensions of ``indices`` without that of the vectors."""
    if not indices.element_type.is_integer:
        broken(f"indices must be integers, not {indices}")
    if not 0 <= index_vector_dim <= indices.rank:
        broken(f"index_vector_dim {index_vector_dim} does not lie in {indices}")
    if index_vector_dim == indices.rank:
        return 1, indices.dims
    return indices.dims[index_vector_dim], indices.dims[:index_vector_dim] + indices.dims[index_vector_dim + 1 :]


def _expect_batching(
    operand: ArrayShape, indices: ArrayShape, operand_dims: tuple[int, ...], index_dims: tuple[int, ...], vector: int
) -> None:
    expect_distinct(operand_dims, operand.rank, "the operand's batching dimensions")
    expect_distinct(index_dims, indices.rank, "the indices' batching dimensions")
    same = len(operand_dims) == len(index_dims) and all(
        operand.dims[a] == indices.dims[b] for a, b in zip(operand_dims, index_dims, strict=True)
    )
    if not same or vector in index_dims:
        broken(
            f"batching dimensions {list(operand_dims)} of {operand} and {list(index_dims)} of {indices} must pair up"
        )


def _gather(operation: Operation) -> Shape:
    arrays = operation.arrays()
    a = operation.attributes_as(GatherAttributes)
    indices = a.index_shape(arrays[1:])
    if indices is None:
        broken(f"gather takes an array and its indices, got {len(arrays)} operands")
    operand = arrays[0]
    vector, batch = _index_batch(indices, a.index_vector_dim)
    if vector != len(a.start_index_map):
        broken(f"start_index_map {list(a.start_index_map)} must have an entry for each of {vector} index components")
    expect_distinct(a.start_index_map, operand.rank, "start_index_map")
    dropped = (*a.collapsed_slice_dims, *a.operand_batching_dims)
    expect_distinct(dropped, operand.rank, "collapsed and batching dimensions")
    _expect_batching(operand, indices, a.operand_batching_dims, a.start_indices_batching_dims, a.index_vector_dim)
    if set(a.start_index_map) & set(a.operand_batching_dims):
        broken("a batching dimension must not be indexed as well")
    fits = len(a.slice_sizes) == operand.rank and all(
        0 <= size <= full for size, full in zip(a.slice_sizes, operand.dims, strict=True)
    )
    if not fits or any(a.slice_sizes[dimension] > 1 for dimension in dropped):
        broken(f"slice_sizes {list(a.slice_sizes)} do not fit {operand}, or a dropped dimension is larger than 1")
    window = [size for dimension, size in enumerate(a.slice_sizes) if dimension not in dropped]
    rank = len(batch) + len(window)
    if 0 in (a.slice_sizes[dimension] for dimension in dropped) and 0 not in (*window, *batch):
        broken(f"windows of slice_sizes {list(a.slice_sizes)} hold no element to gather")
    if len(a.offset_dims) != len(window):
        broken(f"offset_dims {list(a.offset_dims)} must have an entry for each of {len(window)} window dimensions")
    expect_distinct(a.offset_dims, rank, "offset_dims", increasing=True)
    windows, batches = iter(window), iter(batch)
    dims = tuple(next(windows) if dimension in a.offset_dims else next(batches) for dimension in range(rank))
    return ArrayShape(operand.element_type, dims)


def _scatter(operation: Operation) -> Shape:
    a = operation.attributes_as(ScatterAttributes)
    count = a.num_arrays(len(operation.operands))
    arrays = operation.arrays()
    operands, updates = arrays[:count], arrays[len(arrays) - count :]
    indices = a.index_shape(arrays[count : len(arrays) - count])
    if indices is None or count < 1:
        broken(f"scatter takes n arrays, the indices and n updates, got {len(operation.operands)} operands")
    expect_same_dims(operands)
    expect_same_dims(updates)
    operand, update = operands[0], updates[0]
    vector, batch = _index_batch(indices, a.index_vector_dim)
    if vector != len(a.scatter_dims_to_operand_dims):
        broken(f"scatter_dims_to_operand_dims must have an entry for each of {vector} index components")
    expect_distinct(a.scatter_dims_to_operand_dims, operand.rank, "scatter_dims_to_operand_dims")
    dropped = (*a.inserted_window_dims, *a.input_batching_dims)
    expect_distinct(dropped, operand.rank, "inserted and batching dimensions")
    _expect_batching(operand, indices, a.input_batching_dims, a.scatter_indices_batching_dims, a.index_vector_dim)
    if set(a.scatter_dims_to_operand_dims) & set(a.input_batching_dims):
        broken("a batching dimension must not be indexed as well")
    expect_distinct(a.update_window_dims, update.rank, "update_window_dims", increasing=True)
    window = [size for dimension, size in enumerate(operand.dims) if dimension not in dropped]
    fits = len(a.update_window_dims) == len(window) and all(
        update.dims[dimension] <= size for dimension, size in zip(a.update_window_dims, window, strict=True)
    )
    scattered = tuple(size for dimension, size in enumerate(update.dims) if dimension not in a.update_window_dims)
    if not fits or scattered != batch:
        broken(f"updates {update} fit neither the windows of {operand} nor the indices {indices}")
    types = [shape.element_type for shape in operands]
    if [shape.element_type for shape in updates] != types:
        broken("updates must have the types of what they update")
    found = expect_combiner(operation.called[0], types, "scatter's computation")
    return as_result([ArrayShape(t, operand.dims) for t in found])


RULES: dict[Opcode, Rule] = {
    Opcode.IOTA: _iota,
    Opcode.BROADCAST: _broadcast,
    Opcode.CONCATENATE: _concatenate,
    Opcode.GET_DIMENSION_SIZE: _get_dimension_size,
    Opcode.PAD: _pad,
    Opcode.RESHAPE: _reshape,
    Opcode.REVERSE: _reverse,
    Opcode.TRANSPOSE: _transpose,
    Opcode.SLICE: _slice,
    Opcode.DYNAMIC_SLICE: _dynamic_slice,
    Opcode.DYNAMIC_UPDATE_SLICE: _dynamic_update_slice,
    Opcode.GATHER: _gather,
    Opcode.SCATTER: _scatter,
}
