"""Batches of dots of small matrices become sums of dots that add nothing up, which dot_to_multiply.py makes arithmetic.

A library takes a call for each matrix; one loop nest computes the batch, and what is around it. A single small matrix
stays: the native product of it takes 20 ns. Before dot_to_multiply.py. Elements are added up in order, in the type that
products are rounded to.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from math import prod

from flagos_backend.ir.attributes import DotAttributes, SliceAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.dot_to_multiply import multiplied
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape

_HALF = frozenset({ElementType.F16, ElementType.BF16})
#: Products that an element is the sum of, and elements of one matrix of the result, at most: beyond either a library,
#: which reads operands once, takes less time than operations that read them for each element.
MOST_PRODUCTS = 4
MOST_ELEMENTS = 64
#: Matrices of a batch, at least.
LEAST_BATCH = 8


def split_short_contractions(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.DOT:
        return None
    attributes = instruction.attributes_as(DotAttributes)
    lhs, rhs = instruction.operands
    shape = array_shape(instruction)
    if not is_short(instruction) or multiplied(instruction) is None:
        return None
    (of_lhs,), (of_rhs,) = attributes.lhs_contracting, attributes.rhs_contracting
    wide = ArrayShape(ElementType.F32 if shape.element_type in _HALF else shape.element_type, shape.dims)
    terms = [
        emitter.emit(
            Opcode.DOT,
            wide,
            (_part(lhs, of_lhs, number, emitter), _part(rhs, of_rhs, number, emitter)),
            attributes,
            like=instruction,
        )
        for number in range(array_shape(lhs).dims[of_lhs])
    ]
    total = functools.reduce(lambda x, y: emitter.emit(Opcode.ADD, wide, (x, y), like=instruction), terms)
    return total if wide == shape else emitter.emit(Opcode.CONVERT, shape, (total,), like=instruction)


def is_short(dot: Instruction) -> bool:
    """Whether ``dot`` is a batch of small matrices with one contracting dimension, of two to MOST_PRODUCTS."""
    attributes = dot.attributes_as(DotAttributes)
    a, b = (array_shape(operand) for operand in dot.operands)
    batch = prod(a.dims[d] for d in attributes.lhs_batch)
    if len(attributes.lhs_contracting) != 1 or batch < LEAST_BATCH or 0 in array_shape(dot).dims:
        return False
    rows = _free(a.dims, (*attributes.lhs_batch, *attributes.lhs_contracting))
    columns = _free(b.dims, (*attributes.rhs_batch, *attributes.rhs_contracting))
    return 2 <= a.dims[attributes.lhs_contracting[0]] <= MOST_PRODUCTS and rows * columns <= MOST_ELEMENTS


def _free(dims: Sequence[int], used: Collection[int]) -> int:
    return prod(size for d, size in enumerate(dims) if d not in used)


def _part(operand: Instruction, dimension: int, number: int, emitter: Emitter) -> Instruction:
    shape = array_shape(operand)
    starts, limits, dims = [0] * len(shape.dims), list(shape.dims), list(shape.dims)
    starts[dimension], limits[dimension], dims[dimension] = number, number + 1, 1
    window = SliceAttributes(tuple(starts), tuple(limits), (1,) * len(dims))
    return emitter.emit(Opcode.SLICE, ArrayShape(shape.element_type, tuple(dims)), (operand,), window, like=operand)
