"""Cuts a nest into boxes of its points, within each of which every choice between arrays is the same: a concatenate, a
pad or a roll that the nest reads is then plain loads. Used by fusion and by transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.bounds import bounds_of_type
from flagos_backend.loop_ir.literals import literal_of, number_of
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Region, Shift, below
from flagos_backend.loop_ir.rewriting import Pool, rewrite, rewrite_store

# For each dimension that is cut, where pieces begin but the first.
Cuts = Mapping[int, Sequence[int]]
_DIRECTIONS = frozenset({Comparison.GE.value, Comparison.LT.value})


def threshold(index: Affine, limit: int, dims: Sequence[int]) -> tuple[int, int] | None:
    """The dimension along which ``index < limit`` changes, and the first point there at which it differs from the
    first; that is 0 where it changes nowhere. None where no one dimension tells."""
    if index.shifts:
        return None
    steps = [(abs(c), d) for d, (c, size) in enumerate(zip(index.coefficients, dims, strict=True)) if c and size > 1]
    if not steps:
        return 0, 0
    _, d = max(steps)
    step, size = index.coefficients[d], dims[d]
    others = [index.coefficients[o] * (dims[o] - 1) for _, o in steps if o != d]
    least = index.offset + sum(reach for reach in others if reach < 0)
    most = index.offset + sum(reach for reach in others if reach > 0)
    if step > 0:  # below the limit first, and from some point on no longer
        point = min(max(-((least - limit) // step), 0), size)
        is_clean = point == 0 or (point - 1) * step + most < limit
    else:
        point = min(max((most - limit) // -step + 1, 0), size)
        is_clean = point == 0 or (point - 1) * step + least >= limit
    return (d, point % size) if is_clean else None


def has_choices(region: Region) -> bool:
    """Whether ``region`` chooses between arrays, or between places in one."""
    return next(_choices(region), None) is not None


def cuts_of(region: Region) -> Cuts | None:
    """Where ``region`` has to be cut for its choices to be the same in each box. None where it cannot be: a choice
    depends on more than one dimension, or on a reduced one, or on numbers that are not known; or the region stores to
    what it loads."""
    found: dict[int, set[int]] = {}
    for expression in below(_choices(region)):
        if isinstance(expression, Index | Literal) or _is_joined(expression):
            continue
        place = _threshold_of(expression, region.dims)
        if place is None:
            return None
        d, point = place
        if point:
            found.setdefault(d, set()).add(point)
    stored = {store.target for store in region.stores}
    is_read = any(isinstance(e, Load) and e.source in stored for e in region.expressions())
    if found and (is_read or not found.keys().isdisjoint(region.reduced)):
        return None
    return {d: sorted(points) for d, points in sorted(found.items())}


def boxes(region: Region) -> Sequence[Region] | None:
    """Regions that together store what ``region`` does, without guards and choices of places; itself where it has
    none. None: as ``cuts_of``."""
    if not has_choices(region):
        return (region,)
    cuts = cuts_of(region)
    if cuts is None:
        return None
    if 0 in region.dims:
        cuts = {}
    pieces = [pairwise((0, *cuts.get(d, ()), size)) for d, size in enumerate(region.dims)]
    return [_box(region, box) for box in product(*pieces)]


def _choices(region: Region) -> Iterator[Expression]:
    """What tells whether loads are made, and from where they are."""
    for expression in region.expressions():
        if isinstance(expression, Load):
            if expression.guard is not None:
                yield expression.guard
            for start in expression.index.starts:
                if _is_chosen(start):
                    yield start


def _is_chosen(start: Expression) -> bool:
    """Whether it is one of several numbers that the point alone tells, as choices.py makes them."""
    waiting = [start]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Apply) and value.opcode is Opcode.SELECT:
            condition, *chosen = value.operands
            if not all(_is_joined(e) or _is_compared(e) or isinstance(e, Index | Literal) for e in below((condition,))):
                return False
            waiting += chosen
        elif not isinstance(value, Literal) and not (isinstance(value, Index) and not value.value.shifts):
            return False
    return isinstance(start, Apply)


def _is_joined(expression: Expression) -> bool:
    return isinstance(expression, Apply) and (
        expression.opcode is Opcode.SELECT
        or (expression.opcode is Opcode.AND and expression.element_type is ElementType.PRED)
    )


def _is_compared(expression: Expression) -> bool:
    if not isinstance(expression, Apply) or expression.opcode is not Opcode.COMPARE:
        return False
    index, limit = expression.operands
    return (
        expression.detail in _DIRECTIONS
        and isinstance(index, Index)
        and isinstance(limit, Literal)
        and limit.element_type in (ElementType.S32, ElementType.S64)
    )


def _threshold_of(expression: Expression, dims: Sequence[int]) -> tuple[int, int] | None:
    if not _is_compared(expression):
        return None
    index, limit = expression.operands
    assert isinstance(index, Index)
    assert isinstance(limit, Literal)
    return threshold(index.value, int(number_of(limit)), dims)


def _box(region: Region, box: Sequence[tuple[int, int]]) -> Region:
    """``region`` at its points in ``box``: of each dimension the first, and the one behind the last."""
    pool = Pool()
    moved: dict[Expression, Expression] = {}

    def placed(index: Affine) -> Affine:
        first = sum(c * start for c, (start, _) in zip(index.coefficients, box, strict=True))
        return Affine(index.offset + first, index.coefficients)

    def replace(expression: Expression) -> Expression | None:
        if isinstance(expression, Load):
            return _load(expression, placed, moved)
        if not isinstance(expression, Apply):
            return None
        if _is_compared(expression):
            return _compared(expression, box)  # None: computed for each point, as it was
        first, *others = (moved[operand] for operand in expression.operands)
        if expression.opcode is Opcode.SELECT and isinstance(first, Literal):
            return others[0] if any(first.data) else others[1]
        if expression.opcode is Opcode.AND and expression.element_type is ElementType.PRED:
            for known, other in ((first, others[0]), (others[0], first)):
                if isinstance(known, Literal):
                    return other if any(known.data) else known
        return None

    rewrite(region.expressions(), pool, placed, lambda dims: dims, replace, moved)
    dims = tuple(stop - start for start, stop in box)
    return Region(dims, tuple(rewrite_store(store, placed, moved) for store in region.stores))


def _load(load: Load, placed: Callable[[Affine], Affine], moved: Mapping[Expression, Expression]) -> Expression:
    guard = None if load.guard is None else moved[load.guard]
    if isinstance(guard, Literal):
        if not any(guard.data):
            return Literal(load.element_type, bytes(load.element_type.bytes))  # nobody depends on it
        guard = None
    index, shifts = placed(load.index), []
    for shift in load.index.shifts:
        start = moved[shift.start]
        if isinstance(start, Literal):
            index = replace(index, offset=index.offset + shift.factor * int(number_of(start)))
        elif isinstance(start, Index) and not start.value.shifts:
            index += start.value.scaled(shift.factor)
        else:
            shifts.append(Shift(start, shift.limit, shift.factor))
    return Load(load.element_type, load.source, replace(index, shifts=tuple(shifts)), guard)


def _compared(comparison: Apply, box: Sequence[tuple[int, int]]) -> Literal | None:
    """What it is in all of ``box``, if that is the same."""
    index, limit = comparison.operands
    assert isinstance(index, Index)
    assert isinstance(limit, Literal)
    least = most = index.value.offset
    for coefficient, (start, stop) in zip(index.value.coefficients, box, strict=True):
        ends = coefficient * start, coefficient * (stop - 1)
        least, most = least + min(ends), most + max(ends)
    number, widest = int(number_of(limit)), bounds_of_type(limit.element_type)
    if index.value.shifts or least < widest[0] or most > widest[1] or least < number <= most:
        return None
    return literal_of(int((most < number) == (comparison.detail == Comparison.LT.value)), ElementType.PRED)
