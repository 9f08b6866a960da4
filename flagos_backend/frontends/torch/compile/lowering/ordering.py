"""The greatest or least elements of rows, which are in order and stand where ATen's do but for equal ones; and, on the
host, sorts. Accelerators leave these to ATen."""

from __future__ import annotations

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes, SortAttributes, TopKAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape

aten = torch.ops.aten
E = ElementType
_ORDERED = frozenset({E.F32, E.F16, E.BF16, E.S8, E.S16, E.S32, E.U8})
_SORTED = _ORDERED | {E.PRED, E.F64, E.S64}
# What the kernels of accelerators keep of a row; more is most of a sort.
_MAX_K = 64


@lowering(aten.topk.default)
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
    values, places = (emitter.builder.element(best, number) for number in range(2))
    emitter.ranges[places] = (0, array(rows).dims[-1] - 1)
    return emitter.transpose(values, back), emitter.convert(emitter.transpose(places, back), E.S64)


@lowering(aten.sort.default)
def _sort(
    emitter: Emitter, result: tuple[torch.Tensor, ...], x: Instruction, dim: int = -1, descending: bool = False
) -> tuple[Instruction, Instruction]:
    return _sorted(emitter, x, dim, descending)


@lowering(aten.sort.stable)
def _stable_sort(
    emitter: Emitter,
    result: tuple[torch.Tensor, ...],
    x: Instruction,
    *,
    stable: bool | None,
    dim: int = -1,
    descending: bool = False,
) -> tuple[Instruction, Instruction]:
    return _sorted(emitter, x, dim, descending)


def _sorted(emitter: Emitter, x: Instruction, dim: int, descending: bool) -> tuple[Instruction, Instruction]:
    """The elements in order, and where they were. Equal ones keep theirs; NaN is the greatest number."""
    shape = array(x)
    if not emitter.on_host:
        raise NoLoweringError("sorts are ATen's on accelerators")
    if shape.element_type not in _SORTED or not shape.rank or not shape.num_elements:
        raise NoLoweringError("sorts of this type, and of nothing, are ATen's")
    dim %= shape.rank
    positions = emitter.builder.add(Opcode.IOTA, (), DimensionAttributes(dim), shape=ArrayShape(E.S64, shape.dims))
    both = emitter.builder.add(
        Opcode.SORT,
        [x, positions],
        SortAttributes(dim, True),
        shape=TupleShape((shape, ArrayShape(E.S64, shape.dims))),
        called=[_comes_first(shape.element_type, descending)],
    )
    values, places = (emitter.builder.element(both, number) for number in range(2))
    emitter.ranges[places] = (0, shape.dims[dim] - 1)
    return values, places


def _comes_first(kind: ElementType, descending: bool) -> Computation:
    """Whether an element, which may be a float that is no number, comes before another."""
    builder = Builder(f"{'greater' if descending else 'less'}_{kind.name.lower()}")
    a, b, _, _ = (builder.parameter(ArrayShape(t)) for t in (kind, kind, E.S64, E.S64))

    def key(x: Instruction) -> Instruction:
        if not kind.is_float:
            return x
        zero, nan = builder.scalar(0.0, kind), builder.scalar(float("nan"), kind)
        is_zero = builder.add(Opcode.COMPARE, [x, zero], CompareAttributes(Comparison.EQ))
        is_nan = builder.add(Opcode.COMPARE, [x, x], CompareAttributes(Comparison.NE))
        return builder.add(Opcode.SELECT, [is_nan, nan, builder.add(Opcode.SELECT, [is_zero, zero, x])])

    order = ComparisonOrder.TOTAL if kind.is_float else ComparisonOrder.PARTIAL
    direction = Comparison.GT if descending else Comparison.LT
    return builder.build(builder.add(Opcode.COMPARE, [key(a), key(b)], CompareAttributes(direction, order)))
