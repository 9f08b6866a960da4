"""Writes a gather as the bytecode of a native step.

Used by emitter.py; native/cpu/parse_windows.cc reads the bytecode.
"""

from __future__ import annotations

from flagos_backend.codegen.cpu.lower.window_indices import WrappedGather, windows
from flagos_backend.ir.attributes import GatherAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape


def gather_numbers(gather: Instruction) -> tuple[int, ...] | None:
    """The numbers of ``gather``, whose operands stand row by row; None for one that native code does not take."""
    array, indices, result = (v.shape for v in (*gather.operands[:2], gather) if isinstance(v.shape, ArrayShape))
    attributes = gather.attributes_as(GatherAttributes)
    wraps: tuple[int, ...] = (0,) * len(attributes.start_index_map)
    if isinstance(attributes, WrappedGather):
        indices, wraps = ArrayShape(indices.element_type, attributes.numbers.dims), attributes.numbers.wraps
    found = windows(
        array,
        indices,
        result,
        index_vector_dim=attributes.index_vector_dim,
        wraps=wraps,
        start_dims=attributes.start_index_map,
        batching_dims=tuple(zip(attributes.start_indices_batching_dims, attributes.operand_batching_dims, strict=True)),
        window_sizes=attributes.slice_sizes,
        window_dims=attributes.offset_dims,
        dropped_dims=(*attributes.collapsed_slice_dims, *attributes.operand_batching_dims),
    )
    return None if found is None else found.bytecode(array, indices)
