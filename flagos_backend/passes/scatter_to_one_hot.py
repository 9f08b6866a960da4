"""A scatter of at most one element into each row of a broadcast constant becomes a comparison with the position.

It is what differentiating the choice of a label leaves: an array as large as the logits, zero but for one element a
row. As elementwise operations it fuses into what reads it and is never written.
"""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes, DimensionsAttributes, ScatterAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape
from flagos_backend.passes.simplify_indices import combined


def scatter_to_one_hot_select(module: Module) -> Module:
    return apply_rule(module, _rule)


@dataclass(frozen=True, slots=True)
class _Rows:
    """``dimension``: along which an index chooses. ``batch``: the other dimensions, in the order of the indices'."""

    dimension: int
    batch: tuple[int, ...]


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.SCATTER or not isinstance(instruction.shape, ArrayShape):
        return None
    target, indices, updates = instruction.operands
    rows = _rows(instruction)
    if rows is None or target.opcode is not Opcode.BROADCAST:
        return None
    dims = instruction.shape.dims
    kept = tuple(dims[d] for d in rows.batch)

    def spread(value: Instruction) -> Instruction:
        """One element a row, at every position of the row."""
        element_type = array_shape(value).element_type
        flat = emitter.emit(Opcode.RESHAPE, ArrayShape(element_type, kept), [value], like=instruction)
        attributes = DimensionsAttributes(rows.batch)
        return emitter.emit(Opcode.BROADCAST, ArrayShape(element_type, dims), [flat], attributes, like=instruction)

    value = combined(instruction.called[0], target, spread(updates), emitter, instruction)
    if value is None:
        return None
    chosen = spread(indices)
    along = DimensionAttributes(rows.dimension)
    position = emitter.emit(Opcode.IOTA, array_shape(chosen), [], along, like=instruction)
    hit = emitter.emit(
        Opcode.COMPARE,
        ArrayShape(ElementType.PRED, dims),
        [chosen, position],
        CompareAttributes(Comparison.EQ),
        like=instruction,
    )
    return emitter.emit(Opcode.SELECT, instruction.shape, [hit, value, target], like=instruction)


def _rows(scatter: Instruction) -> _Rows | None:
    """None unless each row gets at most one element, at an index that its type can tell from every other."""
    attributes = scatter.attributes_as(ScatterAttributes)
    shape, indices = array_shape(scatter), array_shape(scatter.operands[1])
    if attributes.update_window_dims or len(attributes.scatter_dims_to_operand_dims) != 1 or 0 in shape.dims:
        return None
    (dimension,) = attributes.scatter_dims_to_operand_dims
    pairs = sorted(zip(attributes.scatter_indices_batching_dims, attributes.input_batching_dims, strict=True))
    batch = tuple(d for _, d in pairs)
    rest = set(range(len(indices.dims))) - set(attributes.scatter_indices_batching_dims)
    signed = indices.element_type.is_signed
    if (
        sorted((*batch, dimension)) != list(range(shape.rank))
        or list(batch) != sorted(batch)
        or any(indices.dims[d] != 1 for d in rest)
        or shape.dims[dimension] > 1 << (indices.element_type.bits - signed)
    ):
        return None
    return _Rows(dimension, batch)
