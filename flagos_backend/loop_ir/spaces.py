"""Brings two regions onto common dimensions, so that they can become one. Used by merge.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from flagos_backend.loop_ir.region import Affine, Expression, Load, Region, Store
from flagos_backend.loop_ir.rewriting import Pool, rewrite, rewrite_store, unmoved


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the dimensions of a region go: ``parts[d]`` are the new ones that dimension d becomes, outermost first.

    ``dims``: the sizes of all new dimensions, those of other regions included.
    """

    dims: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]

    def index(self, old: Affine) -> Affine:
        coefficients = [0] * len(self.dims)
        for coefficient, parts in zip(old.coefficients, self.parts, strict=True):
            for d in reversed(parts):
                coefficients[d] = coefficient
                coefficient *= self.dims[d]
        return Affine(old.offset, tuple(coefficients))

    def reduced(self, old: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(new for d in old for new in self.parts[d]))


def common_dims(
    inner: Sequence[int], outer: Sequence[int], covered: Sequence[int]
) -> tuple[Placement, Placement] | None:
    """Dimensions on which a region of ``inner`` walks what one of ``outer`` walks along its dimensions ``covered``.

    None when one's steps do not divide the other's. Dimensions of size 1 vanish.
    """
    if 0 in inner or 0 in outer:
        return None
    sizes = _refined(inner, [outer[d] for d in covered])
    if sizes is None:
        return None
    dims: list[int] = []
    outer_parts: list[tuple[int, ...]] = []
    places: list[int] = []  # of the refined sizes
    rest = list(sizes)
    for d, size in enumerate(outer):
        taken = [size] if size != 1 else []
        if d in covered:
            taken = _take(rest, size)
            places.extend(range(len(dims), len(dims) + len(taken)))
        outer_parts.append(tuple(range(len(dims), len(dims) + len(taken))))
        dims.extend(taken)
    inner_parts: list[tuple[int, ...]] = []
    rest, done = list(sizes), 0
    for size in inner:
        taken = _take(rest, size)
        inner_parts.append(tuple(places[done : done + len(taken)]))
        done += len(taken)
    return Placement(tuple(dims), tuple(inner_parts)), Placement(tuple(dims), tuple(outer_parts))


def _refined(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """The coarsest sizes that both ``a`` and ``b`` are runs of."""
    if prod(a) != prod(b):
        return None
    cuts = set()
    for sizes in (a, b):
        product = 1
        for size in reversed(sizes):
            product *= size
            cuts.add(product)
    found, before = [], 1
    for cut in sorted(cuts - {1}):
        if cut % before:
            return None
        found.append(cut // before)
        before = cut
    return found[::-1]


def _take(rest: list[int], size: int) -> list[int]:
    """Removes from the front of ``rest`` the sizes that make up ``size``."""
    taken: list[int] = []
    while prod(taken) != size:
        taken.append(rest.pop(0))
    return taken


def place(region: Region, placement: Placement, pool: Pool) -> Region:
    """``region`` on the dimensions of ``placement``."""
    moved = rewrite(region.expressions(), pool, placement.index, placement.reduced, lambda _: None)
    return Region(placement.dims, tuple(rewrite_store(s, placement.index, moved) for s in region.stores))


def substitute(region: Region, stores: Sequence[Store], pool: Pool) -> Region | None:
    """``region`` with loads of what ``stores`` store replaced by the stored values.

    None when it loads any of that at another point than where it is stored.
    """
    targets = {store.target for store in stores}
    stored = {(store.target, store.index): store for store in stores}
    if len(stored) != len(targets) and not _meet_nowhere(region.dims, stores):
        return None
    found: dict[Expression, Expression] = {}
    for expression in region.expressions():
        if isinstance(expression, Load) and expression.source in targets:
            store = stored.get((expression.source, expression.index))
            if store is None or store.value.element_type is not expression.element_type:
                return None
            found[expression] = store.value
    moved = rewrite(region.expressions(), pool, unmoved, lambda dims: dims, found.get)
    return Region(region.dims, tuple(rewrite_store(s, unmoved, moved) for s in region.stores))


def _meet_nowhere(dims: Sequence[int], stores: Sequence[Store]) -> bool:
    """Whether no two of ``stores``, which walk ``dims``, write to one element, as far as that is easily seen."""
    for number, store in enumerate(stores):
        coefficients = store.index.coefficients
        step = gcd(*coefficients)
        span = sum(abs(c) * (size - 1) for c, size in zip(coefficients, dims, strict=True))
        for other in stores[:number]:
            if other.target is not store.target:
                continue
            distance = abs(store.index.offset - other.index.offset)
            if other.index.coefficients != coefficients or store.index.shifts or other.index.shifts:
                return False
            if distance <= span and not (step and distance % step):
                return False
    return True


def shared_bytes(a: Region, b: Region) -> int:
    """Bytes that both regions load at the same points."""
    loads = _loads(a)
    return sum(_bytes(b, e.element_type.bytes, e.index) for e in _loads(b) if e in loads)


def moved_bytes(region: Region) -> int:
    """Bytes that the region loads and stores."""
    stored = sum(_bytes(region, s.value.element_type.bytes, s.index) for s in region.stores)
    return stored + sum(_bytes(region, e.element_type.bytes, e.index) for e in _loads(region))


def _loads(region: Region) -> dict[Load, None]:
    return {e: None for e in region.expressions() if isinstance(e, Load)}


def _bytes(region: Region, width: int, index: Affine) -> int:
    return width * prod(region.dims[d] for d in region.along(index))
