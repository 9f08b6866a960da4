"""Dots of which nothing is left but sums, as inner products, become sums of products of elements: folds, which threads
and programs share out, where a library would make a matrix of one element, or a batch of those.

After the passes of pipeline.py and after match, as outer_products.py.
"""

from __future__ import annotations

from flagos_backend.ir.attributes import ConstantAttributes, DimensionsAttributes, DotAttributes, ParameterAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.outer_products import multiplied
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape

_HALF = frozenset({ElementType.F16, ElementType.BF16})


def inner_products(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.DOT:
        return None
    attributes = instruction.attributes_as(DotAttributes)
    lhs, rhs = instruction.operands
    shape, a, b = array_shape(instruction), array_shape(lhs), array_shape(rhs)
    element_type = multiplied(a.element_type, b.element_type, shape.element_type)
    # Of each dimension of the left operand, the one of the right operand that it meets.
    pairs = zip(
        (*attributes.lhs_batch, *attributes.lhs_contracting),
        (*attributes.rhs_batch, *attributes.rhs_contracting),
        strict=True,
    )
    meets = sorted(pairs)
    nothing_is_free = len(meets) == len(a.dims) == len(b.dims)
    # Elements that lie in another order would be gathered, one by one.
    if element_type is None or not nothing_is_free or any(d != other for d, other in meets):
        return None
    # As dots have it: what is added up is rounded once.
    element_type = ElementType.F32 if element_type in _HALF else element_type
    wide = ArrayShape(element_type, a.dims)
    product = emitter.emit(
        Opcode.MULTIPLY, wide, [_converted(operand, element_type, emitter) for operand in (lhs, rhs)], like=instruction
    )
    scalar = ArrayShape(element_type, ())
    zero = emitter.emit(Opcode.CONSTANT, scalar, (), ConstantAttributes(bytes(element_type.bytes)), like=instruction)
    folded = tuple(sorted(attributes.lhs_contracting))
    kept = sorted(attributes.lhs_batch)
    total = emitter.emit(
        Opcode.REDUCE,
        ArrayShape(element_type, tuple(a.dims[d] for d in kept)),
        (product, zero),
        DimensionsAttributes(folded),
        (_sum(scalar),),
        like=instruction,
    )
    total = _converted(total, shape.element_type, emitter)
    order = tuple(kept.index(d) for d in attributes.lhs_batch)
    if order == tuple(range(len(order))):
        return total
    return emitter.emit(Opcode.TRANSPOSE, shape, (total,), DimensionsAttributes(order), like=instruction)


def _converted(operand: Instruction, element_type: ElementType, emitter: Emitter) -> Instruction:
    given = array_shape(operand)
    if given.element_type is element_type:
        return operand
    return emitter.emit(Opcode.CONVERT, ArrayShape(element_type, given.dims), (operand,), like=operand)


def _sum(scalar: ArrayShape) -> Computation:
    x, y = (
        Instruction(Opcode.PARAMETER, scalar, (), ParameterAttributes(number), name=name)
        for number, name in enumerate("xy")
    )
    total = Instruction(Opcode.ADD, scalar, (x, y), name="sum")
    return Computation("sum", (x, y, total), total)
