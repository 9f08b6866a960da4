"""Writes a scatter as the bytecode of a native step: one array, into which updates are written or combined in their
order.

Used by emitter.py; native/cpu/parse_windows.cc reads the bytecode.
"""

from __future__ import annotations

from math import prod

from flagos_backend.codegen.cpu.bytecode import COMBINES, Split
from flagos_backend.codegen.cpu.encoding import is_arithmetic_type
from flagos_backend.codegen.cpu.lower.window_indices import Windows, WrappedScatter, windows
from flagos_backend.ir.attributes import ParameterAttributes, ScatterAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

_ASSIGN = -1  # instead of the number of what combines


def scatter_numbers(scatter: Instruction) -> tuple[int, ...] | None:
    """The numbers of ``scatter``, whose operands stand row by row; None for one that native code does not take: of
    several arrays, of what is no single operation, and sums of 16-bit floats that would be rounded at each update."""
    attributes = scatter.attributes_as(ScatterAttributes)
    if len(scatter.operands) != 3 and not isinstance(attributes, WrappedScatter):
        return None
    operands = (*scatter.operands[:2], scatter.operands[-1])
    array, indices, updates = (v.shape for v in operands if isinstance(v.shape, ArrayShape))
    wraps: tuple[int, ...] = (0,) * len(attributes.scatter_dims_to_operand_dims)
    if isinstance(attributes, WrappedScatter):
        indices, wraps = ArrayShape(indices.element_type, attributes.numbers.dims), attributes.numbers.wraps
    dropped = (*attributes.inserted_window_dims, *attributes.input_batching_dims)
    sizes = iter(attributes.update_window_dims)
    found = windows(
        array,
        indices,
        updates,
        index_vector_dim=attributes.index_vector_dim,
        wraps=wraps,
        start_dims=attributes.scatter_dims_to_operand_dims,
        batching_dims=tuple(zip(attributes.scatter_indices_batching_dims, attributes.input_batching_dims, strict=True)),
        window_sizes=[1 if d in dropped else updates.dims[next(sizes)] for d in range(len(array.dims))],
        window_dims=attributes.update_window_dims,
        dropped_dims=dropped,
    )
    if found is None:
        return None
    once = attributes.unique_indices or prod(extent.size for extent in found.batch) == 1
    combine = _combine(scatter, array.element_type, once)
    return None if combine is None else (*found.bytecode(array, indices), *combine, *_order(found))


def _combine(scatter: Instruction, element_type: ElementType, once: bool) -> tuple[int, ...] | None:
    """``once``: whether no element is updated twice."""
    root = scatter.called[0].root
    if root.opcode is Opcode.PARAMETER:
        return (_ASSIGN,) if root.attributes_as(ParameterAttributes).number == 1 else None
    if root.opcode not in COMBINES or not is_arithmetic_type(element_type):
        return None
    if {id(operand) for operand in root.operands} != {id(p) for p in scatter.called[0].parameters}:
        return None
    is_half = element_type in (ElementType.F16, ElementType.BF16)
    if is_half and root.opcode in (Opcode.ADD, Opcode.MULTIPLY) and not once:
        return None
    return COMBINES.index(root.opcode), int(element_type)


def _order(found: Windows) -> tuple[int, int, int]:
    """What threads share, which dimension that is, and whether each window has to be updated whole before the next."""
    outer = found.window[:-1] if found.has_run else found.window
    choices = [(extent, Split.BATCH, d) for d, extent in enumerate(found.batch)]
    choices += [(extent, Split.WINDOW, d) for d, extent in enumerate(outer)]
    choices += [(extent, Split.RUN, 0) for extent in found.window[len(outer) :]]
    apart = [choice for choice in choices if choice[0].is_apart]
    _, split, dimension = max(apart, key=lambda choice: choice[0].size, default=(None, Split.NONE, 0))
    return split, dimension, int(not all(extent.is_apart for extent in outer))
