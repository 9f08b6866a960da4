"""Chooses the dimension along which tiles run where the last one is short: a tile costs its calls however few elements
it has, an element that is not next to the one before a load of its own. Between collapse_dimensions.py and
emit_map_loop.py."""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.codegen.cpu.transforms.collapse_dimensions import Nest, simplify
from flagos_backend.codegen.cpu.transforms.unroll_short_rows import LONG
from flagos_backend.loop_ir.region import Affine, Apply, Load, Region

# Elements of the greatest tile, kMaxTile of native/cpu/parse_loop.cc.
_TILE = 1024
# Strides up to here are shuffles of vectors.
_NEAR = 4
# Nanoseconds of a tile, of each operation and of each array in it, and of an element that is shuffled, or loaded or
# stored by itself.
_PER_TILE, _PER_OPERATION, _PER_ARRAY, _PER_SHUFFLED, _PER_ELEMENT = 8.0, 3.0, 4.0, 0.1, 0.5
# Of an operation on an element, and of an element that is loaded where a number says.
_PER_COMPUTED, _PER_TAKEN = 0.15, 1.0
# And of each row of an array that a tile of several rows brings together.
_PER_ROW = 4.0


def tiled(region: Region) -> Nest:
    """``simplify(region)`` with the dimension last along which tiles should run. ``region`` has no reductions."""
    nest = simplify(region)
    if len(nest.dims) < 2 or nest.dims[-1] >= LONG:
        return nest
    costs = _costs(region, nest)
    # Of dimensions that cost the same, the inner one.
    best = min(reversed(range(len(costs))), key=costs.__getitem__)
    return nest if best == len(costs) - 1 else _with_last(nest, best)


def cost_of(region: Region) -> float:
    """About how many nanoseconds a point of ``region``, which has no reductions, takes in the tiles that suit it best,
    with its operations."""
    operations = sum(isinstance(e, Apply) for e in region.expressions())
    taken = sum(isinstance(e, Load) and bool(e.index.shifts) for e in region.expressions())
    return min(_costs(region, simplify(region)), default=0.0) + _PER_COMPUTED * operations + _PER_TAKEN * taken


def _costs(region: Region, nest: Nest) -> list[float]:
    """By the dimension of ``nest`` along which tiles run."""
    indices = [e.index for e in region.expressions() if isinstance(e, Load) and not e.index.shifts]
    indices += [store.index for store in region.stores]
    operations = sum(
        isinstance(e, Apply) or (isinstance(e, Load) and bool(e.index.shifts)) for e in region.expressions()
    )
    costs = [_cost(nest, position, indices, operations) for position in range(len(nest.dims))]
    if costs:
        costs[-1] = min(costs[-1], _cost_of_boxes(nest, indices, operations))
    return costs


def _cost(nest: Nest, position: int, indices: list[Affine], operations: int) -> float:
    """Nanoseconds for each point if tiles run along the dimension at ``position``."""
    strides = [abs(nest.strides(index)[position]) for index in indices]
    shuffled, apart = sum(1 < stride <= _NEAR for stride in strides), sum(stride > _NEAR for stride in strides)
    tile = _PER_TILE + _PER_OPERATION * operations + _PER_ARRAY * len(indices)
    return tile / min(nest.dims[position], _TILE) + _PER_SHUFFLED * shuffled + _PER_ELEMENT * apart


def _cost_of_boxes(nest: Nest, indices: list[Affine], operations: int) -> float:
    """The same if tiles hold several short rows, as native/cpu/boxes.cc has them: where rows of an array do not follow
    each other in memory, they are brought together row by row."""
    size = 1
    held: list[tuple[int, int]] = []  # dimensions that lie within a tile, and steps along them where all is dense
    for d in reversed(range(len(nest.dims))):
        held.append((d, size))
        size *= nest.dims[d]
        if size >= _TILE:
            break
    cost = (_PER_TILE + _PER_OPERATION * operations + _PER_ARRAY * len(indices)) / min(size, _TILE)
    for index in indices:
        strides = nest.strides(index)
        if not any(strides) or all(strides[d] == stride for d, stride in held):
            continue
        near = abs(strides[-1]) <= _NEAR
        cost += _PER_ROW / nest.dims[-1] + (_PER_SHUFFLED if near else _PER_ELEMENT)
    return cost


def _with_last(nest: Nest, position: int) -> Nest:
    """The dimension at ``position`` goes last. Where it divides into tiles, these stay where they were, and what lies
    between them is visited while it is in the cache."""
    size = nest.dims[position]
    length = max((n for n in range(LONG, min(size, _TILE) + 1) if size % n == 0), default=size)
    kept = [(nest.dims[k], nest.sources[k], nest.factors[k]) for k in range(len(nest.dims))]
    kept[position] = (size // length, nest.sources[position], length * nest.factors[position])
    kept.append((length, nest.sources[position], nest.factors[position]))
    dims, sources, factors = zip(*(entry for entry in kept if entry[0] > 1), strict=True)
    return replace(nest, dims=dims, sources=sources, factors=factors)
