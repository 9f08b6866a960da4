"""The greatest or least elements of rows, which are in order and stand where ATen's do but for equal ones."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import CompareAttributes, TopKAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape

aten = torch.ops.aten
E = ElementType
_ORDERED = frozenset({E.F32, E.F16, E.BF16, E.S8, E.S16, E.S32, E.U8})
# What the kernels of accelerators keep of a row; more is most of a sort.
_MAX_K = 64


@lowering(aten.topk.default, on_host=False)
def _topk(
    emitter: Emitter,
    result: tuple[torch.Tensor, torch.Tensor],
    x: Instruction,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Instruction, Instruction]:
    shape = array(x)
    if shape.element_type not in _ORDERED or not shape.rank or not 0 < k <= _MAX_K or not shape.num_elements:
        raise NoLoweringError("rows of this type, or so many elements of each, are ATen's")
    if shape.element_type.is_float:  # any NaN is the greatest number, whatever its sign
        is_nan = emitter.builder.add(Opcode.COMPARE, [x, x], CompareAttributes(Comparison.NE))
        x = emitter.add(Opcode.SELECT, is_nan, emitter.operand(float("nan"), shape.element_type, shape.dims), x)
    order = [d for d in range(shape.rank) if d != dim % shape.rank] + [dim % shape.rank]
    back = [order.index(d) for d in range(shape.rank)]
    rows = emitter.transpose(x, order)
    dims = (*array(rows).dims[:-1], k)
    found = TupleShape((ArrayShape(shape.element_type, dims), ArrayShape(E.S32, dims)))
    best = emitter.builder.add(Opcode.TOP_K, [rows], TopKAttributes(k, largest), shape=found)
    values, places = (emitter.transpose(emitter.builder.element(best, number), back) for number in range(2))
    return values, emitter.convert(places, E.S64)
