"""Turns a reduction of short rows, as of coordinates, into one of columns: a tile runs along a longer kept dimension.

What many of the reductions read again, and would have to gather, is transposed first. emit_map_loop.py writes the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from flagos_backend.codegen.cpu.emit_row_loop import reduces_rows
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import Nest, simplify
from flagos_backend.codegen.cpu.transforms.unroll_short_rows import LONG
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.region import Affine, Expression, Literal, Load, Reduce, Region, Store, below
from flagos_backend.loop_ir.rewriting import Pool, rewrite

# How often an element is read at least for its transposition to pay, and how far apart elements may be without one.
_REPEATED, _NEAR = 4, 4


def stores_only_reductions(region: Region) -> bool:
    """Whether the region stores nothing but reductions over the same dimensions, none of which needs another, each
    once."""
    stored = {store.value for store in region.stores}
    inside = below(reduction.value for reduction in region.reductions)
    return (
        len({reduction.dims for reduction in region.reductions}) == 1
        and stored == set(region.reductions)
        and all(region.along(store.index).isdisjoint(region.reduced) for store in region.stores)
        and all(isinstance(reduction.initial, Load | Literal) for reduction in region.reductions)
        and not any(isinstance(expression, Reduce) for expression in inside)
    )


def as_columns(region: Region) -> Sequence[Region]:
    """Regions that together store what ``region`` does, the last of them a reduction of columns; ``region`` itself
    where it reduces no short rows, or its columns would be short as well or far apart."""
    nest = simplify(region)
    if not reduces_rows(region, nest) or nest.dims[-1] >= LONG or not stores_only_reductions(region):
        return (region,)
    order = _order(nest)
    if order is None:
        return (region,)
    dims = tuple(nest.dims[d] for d in order)
    copies: list[Region] = []
    loads: dict[Expression, Expression] = {}

    def index_map(index: Affine) -> Affine:
        strides = nest.strides(index)
        return Affine(index.offset, tuple(strides[d] for d in order))

    for load in region.expressions():
        if not isinstance(load, Load) or index_map(load.index).coefficients[-1] in (0, 1):
            continue
        index = index_map(load.index)
        used = [d for d, stride in enumerate(index.coefficients) if stride]
        if prod(dims[d] for d in used) * _REPEATED <= prod(dims):
            store = _transposition(load, index, [dims[d] for d in used], used)
            copies.append(Region(tuple(dims[d] for d in used), (store,)))
            there = dict(zip(used, store.index.coefficients, strict=True))
            loads[load] = Load(
                load.element_type, store.target, Affine(0, tuple(there.get(d, 0) for d in range(len(dims))))
            )
        elif abs(index.coefficients[-1]) > _NEAR:
            return (region,)
    reduced = tuple(n for n, d in enumerate(order) if d in nest.reduced)
    moved = rewrite(region.expressions(), Pool(), index_map, lambda _: reduced, loads.get)
    stores = tuple(Store(s.target, moved[s.value], index_map(s.index)) for s in region.stores)
    return [*copies, Region(dims, stores)]


def _order(nest: Nest) -> list[int] | None:
    """The dimensions of ``nest`` with the longest of those that are kept last."""
    kept = [d for d in range(len(nest.dims)) if d not in nest.reduced]
    longest = max(kept, key=lambda d: (nest.dims[d], d), default=None)
    if longest is None or nest.dims[longest] < LONG:
        return None
    return [*(d for d in kept if d != longest), *nest.reduced, longest]


def _transposition(load: Load, index: Affine, sizes: list[int], used: list[int]) -> Store:
    """What ``load`` reads along the dimensions ``used``, in their order."""
    shape = ArrayShape(load.element_type, tuple(sizes))
    target = Instruction(Opcode.COPY, shape, (load.source,), name=f"{load.source.name}.transposed")
    value = Load(load.element_type, load.source, Affine(index.offset, tuple(index.coefficients[d] for d in used)))
    row_major = tuple(prod(sizes[n + 1 :]) for n in range(len(sizes)))
    return Store(target, value, Affine(0, row_major))
