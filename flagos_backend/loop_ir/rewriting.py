"""Moves expressions from one region to another, onto other dimensions, with some replaced. For merges and splits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Load, Reduce, Region, Shift, Store

# Moves what varies of an index, its offset and coefficients, to other dimensions.
IndexMap = Callable[[Affine], Affine]
Moved = Mapping[Expression, Expression]


class Pool:
    """Makes each distinct expression once, so that what two regions compute alike is computed once in their union."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Expression] = {}

    def apply(self, like: Apply, operands: tuple[Expression, ...]) -> Expression:
        key = (like.opcode, like.element_type, like.detail, like.order, *map(_key, operands))
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = Apply(like.element_type, like.opcode, operands, like.detail, like.order)
        return made

    def reduce(self, like: Reduce, value: Expression, initial: Expression, dims: tuple[int, ...]) -> Expression:
        key = (like.combine, like.element_type, dims, _key(value), _key(initial))
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = Reduce(like.element_type, like.combine, value, initial, dims)
        return made


def _key(expression: Expression) -> object:
    """Leaves by what they are; the rest by identity, which the pool that holds it keeps valid."""
    return id(expression) if isinstance(expression, Apply | Reduce) else expression


def rewrite(
    expressions: Iterable[Expression],
    pool: Pool,
    index_map: IndexMap,
    dims: Callable[[tuple[int, ...]], tuple[int, ...]],
    replace: Callable[[Expression], Expression | None],
    moved: dict[Expression, Expression] | None = None,
) -> dict[Expression, Expression]:
    """What each of ``expressions`` (operands first) becomes.

    ``index_map`` moves an index to the new dimensions, ``dims`` the dimensions of a reduction; ``replace`` gives the
    expression that takes the place of an old one, or None to move it. Fills ``moved`` as it goes, if given.
    """
    moved = {} if moved is None else moved
    for expression in expressions:
        found = replace(expression)
        if found is not None:
            moved[expression] = found
        elif isinstance(expression, Load):
            index = _mapped(expression.index, index_map, moved)
            guard = None if expression.guard is None else moved[expression.guard]
            moved[expression] = Load(expression.element_type, expression.source, index, guard)
        elif isinstance(expression, Index):
            moved[expression] = Index(expression.element_type, _mapped(expression.value, index_map, moved))
        elif isinstance(expression, Apply):
            moved[expression] = pool.apply(expression, tuple(moved[o] for o in expression.operands))
        elif isinstance(expression, Reduce):
            value, initial = (moved[o] for o in expression.operands)
            moved[expression] = pool.reduce(expression, value, initial, dims(expression.dims))
        else:
            moved[expression] = expression
    return moved


def rewrite_store(store: Store, index_map: IndexMap, moved: Mapping[Expression, Expression]) -> Store:
    """``store`` of what its value became."""
    return Store(store.target, moved[store.value], _mapped(store.index, index_map, moved))


def replaced(
    region: Region, found: Collection[Expression], make: Callable[[Expression, Moved, Pool], Expression]
) -> Region:
    """``region`` with those in ``found`` replaced; itself where there are none. ``make`` gives what takes the place of
    one, from what its operands became."""
    if not found:
        return region
    pool = Pool()
    moved: dict[Expression, Expression] = {}

    def replace(expression: Expression) -> Expression | None:
        return make(expression, moved, pool) if expression in found else None

    rewrite(region.expressions(), pool, unmoved, lambda dims: dims, replace, moved)
    return Region(region.dims, tuple(rewrite_store(s, unmoved, moved) for s in region.stores))


def _mapped(index: Affine, index_map: IndexMap, moved: Mapping[Expression, Expression]) -> Affine:
    result = index_map(index)
    if not index.shifts:
        return result
    shifts = tuple(Shift(moved[s.start], s.limit, s.factor) for s in index.shifts)
    return Affine(result.offset, result.coefficients, shifts)


def unmoved(index: Affine) -> Affine:
    """The identity, of who stays on the same dimensions."""
    return index
