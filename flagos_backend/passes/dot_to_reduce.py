"""Dots of which nothing is left but sums, as inner products, become sums of products of elements: reductions, which
threads and programs share out, where a library would make a matrix of one element, or a batch of those.

Its place in the pipeline is that of dot_to_multiply.py.
"""

from __future__ import annotations

from collections.abc import Collection

from flagos_backend.ir.attributes import ConstantAttributes, DimensionsAttributes, DotAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.dot_to_multiply import multiplied
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape, sum_of

_HALF = frozenset({ElementType.F16, ElementType.BF16})


def dot_to_reduce(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.DOT:
        return None
    attributes = instruction.attributes_as(DotAttributes)
    lhs, rhs = instruction.operands
    shape, a, b = array_shape(instruction), array_shape(lhs), array_shape(rhs)
    element_type = multiplied(instruction)
    of_lhs = (*attributes.lhs_batch, *attributes.lhs_contracting)
    of_rhs = (*attributes.rhs_batch, *attributes.rhs_contracting)
    if element_type is None or _has_free(a, of_lhs) or _has_free(b, of_rhs):
        return None
    # Where each dimension of the sums is in the operands, without those of one element that are free. Elements that lie
    # in another order would be gathered, one by one.
    order = [sorted(of_lhs).index(d) for d in of_lhs]
    if order != [sorted(of_rhs).index(d) for d in of_rhs]:
        return None
    # As dots have it: what is added up is rounded once.
    element_type = ElementType.F32 if element_type in _HALF else element_type
    wide = ArrayShape(element_type, tuple(a.dims[d] for d in sorted(of_lhs)))
    factors = [_reshaped(_converted(operand, element_type, emitter), wide.dims, emitter) for operand in (lhs, rhs)]
    product = emitter.emit(Opcode.MULTIPLY, wide, factors, like=instruction)
    scalar = ArrayShape(element_type, ())
    zero = emitter.emit(Opcode.CONSTANT, scalar, (), ConstantAttributes(bytes(element_type.bytes)), like=instruction)
    batch = order[: len(attributes.lhs_batch)]
    kept = sorted(batch)
    total = emitter.emit(
        Opcode.REDUCE,
        ArrayShape(element_type, tuple(wide.dims[d] for d in kept)),
        (product, zero),
        DimensionsAttributes(tuple(sorted(order[len(batch) :]))),
        (sum_of(element_type),),
        like=instruction,
    )
    total = _converted(total, shape.element_type, emitter)
    if batch != kept:
        moved = ArrayShape(shape.element_type, tuple(wide.dims[d] for d in batch))
        places = DimensionsAttributes(tuple(kept.index(d) for d in batch))
        total = emitter.emit(Opcode.TRANSPOSE, moved, (total,), places, like=instruction)
    return _reshaped(total, shape.dims, emitter)


def _has_free(shape: ArrayShape, used: Collection[int]) -> bool:
    """Whether other dimensions have more than one element, or none."""
    return any(size != 1 for d, size in enumerate(shape.dims) if d not in used)


def _reshaped(operand: Instruction, dims: tuple[int, ...], emitter: Emitter) -> Instruction:
    given = array_shape(operand)
    if given.dims == dims:
        return operand
    return emitter.emit(Opcode.RESHAPE, ArrayShape(given.element_type, dims), (operand,), like=operand)


def _converted(operand: Instruction, element_type: ElementType, emitter: Emitter) -> Instruction:
    given = array_shape(operand)
    if given.element_type is element_type:
        return operand
    return emitter.emit(Opcode.CONVERT, ArrayShape(element_type, given.dims), (operand,), like=operand)
