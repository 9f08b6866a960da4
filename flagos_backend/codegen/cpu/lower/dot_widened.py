"""A dot of 16-bit floats as a product of wider ones, which BLAS computes: operands are converted before it and the
result after it. The same for integers whose sums may need more than 32 bits: as doubles every partial sum is exact.

Between emitter.py and dot.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from flagos_backend.codegen.cpu.lower.dot import HALF_FLOATS, INTEGERS, MatrixProduct, as_matrix_product
from flagos_backend.devices.processor import has_products_of
from flagos_backend.ir.attributes import DotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.indexing import View, dims_of, row_major
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Load, Region, Store, axis, linear

E = ElementType
# The greatest magnitude of an element.
_MAGNITUDES = {E.S8: 1 << 7, E.U8: (1 << 8) - 1, E.S16: 1 << 15, E.U16: (1 << 16) - 1}
_RESULTS = INTEGERS | {E.S64, E.U64}


def as_widened_product(dot: Instruction, lhs: View, rhs: View) -> tuple[Region | MatrixProduct, ...] | None:
    """``dot`` of operands that stand where the views say, which is no product by itself; None for other element types,
    for what as_matrix_product does not take, and for a product of bf16 to bf16 of more than a few vectors where the
    processor has instructions for it, which the library uses."""
    if any(0 in dims_of(operand) for operand in dot.operands):
        return None
    if {*map(_type_of, dot.operands), _type_of(dot)} <= HALF_FLOATS:
        sums = replace(dot, shape=ArrayShape(E.F32, dims_of(dot)), name=f"{dot.name}.wide")
        product = as_matrix_product(sums, lhs, rhs)
        if product is not None:
            return product, _narrowed(dot, sums, E.F32)
    types = _types(dot)
    if types is None:
        return None
    computed, between = types
    wide = replace(dot, shape=ArrayShape(computed, dims_of(dot)), name=f"{dot.name}.wide")
    if computed is E.S32:
        product = as_matrix_product(wide, lhs, rhs)
        return None if product is None else (product, _narrowed(dot, wide, between))
    converted = [_converted(dot.operands[n], view, computed) for n, view in enumerate((lhs, rhs))]
    operands = tuple(region.stores[0].target for region in converted)
    wide = replace(wide, operands=operands)
    product = as_matrix_product(wide, *(row_major(o, dims_of(o)) for o in operands))
    if product is None:
        return None
    if computed is _type_of(dot):
        return (*converted, replace(product, result=replace(product.result, buffer=dot)))
    return (*converted, product, _narrowed(dot, wide, between))


def _types(dot: Instruction) -> tuple[ElementType, ElementType] | None:
    """The type to multiply in, and one that its sums become before they become the result's."""
    lhs, rhs, result = *map(_type_of, dot.operands), _type_of(dot)
    if {lhs, rhs} <= HALF_FLOATS and (result in (E.F16, E.F32) or not has_products_of(E.BF16)):
        return E.F32, result
    if not {lhs, rhs} <= INTEGERS or result not in _RESULTS:
        return None
    if result in INTEGERS:
        return E.S32, E.S32
    if not {lhs, rhs} <= _MAGNITUDES.keys():
        return None
    attributes = dot.attributes_as(DotAttributes)
    terms = prod(dims_of(dot.operands[0])[d] for d in attributes.lhs_contracting)
    greatest = terms * _MAGNITUDES[lhs] * _MAGNITUDES[rhs]
    if greatest < 1 << 31:
        return E.S32, E.S32
    return (E.F64, E.S64) if greatest <= 1 << 53 else None


def _type_of(value: Instruction) -> ElementType:
    assert isinstance(value.shape, ArrayShape)
    return value.shape.element_type


def _converted(operand: Instruction, view: View, computed: ElementType) -> Region:
    dims = dims_of(operand)
    load = Load(_type_of(operand), view.buffer, Affine(view.offset, view.strides))
    return _stored(operand, dims, Apply(computed, Opcode.CONVERT, (load,)), f"{operand.name}.wide")


def _narrowed(dot: Instruction, wide: Instruction, between: ElementType) -> Region:
    dims, result = dims_of(dot), _type_of(dot)
    index = linear(tuple(axis(d, len(dims)) for d in range(len(dims))), dims, len(dims))
    value: Expression = Load(_type_of(wide), wide, index)
    if between is not _type_of(wide):
        value = Apply(between, Opcode.CONVERT, (value,))
    if between is not result:
        value = Apply(result, Opcode.CONVERT, (value,))
    return Region(dims, (Store(dot, value, index),))


def _stored(source: Instruction, dims: tuple[int, ...], value: Apply, name: str) -> Region:
    target = Instruction(Opcode.COPY, ArrayShape(value.element_type, dims), (source,), name=name)
    index = linear(tuple(axis(d, len(dims)) for d in range(len(dims))), dims, len(dims))
    return Region(dims, (Store(target, value, index),))
