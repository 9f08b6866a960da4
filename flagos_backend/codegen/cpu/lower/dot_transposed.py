"""A dot whose dimensions do not group where its operands stand, as a product of operands that are copied first: of the
trace of a product of matrices, one of them is transposed.

Between emitter.py and dot.py.
"""

from __future__ import annotations

from flagos_backend.codegen.cpu.lower.dot import MatrixProduct, as_matrix_product, is_product_operand, sides_of
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.indexing import View, dims_of, row_major
from flagos_backend.loop_ir.region import Affine, Load, Region, Store, axis, linear


def as_arranged_product(dot: Instruction, lhs: View, rhs: View) -> tuple[Region | MatrixProduct, ...] | None:
    """``dot`` of operands that stand where the views say: None for what as_matrix_product takes in no order either."""
    copies = []
    views = [lhs, rhs]
    for number, view in enumerate(views):
        if not is_product_operand(dot, number, view):
            copy, views[number] = _arranged(dot, number, view)
            copies.append(copy)
    product = as_matrix_product(dot, *views)
    return None if product is None else (*copies, product)


def _arranged(dot: Instruction, number: int, view: View) -> tuple[Region, View]:
    """Batches of rows that are reduced, side by side, and where the operand then stands."""
    operand = dot.operands[number]
    assert isinstance(operand.shape, ArrayShape)
    dims, element_type = dims_of(operand), operand.shape.element_type
    batch, contracting, free = sides_of(dot)[number]
    order = (*batch, *free, *contracting)
    arranged = tuple(dims[d] for d in order)
    target = Instruction(
        Opcode.COPY, ArrayShape(element_type, arranged), (operand,), name=f"{dot.name}.{('lhs', 'rhs')[number]}"
    )
    load = Load(element_type, view.buffer, Affine(view.offset, tuple(view.strides[d] for d in order)))
    index = linear(tuple(axis(d, len(order)) for d in range(len(order))), arranged, len(order))
    strides = dict(zip(order, row_major(target, arranged).strides, strict=True))
    return Region(arranged, (Store(target, load, index),)), View(target, tuple(strides[d] for d in range(len(dims))))
