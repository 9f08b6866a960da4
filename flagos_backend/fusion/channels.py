"""Makes a short dimension of a region, as the coordinates of a point, one operation for each of its positions. Between
fuse.py and merge.py.

What reduces such a dimension is a few operations then, and what keeps it beside a reduction is a few reductions, that
read what they share once. Both walk the dimensions that are left, so that one kernel can be both: forces between
particles need no array of pairs. What is computed of such a result is unrolled too, or it could not join them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from flagos_backend.fusion.schedule import Schedule
from flagos_backend.fusion.updates import copied, sources, targets
from flagos_backend.ir.hlo import Instruction
from flagos_backend.loop_ir.flat import FlatComputation
from flagos_backend.loop_ir.literals import starts_neutral, uniform_literal
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Load, Reduce, Region, Store
from flagos_backend.loop_ir.rewriting import Pool

# How long such a dimension is, at most, and how many operations a region may then have.
_MOST = 4
_MAX_OPERATIONS = 96
# How many points are left, at least: fewer are rather spread over more of the device.
_LEAST_POINTS = 1 << 14
# Of how many times fewer points something is whose way through memory does not count.
_MUCH_SMALLER = 8
# Narrower ones are added up wider, and rounded once.
_LEAST_FLOAT_BYTES = 4


def with_unrolled_channels(computation: FlatComputation, schedule: Schedule) -> Schedule:
    """``schedule`` of ``computation`` with its regions unrolled where that pays."""
    items = [_unrolled_reductions(item) for item in schedule.items]
    beside = _Beside(computation, schedule)
    for before, after in zip(schedule.items, items, strict=True):
        if after is not before and isinstance(after, Region):
            beside.add(after)
    if not beside.points:
        return schedule
    for number in (*range(len(items)), *reversed(range(len(items)))):
        item = items[number]
        if isinstance(item, Region) and item is schedule.items[number]:
            items[number] = unrolled = beside.unrolled(item)
            if unrolled is not item:
                beside.add(unrolled)
    return replace(schedule, items=tuple(items))


class _Beside:
    """What was unrolled so far. ``points``: of each buffer that it makes or reads, how many points the largest has."""

    def __init__(self, computation: FlatComputation, schedule: Schedule) -> None:
        self.points: dict[Instruction, int] = {}
        self._left: Counter[Instruction] = Counter(schedule.buffers[output] for output in computation.outputs)
        for item in schedule.items:
            self._left.update(dict.fromkeys(schedule.reads(computation, item), 1))

    def add(self, region: Region) -> None:
        for buffer in (*sources(region), *targets(region)):
            self.points[buffer] = max(self.points.get(buffer, 0), prod(region.dims))
        self._left.subtract(dict.fromkeys(sources(region), 1))

    def unrolled(self, region: Region) -> Region:
        """``region``, which only computes, unrolled where it is small beside what makes or reads one of its buffers, or
        as large as all that read what it makes."""
        last = max((d for d, size in enumerate(region.dims) if size > 1), default=None)
        if last is None or region.dims[last] > _MOST or region.reductions or copied(region) is not None:
            return region
        if any(store.index.coefficients[last] != 1 for store in region.stores):
            return region
        points = max((self.points.get(buffer, 0) for buffer in (*sources(region), *targets(region))), default=0)
        is_small = prod(region.dims) * _MUCH_SMALLER <= points
        readers = [self.points.get(buffer, 0) * (not self._left[buffer]) for buffer in targets(region)]
        if not is_small and set(readers) != {prod(region.dims) // region.dims[last]}:
            return region
        return _if_small(region, unrolled(region, last), 1)


def _unrolled_reductions(item: Region | Instruction) -> Region | Instruction:
    if not isinstance(item, Region) or not item.reductions or copied(item) is not None:
        return item
    region = item
    for d in reversed(range(region.rank)):
        if 1 < region.dims[d] <= _MOST and (_reduces(region, d) or _is_kept(region, d)):
            region = _if_small(region, unrolled(region, d), _LEAST_POINTS)
    return region


def _if_small(region: Region, unrolled: Region, points: int) -> Region:
    operations = sum(isinstance(e, Apply) for e in unrolled.expressions())
    return unrolled if operations <= _MAX_OPERATIONS and prod(unrolled.dims) >= points else region


def _reduces(region: Region, d: int) -> bool:
    """Whether ``d`` is reduced, exactly as its type has it, and what steps along it is small: from memory whole rows
    are faster read and written as they stand."""
    reductions = [reduction for reduction in region.reductions if d in reduction.dims]
    types = [reduction.element_type for reduction in reductions]
    is_exact = all(not t.is_float or t.bytes >= _LEAST_FLOAT_BYTES for t in types) and not any(
        t.is_complex for t in types
    )
    loads = [e.index for e in region.expressions() if isinstance(e, Load)]
    along = [index for index in (*loads, *(store.index for store in region.stores)) if d in region.along(index)]
    points = prod(region.dims)
    return (
        bool(reductions)
        and is_exact
        and all(prod(region.dims[o] for o in region.along(index)) * _MUCH_SMALLER <= points for index in along)
    )


def _is_kept(region: Region, d: int) -> bool:
    """Whether ``d`` is kept beside all reductions, and either steps through memory faster than any other dimension does
    or shares an array of all the others."""
    if any(d in reduction.dims or reduction.element_type.is_complex for reduction in region.reductions):
        return False
    loads = [e.index for e in region.expressions() if isinstance(e, Load)]
    others = {o for o, size in enumerate(region.dims) if size > 1 and o != d}
    if any(region.along(index) == others for index in loads):
        return True
    along = [index for index in (*loads, *(store.index for store in region.stores)) if index.coefficients[d]]
    return bool(along) and all(
        all(not c or abs(c) > abs(index.coefficients[d]) for other, c in enumerate(index.coefficients) if other != d)
        for index in along
    )


def unrolled(region: Region, d: int) -> Region:
    """``region`` with dimension ``d``, of some positions, as one of size 1. Its points are those that are left, each
    for all positions; reductions over ``d`` are taken in order."""
    pool, size = Pool(), region.dims[d]
    at: dict[Expression, tuple[Expression, ...]] = {}  # for each position; of one what is the same at all of them

    def placed(index: Affine, position: int) -> Affine:
        kept = tuple(0 if other == d else c for other, c in enumerate(index.coefficients))
        shifts = tuple(replace(shift, start=_at(at, shift.start, position)) for shift in index.shifts)
        return Affine(index.offset + position * index.coefficients[d], kept, shifts)

    def made(e: Expression, position: int) -> Expression:
        if isinstance(e, Load):
            guard = None if e.guard is None else _at(at, e.guard, position)
            return Load(e.element_type, e.source, placed(e.index, position), guard)
        if isinstance(e, Index):
            return Index(e.element_type, placed(e.value, position))
        operands = tuple(_at(at, operand, position) for operand in e.operands)
        if isinstance(e, Apply):
            return pool.apply(e, operands)
        return pool.reduce(e, operands[0], operands[1], e.dims) if isinstance(e, Reduce) else e

    for e in region.expressions():
        if isinstance(e, Reduce) and d in e.dims:
            value, initial = e.operands
            values = [_at(at, value, position) for position in range(size)]
            at[e] = (_reduced(e, values, _at(at, initial, 0), tuple(o for o in e.dims if o != d), pool),)
        else:
            positions = range(size if d in region.reach[e] else 1)
            at[e] = tuple(made(e, position) for position in positions)
    stores: list[Store] = []
    for store in region.stores:
        for position in range(size if store.index.coefficients[d] else 1):
            stores.append(Store(store.target, _at(at, store.value, position), placed(store.index, position)))
    return Region(tuple(1 if o == d else size for o, size in enumerate(region.dims)), tuple(stores))


def _at(at: dict[Expression, tuple[Expression, ...]], e: Expression, position: int) -> Expression:
    found = at[e]
    return found[position if len(found) > 1 else 0]


def _reduced(
    reduction: Reduce, values: Sequence[Expression], initial: Expression, dims: tuple[int, ...], pool: Pool
) -> Expression:
    def combined(first: Expression, second: Expression) -> Expression:
        like = Apply(reduction.element_type, reduction.combine, (first, second))
        return pool.apply(like, like.operands)

    if isinstance(initial, Load):
        initial = uniform_literal(initial.source) or initial
    value, *others = values
    for other in others:
        value = combined(value, other)
    if dims:
        return pool.reduce(reduction, value, initial, dims)
    starts = replace(reduction, initial=initial)
    return value if starts_neutral(starts) else combined(initial, value)
