"""The rule of the pass simplify for dots that add nothing up, as outer products: they are products of elements, which
loops and kernels compute beside what is around them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from flagos_backend.ir.attributes import DimensionsAttributes, DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, Rule, array_shape

E = ElementType
# Types whose products are those of a dot; of complex numbers, only where all of them are finite.
_MULTIPLIED = frozenset({E.F16, E.BF16, E.F32, E.F64, E.S8, E.S16, E.S32, E.S64, E.U8, E.U16, E.U32, E.U64})


def _dot(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    """Each sum has one term. A wider result is the product of wider operands; a narrower one is rounded once more."""
    attributes = instruction.attributes_as(DotAttributes)
    lhs, rhs = instruction.operands
    shape, a, b = array_shape(instruction), array_shape(lhs), array_shape(rhs)
    if prod(a.dims[d] for d in attributes.lhs_contracting) != 1:
        return None
    given, wanted = a.element_type, shape.element_type
    if b.element_type is not given or not {given, wanted} <= _MULTIPLIED:
        return None
    element_type = wanted if wanted.bytes > given.bytes else given
    free_of_lhs = [d for d in range(len(a.dims)) if d not in (*attributes.lhs_batch, *attributes.lhs_contracting)]
    free_of_rhs = [d for d in range(len(b.dims)) if d not in (*attributes.rhs_batch, *attributes.rhs_contracting)]
    spread = ArrayShape(element_type, shape.dims)
    batch = len(attributes.lhs_batch)
    factors = [
        _spread(lhs, (*attributes.lhs_batch, *free_of_lhs), range(batch + len(free_of_lhs)), spread, emitter),
        _spread(
            rhs,
            (*attributes.rhs_batch, *free_of_rhs),
            (*range(batch), *range(batch + len(free_of_lhs), len(shape.dims))),
            spread,
            emitter,
        ),
    ]
    product = emitter.emit(Opcode.MULTIPLY, spread, factors, like=instruction)
    return product if element_type is wanted else emitter.emit(Opcode.CONVERT, shape, (product,), like=instruction)


def _spread(
    operand: Instruction, dims: Sequence[int], places: Sequence[int], shape: ArrayShape, emitter: Emitter
) -> Instruction:
    """``operand``, whose other dimensions are of one element, with its ``dims`` at ``places`` in ``shape``."""
    given = array_shape(operand)
    value = operand
    if shape.element_type is not given.element_type:
        value = emitter.emit(Opcode.CONVERT, ArrayShape(shape.element_type, given.dims), (value,), like=operand)
    order = (*dims, *(d for d in range(len(given.dims)) if d not in dims))
    moved = ArrayShape(shape.element_type, tuple(given.dims[d] for d in order))
    value = emitter.emit(Opcode.TRANSPOSE, moved, (value,), DimensionsAttributes(order), like=operand)
    kept = ArrayShape(shape.element_type, moved.dims[: len(dims)])
    value = emitter.emit(Opcode.RESHAPE, kept, (value,), like=operand)
    return emitter.emit(Opcode.BROADCAST, shape, (value,), DimensionsAttributes(tuple(places)), like=operand)


RULES: dict[Opcode, Rule] = {Opcode.DOT: _dot}
