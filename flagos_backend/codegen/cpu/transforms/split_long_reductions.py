"""Cuts long rows of which there are few, as a sum over all of an array has one, into parts that threads share out. The
parts are cut by shape alone, so that results are the same on all machines. emit_row_loop.py writes what becomes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from flagos_backend.codegen.cpu.emit_row_loop import reduces_rows
from flagos_backend.codegen.cpu.transforms.collapse_dimensions import Nest, simplify
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.literals import starts_neutral
from flagos_backend.loop_ir.region import Affine, Expression, Load, Reduce, Region, Store, axis, below, linear
from flagos_backend.loop_ir.rewriting import Pool, rewrite, rewrite_store

# A part of this many elements takes some microseconds, which is what it costs to wake a thread.
_PART = 16384
_LONG = 8 * _PART
# As many parts as this are enough for all threads, with some to even out.
_PARTS = 64
_HALF = frozenset({ElementType.F16, ElementType.BF16})
_ROUNDS = frozenset({Opcode.ADD, Opcode.MULTIPLY})


def in_parts(region: Region) -> Sequence[Region]:
    """Regions that together store what ``region`` does, the last of them from what the parts of rows came to; itself
    where its rows are many or not long, or where more is done along them than reducing."""
    nest = simplify(region)
    if not reduces_rows(region, nest) or not _can_be_cut(region):
        return (region,)
    first = nest.reduced[0]
    rows, length = prod(nest.dims[:first]), prod(nest.dims[first:])
    size = nest.dims[first]
    most = min(_PARTS // max(rows, 1), length // _PART, size)
    if length < _LONG or most < 2:
        return (region,)
    # What is left over is one thread's: of half as many parts and more, those that leave it the least.
    count = min(range(most, most // 2, -1), key=lambda count: size // count + size % count)
    step = size // count
    rest = size - step * count
    pieces = [(0, count, step), *([(step * count, 1, rest)] if rest else [])]
    kept = (*nest.dims[:first], count + len(pieces) - 1)
    partials = {
        reduction: Instruction(
            Opcode.COPY,
            ArrayShape(reduction.element_type, kept),
            (region.stores[0].target,),
            name=f"{region.stores[0].target.name}.part{number}",
        )
        for number, reduction in enumerate(region.reductions)
    }
    parts = [_part(region, nest, piece, number * count, partials, kept) for number, piece in enumerate(pieces)]
    return [*parts, _joined(region, nest, partials, kept)]


def _can_be_cut(region: Region) -> bool:
    """Whether it stores nothing for each element, no reduction needs another one, and no part would lose half of its
    digits; those of f32 and f64 are rounded where the sum of the whole row has some more."""
    reduced = frozenset(region.reduced)
    inside = below(reduction.value for reduction in region.reductions)
    return (
        not any(isinstance(expression, Reduce) for expression in inside)
        and all(region.reach[store.value].isdisjoint(reduced) for store in region.stores)
        and all(region.along(store.index).isdisjoint(reduced) for store in region.stores)
        and all(starts_neutral(reduction) for reduction in region.reductions)
        and not any(reduction.element_type in _HALF and reduction.combine in _ROUNDS for reduction in region.reductions)
    )


def _row_major(dims: tuple[int, ...], behind: int = 0) -> Affine:
    """Where what becomes of each part stands, of ``dims``; of ``behind`` more dimensions it says nothing."""
    rank = len(dims) + behind
    return linear(tuple(axis(d, rank) for d in range(len(dims))), dims, rank)


def _part(
    region: Region,
    nest: Nest,
    piece: tuple[int, int, int],
    offset: int,
    partials: dict[Reduce, Instruction],
    kept: tuple[int, ...],
) -> Region:
    """What reduces ``piece``: where in the first of the reduced dimensions it begins, into how many parts it is cut,
    and of how many steps each is. Its first part is number ``offset`` of each row of ``kept``."""
    start, count, step = piece
    first = nest.reduced[0]

    def moved_to(index: Affine) -> Affine:
        strides = nest.strides(index)
        along = strides[first]
        return Affine(index.offset + start * along, (*strides[:first], along * step, along, *strides[first + 1 :]))

    dims = (*nest.dims[:first], count, step, *nest.dims[first + 1 :])
    reduced = tuple(range(first + 1, len(dims)))
    moved = rewrite(region.expressions(), Pool(), moved_to, lambda _: reduced, lambda _: None)
    place = _row_major(kept, len(reduced))
    there = Affine(place.offset + offset, place.coefficients)
    return Region(dims, tuple(Store(partial, moved[reduction], there) for reduction, partial in partials.items()))


def _joined(region: Region, nest: Nest, partials: dict[Reduce, Instruction], kept: tuple[int, ...]) -> Region:
    pool, first = Pool(), nest.reduced[0]

    def moved_to(index: Affine) -> Affine:
        return Affine(index.offset, (*nest.strides(index)[:first], 0))

    moved: dict[Expression, Expression] = {}

    def replace(expression: Expression) -> Expression | None:
        if not isinstance(expression, Reduce):
            return None
        load = Load(expression.element_type, partials[expression], _row_major(kept))
        return pool.reduce(expression, load, moved[expression.initial], (first,))

    needed = {reduction.initial for reduction in region.reductions}
    needed.update(below((store.value for store in region.stores), stop=region.reductions))
    rewrite([e for e in region.expressions() if e in needed], pool, moved_to, lambda dims: dims, replace, moved)
    return Region(kept, tuple(rewrite_store(store, moved_to, moved) for store in region.stores))
