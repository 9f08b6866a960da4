"""Unrolls a short last dimension, as of the channels of an image: a point is then a pixel, and what its channels have
in common, as where a sample is read, is computed once. Between split_at_seams.py and flatten_addresses.py; the native
library stores up to four neighbours with shuffles."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from flagos_backend.codegen.cpu.transforms.choose_tile_dimension import cost_of
from flagos_backend.codegen.cpu.transforms.unroll_short_rows import can_lengthen
from flagos_backend.loop_ir.region import Affine, Apply, Index, Load, Region, Store
from flagos_backend.loop_ir.rewriting import Pool, rewrite, rewrite_store

# Elements that the native library stores with shuffles, and operations whose tiles stay in the first-level cache.
_MOST, _MAX_OPERATIONS = 4, 64


def with_unrolled_channels(region: Region) -> Region:
    """``region`` with a store for each channel, where that costs less; else itself. Rows that become long ones stay."""
    last = max((d for d, size in enumerate(region.dims) if size > 1), default=None)
    if last is None or region.reductions or 0 in region.dims or not 1 < region.dims[last] <= _MOST:
        return region
    if len({store.target for store in region.stores}) < len(region.stores) or not all(
        store.index.coefficients[last] == 1 and not store.index.shifts for store in region.stores
    ):
        return region
    if can_lengthen(region) or any(isinstance(e, Index) and e.value.coefficients[last] for e in region.expressions()):
        return region
    unrolled = _unrolled(region, last)
    if sum(map(_is_step, unrolled.expressions())) > _MAX_OPERATIONS:
        return region
    return unrolled if _cost(unrolled) < _cost(region) else region


def _is_step(expression: object) -> bool:
    return isinstance(expression, Apply) or (isinstance(expression, Load) and bool(expression.index.shifts))


def _cost(region: Region) -> float:
    return prod(region.dims) * cost_of(region)


def _unrolled(region: Region, last: int) -> Region:
    pool = Pool()
    stores: list[Store] = []
    for channel in range(region.dims[last]):

        def placed(index: Affine, channel: int = channel) -> Affine:
            kept = tuple(0 if d == last else c for d, c in enumerate(index.coefficients))
            return Affine(index.offset + channel * index.coefficients[last], kept)

        moved = rewrite(region.expressions(), pool, placed, lambda dims: dims, lambda _: None)
        stores += [rewrite_store(store, placed, moved) for store in region.stores]
    dims = tuple(1 if d == last else size for d, size in enumerate(region.dims))
    return replace(region, dims=dims, stores=tuple(stores))
