"""Where numbers would stand in sorted rows: the binary search of ATen, step by step, on the host. Each step reads one
element for each number, so that the search is one loop. On accelerators ATen has it."""

from __future__ import annotations

from math import prod

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.indexing import rows_at
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

aten = torch.ops.aten
E = ElementType
_COMPARED = frozenset({E.F32, E.F64, E.S8, E.S16, E.S32, E.S64, E.U8})
# Longer rows, whose elements are not in caches, are ATen's.
_MOST = 1 << 20


@lowering(aten.searchsorted.Tensor)
def _searchsorted(
    emitter: Emitter,
    result: torch.Tensor,
    rows: Instruction,
    values: Instruction,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Instruction | None = None,
) -> Instruction:
    if sorter is not None:
        raise NoLoweringError("rows that something else sorts are ATen's")
    return _search(emitter, result, rows, values, is_right=right or side == "right")


@lowering(aten.bucketize.Tensor)
def _bucketize(
    emitter: Emitter,
    result: torch.Tensor,
    values: Instruction,
    boundaries: Instruction,
    *,
    out_int32: bool = False,
    right: bool = False,
) -> Instruction:
    return _search(emitter, result, boundaries, values, is_right=right)


def _search(
    emitter: Emitter, result: torch.Tensor, rows: Instruction, values: Instruction, *, is_right: bool
) -> Instruction:
    """The first place in the last dimension of ``rows`` whose element is not less than a value, or, ``is_right``, is
    greater."""
    found, shape = array(rows), array(values)
    if not result.numel():
        raise NoLoweringError("searches for nothing are ATen's")
    if found.element_type is not shape.element_type or found.element_type not in _COMPARED:
        raise NoLoweringError("numbers of these types are compared by ATen")
    if found.rank > 1 and found.dims[:-1] != shape.dims[:-1]:
        raise NoLoweringError("ATen refuses values of other sizes")
    return emitter.convert(first_places(emitter, rows, values, is_right=is_right), element_type(result))


def first_places(emitter: Emitter, rows: Instruction, values: Instruction, *, is_right: bool) -> Instruction:
    """[values' dims] of S64, as ``_search`` has it, for ``rows`` of one dimension or of all of values' but the last."""
    found = array(rows)
    size = found.dims[-1] if found.rank else 0
    if not emitter.on_host or not 0 < size <= _MOST:
        raise NoLoweringError("searches on accelerators, and in nothing, are ATen's")
    dims, flat = array(values).dims, emitter.reshape(rows, (found.num_elements,))
    low, high = (emitter.operand(number, E.S64, dims) for number in (0, size))
    first = emitter.operand(0, E.S64, dims)
    if found.rank > 1:
        row = emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(0), shape=ArrayShape(E.S64, (prod(dims[:-1]),)))
        first = emitter.reshape(row, (*dims[:-1], 1))
        first = emitter.expand(
            emitter.add(Opcode.MULTIPLY, first, emitter.operand(size, E.S64, array(first).dims)), dims
        )
    one, two = (emitter.operand(number, E.S64, dims) for number in (1, 2))
    direction = Comparison.GT if is_right else Comparison.GE
    for _ in range(size.bit_length()):
        middle = emitter.add(Opcode.DIVIDE, emitter.add(Opcode.ADD, low, high), two)
        element = rows_at(emitter, dims, flat, 0, emitter.add(Opcode.ADD, first, middle))
        goes_on = emitter.builder.add(Opcode.COMPARE, [low, high], CompareAttributes(Comparison.LT))
        stays = emitter.builder.add(Opcode.COMPARE, [element, values], CompareAttributes(direction))
        is_after = emitter.add(Opcode.AND, goes_on, emitter.add(Opcode.NOT, stays))
        is_before = emitter.add(Opcode.AND, goes_on, stays)
        low = emitter.add(Opcode.SELECT, is_after, emitter.add(Opcode.ADD, middle, one), low)
        high = emitter.add(Opcode.SELECT, is_before, middle, high)
    emitter.ranges[low] = (0, size)
    return low
