"""Dots that add nothing up, as outer products, become products of elements, which loops and kernels compute beside what
is around them.

After hoist_invariants.py, which knows dots as what costs a kernel, and after match/, which
knows gradients by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from flagos_backend.ir.attributes import DimensionsAttributes, DotAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape

E = ElementType
_FLOATS = frozenset({E.F16, E.BF16, E.F32, E.F64})
_INTEGERS = frozenset({E.S8, E.S16, E.S32, E.S64, E.U8, E.U16, E.U32, E.U64})


def dot_to_multiply(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.DOT:
        return None
    attributes = instruction.attributes_as(DotAttributes)
    lhs, rhs = instruction.operands
    shape, a, b = array_shape(instruction), array_shape(lhs), array_shape(rhs)
    element_type = multiplied(instruction)
    if element_type is None or prod(a.dims[d] for d in attributes.lhs_contracting) != 1:
        return None
    free_of_lhs = [d for d in range(len(a.dims)) if d not in (*attributes.lhs_batch, *attributes.lhs_contracting)]
    free_of_rhs = [d for d in range(len(b.dims)) if d not in (*attributes.rhs_batch, *attributes.rhs_contracting)]
    spread = ArrayShape(element_type, shape.dims)
    batch, end_of_lhs = len(attributes.lhs_batch), len(attributes.lhs_batch) + len(free_of_lhs)
    places_of_rhs = (*range(batch), *range(end_of_lhs, len(shape.dims)))
    factors = [
        _spread(lhs, (*attributes.lhs_batch, *free_of_lhs), range(end_of_lhs), spread, emitter),
        _spread(rhs, (*attributes.rhs_batch, *free_of_rhs), places_of_rhs, spread, emitter),
    ]
    product = emitter.emit(Opcode.MULTIPLY, spread, factors, like=instruction)
    return product if spread == shape else emitter.emit(Opcode.CONVERT, shape, (product,), like=instruction)


def multiplied(dot: Instruction) -> ElementType | None:
    """The type whose products are those of ``dot``: the wider one, which rounds once more to a narrower result, or
    wraps around. None where there is none: floats of integers, halves of other halves, and complex numbers, whose
    dots know infinities otherwise."""
    lhs, rhs, result = (array_shape(value).element_type for value in (*dot.operands, dot))
    if lhs is not rhs:
        return None
    if lhs is result:
        return lhs if lhs in _FLOATS | _INTEGERS else None
    if {lhs, result} <= _INTEGERS or ({lhs, result} <= _FLOATS and lhs.bytes != result.bytes):
        return result if result.bytes > lhs.bytes else lhs
    return None


def _spread(
    operand: Instruction, dims: Sequence[int], places: Sequence[int], shape: ArrayShape, emitter: Emitter
) -> Instruction:
    """``operand``, whose other dimensions are of one element, with its ``dims`` at ``places`` in ``shape``."""
    given = array_shape(operand)
    value = operand
    if shape.element_type is not given.element_type:
        value = emitter.emit(Opcode.CONVERT, ArrayShape(shape.element_type, given.dims), (value,), like=operand)
    order = (*dims, *(d for d in range(len(given.dims)) if d not in dims))
    if order != tuple(range(len(order))):
        moved = ArrayShape(shape.element_type, tuple(given.dims[d] for d in order))
        value = emitter.emit(Opcode.TRANSPOSE, moved, (value,), DimensionsAttributes(order), like=operand)
    if len(dims) != len(order):
        kept = ArrayShape(shape.element_type, tuple(given.dims[d] for d in dims))
        value = emitter.emit(Opcode.RESHAPE, kept, (value,), like=operand)
    return emitter.emit(Opcode.BROADCAST, shape, (value,), DimensionsAttributes(tuple(places)), like=operand)
