"""Products, convolutions, sums and scattered sums of 16-bit floats as those of F32, rounded once: BLAS, loop nests and
scatters compute these in the program itself. Without instructions for 16-bit products PyTorch loops over elements, some
fifty times as long.

A pass of what emitter.py emits.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from flagos_backend.codegen.cpu.lower.dot import HALF_FLOATS, MAX_VECTORS, sides_of
from flagos_backend.devices.processor import has_products_of
from flagos_backend.ir.attributes import ScatterAttributes
from flagos_backend.ir.cost import instruction_cost
from flagos_backend.ir.elementwise import element_type, reduction_opcode
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.indexing import dims_of
from flagos_backend.passes.rewrite import Emitter, apply_rule, combiner_of

# What a library call costs by itself pays from here on, where the processor has instructions for it.
_MANY_FLOPS = 1 << 24
_ROUNDED = frozenset({Opcode.ADD, Opcode.MULTIPLY})
_MOVES = frozenset({Opcode.TRANSPOSE, Opcode.RESHAPE})


def with_wide_sums(module: Module) -> Module:
    """``module`` with conversions around its sums of 16-bit floats. Equal conversions are not shared yet."""
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode in (Opcode.DOT, Opcode.CONVOLUTION):
        return _wide_product(instruction, emitter)
    # Of a maximum nothing is rounded.
    if instruction.opcode is Opcode.REDUCE and element_type(instruction) in HALF_FLOATS:
        opcode = reduction_opcode(instruction, half_sums=True)
        return None if opcode is None or opcode not in _ROUNDED else _wide_reduction(instruction, opcode, emitter)
    if instruction.opcode is Opcode.SCATTER and element_type(instruction) in HALF_FLOATS:
        return _wide_scatter(instruction, emitter)
    return None


def _wide_scatter(scatter: Instruction, emitter: Emitter) -> Instruction | None:
    """Where an element may be updated more than once; else it is rounded once anyway."""
    attributes, combiner = scatter.attributes_as(ScatterAttributes), scatter.called[0]
    opcode = combiner.root.opcode
    if len(scatter.operands) != 3 or opcode not in _ROUNDED or attributes.unique_indices:
        return None
    if {id(operand) for operand in combiner.root.operands} != {id(p) for p in combiner.parameters}:
        return None
    array, indices, updates = scatter.operands
    batch = (size for d, size in enumerate(dims_of(indices)) if d != attributes.index_vector_dim)
    if prod(batch) <= 1:
        return None
    wide = emitter.put(
        replace(
            scatter,
            operands=(_widened(array, emitter), indices, _widened(updates, emitter)),
            shape=ArrayShape(ElementType.F32, dims_of(scatter)),
            called=(combiner_of(opcode, ElementType.F32),),
            name=f"{scatter.name}.wide",
        )
    )
    return emitter.emit(Opcode.CONVERT, scatter.shape, (wide,), like=scatter)


def _wide_reduction(reduction: Instruction, opcode: Opcode, emitter: Emitter) -> Instruction:
    operands = tuple(_widened(operand, emitter) for operand in reduction.operands)
    shape = ArrayShape(ElementType.F32, dims_of(reduction))
    combine = (combiner_of(opcode, ElementType.F32),)
    wide = emitter.put(
        replace(reduction, operands=operands, shape=shape, called=combine, name=f"{reduction.name}.wide")
    )
    return emitter.emit(Opcode.CONVERT, reduction.shape, (wide,), like=reduction)


def _wide_product(product: Instruction, emitter: Emitter) -> Instruction | None:
    types = [element_type(value) for value in (*product.operands, product)]
    narrow = {*types[:2]}
    if not narrow <= HALF_FLOATS or types[2] not in HALF_FLOATS | {ElementType.F32}:
        return None
    if product.opcode is Opcode.DOT and _has_few_vectors(product):
        return None
    if instruction_cost(product).flops >= _MANY_FLOPS and all(has_products_of(t) for t in narrow if t is not None):
        return None
    operands = tuple(_widened(operand, emitter) for operand in product.operands)
    shape = ArrayShape(ElementType.F32, dims_of(product))
    wide = emitter.put(replace(product, operands=operands, shape=shape, name=f"{product.name}.wide"))
    if types[2] is ElementType.F32:
        return wide
    return emitter.emit(Opcode.CONVERT, product.shape, (wide,), like=product)


def _has_few_vectors(dot: Instruction) -> bool:
    """Whether dot.py reads the matrix as it is, as wide as it has to be read."""
    (_, _, rows), (_, _, columns) = sides_of(dot)
    m, n = (
        prod(dims_of(operand)[d] for d in free) for operand, free in zip(dot.operands, (rows, columns), strict=True)
    )
    return min(m, n) <= MAX_VECTORS


def _widened(operand: Instruction, emitter: Emitter) -> Instruction:
    """``operand`` as F32. What is only another order of something is that of the wide something, which BLAS reads where
    it stands and other products read too."""
    if operand.opcode in _MOVES:
        source = _widened(operand.operands[0], emitter)
        shape = ArrayShape(ElementType.F32, dims_of(operand))
        return emitter.emit(operand.opcode, shape, (source,), operand.attributes, like=operand)
    shape = ArrayShape(ElementType.F32, dims_of(operand))
    return emitter.emit(Opcode.CONVERT, shape, (operand,), like=operand)
