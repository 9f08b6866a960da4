"""Simplifies the dimensions of a region before an emitter sees them: size-1 dimensions go, adjacent ones merge."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flagos_backend.loop_ir.region import Affine, Index, Load, Region


@dataclass(frozen=True, slots=True)
class Nest:
    """``dims`` of the simplified loop nest, and for each the dimension of the region whose coefficient it takes.

    Merged dimensions step like the innermost one of the run, so one source dimension says it all. ``reduced``:
    positions in ``dims`` that are reduced. ``factors``: of the coefficients, 1 but where a dimension was divided.
    """

    dims: tuple[int, ...]
    sources: tuple[int, ...]
    reduced: tuple[int, ...]
    factors: tuple[int, ...]

    def strides(self, index: Affine) -> tuple[int, ...]:
        pairs = zip(self.sources, self.factors, strict=True)
        return tuple(index.coefficients[source] * factor for source, factor in pairs)


def simplify(region: Region) -> Nest:
    """The loop nest with the fewest dimensions that visits the same points in the same order."""
    indices = [e.index for e in region.expressions() if isinstance(e, Load)]
    indices += [e.value for e in region.expressions() if isinstance(e, Index)]
    indices += [store.index for store in region.stores]
    runs: list[list[int]] = []
    for d in range(region.rank):
        if region.dims[d] == 1 and not _must_stay(region, d):
            continue
        if runs and _merges(region, indices, runs[-1][-1], d):
            runs[-1].append(d)
        else:
            runs.append([d])
    runs = _one_dimension_after_reductions(region, runs)
    return Nest(
        dims=tuple(prod(region.dims[d] for d in run) for run in runs),
        sources=tuple(run[-1] for run in runs),
        reduced=tuple(i for i, run in enumerate(runs) if run[-1] in region.reduced),
        factors=(1,) * len(runs),
    )


def _one_dimension_after_reductions(region: Region, runs: list[list[int]]) -> list[list[int]]:
    """Kept dimensions between the reduced ones and the last one go before the reduced ones."""
    reduced = [run for run in runs if run[-1] in region.reduced]
    if not reduced or runs[-1] in reduced:
        return runs
    kept = [run for run in runs if run not in reduced]
    return [*kept[:-1], *reduced, kept[-1]]


def _must_stay(region: Region, d: int) -> bool:
    """A reduction needs a reduced dimension, and a reduction over outer dimensions a last one, even of size 1."""
    if not region.reduced:
        return False
    return d == region.reduced[-1] or (d == region.rank - 1 and d not in region.reduced)


def _merges(region: Region, indices: list[Affine], outer: int, inner: int) -> bool:
    if (outer in region.reduced) != (inner in region.reduced):
        return False
    size = region.dims[inner]
    return all(index.coefficients[outer] == index.coefficients[inner] * size for index in indices)
