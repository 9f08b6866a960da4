"""Writes a gather as the words of a native step: strides of a window's position and of its elements.

Used by native.py; native/cpu/parse.cc reads the words.
"""

from __future__ import annotations

from flagos_backend.fusion.indexing import dims_of, row_major
from flagos_backend.ir.attributes import GatherAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape


def gather_numbers(gather: Instruction) -> tuple[int, ...] | None:
    """The numbers of ``gather``, whose operands stand row by row; None for one that native code does not take: of
    sub-byte elements or indices, or of nothing."""
    values = (*gather.operands, gather)
    array, indices, result = (v.shape for v in values if isinstance(v.shape, ArrayShape))
    if array.element_type.bits < 8 or indices.element_type.bits < 8 or 0 in (*array.dims, *result.dims):
        return None
    attributes = gather.attributes_as(GatherAttributes)
    array_strides, index_strides, result_strides = (row_major(v, dims_of(v)).strides for v in values)
    vector = attributes.index_vector_dim
    along = dict(zip(attributes.start_indices_batching_dims, attributes.operand_batching_dims, strict=True))
    batch = [d for d in range(len(indices.dims)) if d != vector]
    in_result = [d for d in range(len(result.dims)) if d not in attributes.offset_dims]
    words = [array.element_type.bytes, int(indices.element_type), len(batch)]
    for d, position in zip(batch, in_result, strict=True):
        along_array = array_strides[along[d]] if d in along else 0
        words += [indices.dims[d], index_strides[d], along_array, result_strides[position]]
    words += [index_strides[vector] if vector < len(indices.dims) else 0, len(attributes.start_index_map)]
    for d in attributes.start_index_map:
        words += [array.dims[d] - attributes.slice_sizes[d], array_strides[d]]
    dropped = {*attributes.collapsed_slice_dims, *attributes.operand_batching_dims}
    kept = [d for d in range(len(array.dims)) if d not in dropped]
    words.append(len(kept))
    for d, position in zip(kept, attributes.offset_dims, strict=True):
        words += [attributes.slice_sizes[d], array_strides[d], result_strides[position]]
    return tuple(words)
