"""Splits a reduction over the last dimension and others further out, as over both ends, into two: rows are reduced into
one in the order of memory, then that into a few elements. One reduction would have a short run for each step further
out.

Used by emitter.py; emit_map_loop.py writes the first of the two, emit_row_loop.py the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from flagos_backend.codegen.cpu.emit_row_loop import SHORT_ROW, reduces_rows
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import Nest, simplify
from flagos_backend.codegen.cpu.transforms.transpose_short_reductions import stores_only_reductions
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.literals import starts_neutral
from flagos_backend.loop_ir.region import Affine, Load, Reduce, Region, Store
from flagos_backend.loop_ir.rewriting import Pool, rewrite

# Runs of this many elements are long enough to be reduced one by one.
_LONG = 256


def split(region: Region) -> Sequence[Region]:
    """Regions that together store what ``region`` does; itself where its reductions are over no short runs far
    apart."""
    nest = simplify(region)
    if not reduces_rows(region, nest) or len(nest.reduced) < 2 or not stores_only_reductions(region):
        return (region,)
    if nest.dims[-1] >= _LONG or prod(nest.dims[d] for d in nest.reduced) <= SHORT_ROW:
        return (region,)
    order = _order(region, nest)
    if order is None or not all(starts_neutral(reduction) for reduction in region.reductions):
        return (region,)

    def index_map(index: Affine) -> Affine:
        strides = nest.strides(index)
        return Affine(index.offset, tuple(strides[d] for d in order))

    dims = tuple(nest.dims[d] for d in order)
    outer = tuple(n for n, d in enumerate(order) if d in nest.reduced[:-1])
    moved = rewrite(region.expressions(), Pool(), index_map, lambda _: outer, lambda _: None)
    kept = [n for n in range(len(order)) if n not in outer]
    rows = tuple(dims[n] for n in kept)
    row_major = tuple(prod(rows[n + 1 :]) for n in range(len(rows)))
    there = dict(zip(kept, row_major, strict=True))
    partials: dict[Reduce, Instruction] = {}
    joins = []
    for store in region.stores:
        reduction = store.value
        assert isinstance(reduction, Reduce)
        if reduction not in partials:
            shape = ArrayShape(reduction.element_type, (prod(rows),))
            partials[reduction] = Instruction(Opcode.COPY, shape, (store.target,), name=f"{store.target.name}.partial")
        load = Load(reduction.element_type, partials[reduction], Affine(0, row_major))
        join = Reduce(reduction.element_type, reduction.combine, load, moved[reduction.initial], (len(rows) - 1,))
        index = index_map(store.index)
        joins.append(Store(store.target, join, Affine(index.offset, tuple(index.coefficients[n] for n in kept))))
    everywhere = Affine(0, tuple(there.get(n, 0) for n in range(len(dims))))
    stores = tuple(Store(partial, moved[reduction], everywhere) for reduction, partial in partials.items())
    return [Region(dims, stores), Region(rows, tuple(joins))]


def _order(region: Region, nest: Nest) -> list[int] | None:
    """The dimensions of ``nest`` as they follow each other in the largest array that is contiguous along the last."""
    loads = [nest.strides(e.index) for e in region.expressions() if isinstance(e, Load)]
    contiguous = [strides for strides in loads if strides[-1] == 1]
    if not contiguous:
        return None
    strides = max(contiguous, key=lambda strides: prod(n for n, s in zip(nest.dims, strides, strict=True) if s))
    inner = range(len(nest.dims) - 1)
    return [*sorted(inner, key=lambda d: (strides[d] != 0, -abs(strides[d]))), len(nest.dims) - 1]
