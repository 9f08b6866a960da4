"""Splits a fold over the last dimension and others further out, as over both ends, into two: rows are folded into one
in the order of memory, then that into a few elements. One fold would have a short run for each step further out.

Used by emitter.py; emit_map_loop.py writes the first of the two, emit_row_loop.py the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from flagos_backend.codegen.cpu.emit_row_loop import SHORT_ROW, folds_rows
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import Nest, simplify
from flagos_backend.codegen.cpu.transforms.transpose_short_reductions import stores_only_folds
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape
from flagos_backend.loop_ir.literals import starts_neutral
from flagos_backend.loop_ir.region import Affine, Fold, Load, Region, Store
from flagos_backend.loop_ir.rewriting import Pool, rewrite

# Runs of this many elements are long enough to be folded one by one.
_LONG = 256


def split(region: Region) -> Sequence[Region]:
    """Regions that together store what ``region`` does; itself where its folds are over no short runs far apart."""
    nest = simplify(region)
    if not folds_rows(region, nest) or len(nest.folded) < 2 or not stores_only_folds(region):
        return (region,)
    if nest.dims[-1] >= _LONG or prod(nest.dims[d] for d in nest.folded) <= SHORT_ROW:
        return (region,)
    order = _order(region, nest)
    if order is None or not all(starts_neutral(fold) for fold in region.folds):
        return (region,)

    def place(index: Affine) -> Affine:
        strides = nest.strides(index)
        return Affine(index.offset, tuple(strides[d] for d in order))

    dims = tuple(nest.dims[d] for d in order)
    outer = tuple(n for n, d in enumerate(order) if d in nest.folded[:-1])
    moved = rewrite(region.expressions(), Pool(), place, lambda _: outer, lambda _: None)
    kept = [n for n in range(len(order)) if n not in outer]
    rows = tuple(dims[n] for n in kept)
    row_major = tuple(prod(rows[n + 1 :]) for n in range(len(rows)))
    there = dict(zip(kept, row_major, strict=True))
    partials: dict[Fold, Instruction] = {}
    joins = []
    for store in region.stores:
        fold = store.value
        assert isinstance(fold, Fold)
        if fold not in partials:
            shape = ArrayShape(fold.element_type, (prod(rows),))
            partials[fold] = Instruction(Opcode.COPY, shape, (store.target,), name=f"{store.target.name}.partial")
        load = Load(fold.element_type, partials[fold], Affine(0, row_major))
        join = Fold(fold.element_type, fold.combine, load, moved[fold.initial], (len(rows) - 1,))
        index = place(store.index)
        joins.append(Store(store.target, join, Affine(index.offset, tuple(index.coefficients[n] for n in kept))))
    everywhere = Affine(0, tuple(there.get(n, 0) for n in range(len(dims))))
    stores = tuple(Store(partial, moved[fold], everywhere) for fold, partial in partials.items())
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
