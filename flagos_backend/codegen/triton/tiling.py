"""How a region is cut into the programs of a grid: axes, block sizes, loops, splits. Between fusion and writer.py.

A block has one or two axes; each walks some dimensions of the region as one number. Dimensions that a reduction reduces
and dimensions that it keeps are never on one axis.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from flagos_backend.codegen.triton.cost import is_over_at_once, most_per_lane
from flagos_backend.devices.target import Target
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Load, Reduce, Region, below

# Elements of a block: enough bytes in flight for the memory, few enough values for the registers.
_FLAT_BLOCK = 1024
# Points of a lane: twice as many are faster where their operations are few, and take too many registers elsewhere.
_POINTS_PER_LANE = 8
_FEW_OPERATIONS = 12
_LEAST_BLOCK = 128
_TILE = 4096
# What a program reads at a time of a row that it walks several times: by 32 warps, which have a multiprocessor for
# themselves, or by half as many (Walk). Long rows have more for each lane. Of shorter ones what holds more values than
# it loads has fewer warps, whose lanes have more registers.
_ROW_STEP = 8192
_LONG_ROW = 65536
_LONG_ROW_STEP = 16384
_HOLDING_STEP = 4096
_WALKED_PER_LANE = 8
# The same of many rows that are reduced and no more, each by few warps.
_REDUCTION_STEP = 4096
# How many steps are compiled as one, and how many of short steps, and of long ones whose program is to take so many
# registers that it has a multiprocessor for itself.
_ROW_UNROLL = 2
_MORE_UNROLL = 4
# Points of rows: how long a row is at least, and how much longer with the part of its last block that is past its end.
_LEAST_ROW_OF_POINTS = 512
_MOST_PAST_END = 1.08
_SQUARE = 64
# A row up to this long is one block, whose values stay in registers for every reduction over it.
MAX_ROW = 16384
# So is a longer one, as long as what it holds from one reduction to the next stays below so many values. Of narrow
# elements, whose instructions are the limit, it is faster only where the next row is loaded meanwhile: one such program
# has a multiprocessor for itself, and would wait for the memory and for each reduction's end.
MAX_LONG_ROW = 32768
_WIDE_BYTES = 4
_HELD = 40960
_ELEMENTS_PER_LANE = 16
_LONG_ROW_PER_LANE = 64
# A row that is alone, as losses are summed up, waits for what it gathers and for little else.
_ONLY_ROW_PER_LANE = 8
# Of many rows a lane has more, so that one of a thousand elements is one warp's: its reductions wait for no other.
_ROW_PER_LANE = 32
_WARP_ROW = 32 * _ROW_PER_LANE
# How many warps of a multiprocessor walk rows and add up columns, in registers; and for how many blocks each at least.
_WALKING_WARPS = 8
_LEAST_WALK = 16
_WARPS = (1, 2, 4, 8, 16, 32)
# What a column reduction reads of one row at a time: one transfer of the memory.
_COLUMN_BYTES = 128
# What the widest load or store of a lane reads or writes, at a multiple of as much.
_VECTOR_BYTES = 16
# How many rows ahead a program that walks whole rows loads, where the memory on chip holds them.
_ROW_STAGES = 3


class Loop(enum.Enum):
    """Which axis a program walks block by block, accumulating the reductions over it."""

    NONE = enum.auto()
    FIRST = enum.auto()
    SECOND = enum.auto()


@dataclass(frozen=True, slots=True)
class Axis:
    """``dims``: the dimensions of the region, outermost first; ``sizes``: theirs. Steps ``block`` positions at once."""

    name: str
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    block: int

    @property
    def size(self) -> int:
        return prod(self.sizes)

    @property
    def blocks(self) -> int:
        """At least 1: a reduction over nothing still has a result."""
        return max(-(-self.size // self.block), 1)

    @property
    def is_ragged(self) -> bool:
        """Whether the last block goes past the end."""
        return self.size != self.blocks * self.block


@dataclass(frozen=True, slots=True)
class Alignment:
    """Of rows that begin anywhere in memory: they are walked from the first multiple of ``unit`` elements on to the
    last one, and what is before and after, less than a unit each, is apart. ``first``: the index of a row's first
    element; ``indices``: those of loads and stores whose rows begin there, up to whole units."""

    unit: int
    first: Affine
    indices: frozenset[Affine]

    @staticmethod
    def of(region: Region, kept: Sequence[int], reduced: Sequence[int]) -> Alignment | None:
        """What suits most of the rows, in bytes. None where they begin at whole units already."""
        rows = [(index, size) for index, size in indices(region) if _is_row(region, index, kept, reduced)]
        if not rows:
            return None
        unit = max(_VECTOR_BYTES // min(size for _, size in rows), 1)
        alike: dict[tuple[int, ...], list[tuple[Affine, int]]] = {}
        for index, size in rows:
            start = index.offset % unit, *(index.coefficients[d] % unit for d in kept)
            alike.setdefault(start, []).append((index, size))
        start, found = max(alike.items(), key=lambda item: sum(size for _, size in item[1]))
        if not any(start):
            return None
        index = found[0][0]
        first = Affine(index.offset, tuple(0 if d in reduced else c for d, c in enumerate(index.coefficients)))
        return Alignment(unit, first, frozenset(index for index, _ in found))


def _is_row(region: Region, index: Affine, kept: Sequence[int], reduced: Sequence[int]) -> bool:
    """Whether ``index`` steps through a row one by one, and each row has its own."""
    stride = 1
    for d in reversed(reduced):
        if region.dims[d] != 1 and index.coefficients[d] != stride:
            return False
        stride *= region.dims[d]
    return not index.shifts and (not kept or not index.dims.isdisjoint(kept))


@dataclass(frozen=True, slots=True)
class Tiling:
    """``axes``: one or two. ``loop``: the axis walked inside a program; the others are spread over the grid, and so are
    ``parts`` of the loop's axis, each of which takes one block in so many. With several parts the reductions over the
    loop's axis leave a partial result for each, which a second kernel reduces. ``stages``: how many steps of the loop
    are loaded ahead; ``unroll``: how many are compiled as one; ``alignment``: where a loop along a row begins."""

    axes: tuple[Axis, ...]
    warps: int
    loop: Loop = Loop.NONE
    parts: int = 1
    stages: int = 1
    unroll: int = 1
    alignment: Alignment | None = None

    @property
    def looped(self) -> Axis | None:
        return None if self.loop is Loop.NONE else self.axes[0 if self.loop is Loop.FIRST else 1]

    @property
    def fills_device(self) -> bool:
        """Whether there are at least as many programs as multiprocessors, each with its share of a loop."""
        return self.looped is not None and self.parts > 1

    @property
    def grid(self) -> int:
        return self.parts * prod(axis.blocks for axis in self.axes if axis is not self.looped)


def power_of_two(size: int) -> int:
    """The least power of two that is not below ``size``, and not below 1."""
    return 1 << max(size - 1, 0).bit_length()


class Walk(enum.Enum):
    """How programs share the device that walk rows several times each. Alone, none loses what it has read from the
    cache before its next walk; beside others, none waits alone for the memory. Which counts more depends on the chip,
    and on what is computed."""

    ALONE = "one on a multiprocessor"
    BESIDE = "several on a multiprocessor"


def walks(region: Region) -> tuple[Walk, ...]:
    """The ways to run ``region`` that may differ, the usual one first."""
    groups = {reduction.dims for reduction in region.reductions}
    if len(groups) != 1:
        return (Walk.ALONE,)
    size = prod(region.dims[d] for d in region.reduced)
    is_walked = any(not store.index.dims.isdisjoint(region.reduced) for store in region.stores)
    return tuple(Walk) if is_walked and power_of_two(size) > MAX_ROW else (Walk.ALONE,)


def choose(region: Region, target: Target, *, splits: bool = True, walk: Walk = Walk.ALONE) -> Tiling:
    """The tiling of ``region``. ``splits``: whether reductions may go through partial results. ``walk``: how rows that
    are walked several times are."""
    reductions = region.reductions
    if not reductions:
        return _pointwise(region, target)
    real = [d for d, size in enumerate(region.dims) if size != 1]
    groups = sorted(
        {tuple(d for d in reduction.dims if d in real) for reduction in reductions}, key=lambda g: (g[-1:], g)
    )
    if len(groups) > 1:
        return _rows_and_columns(region, target, groups)
    (reduced,) = groups
    kept = tuple(d for d in real if d not in reduced)
    can_split = splits and _can_split(region)
    if _is_inner(region, reduced, kept):
        return _rows(region, target, kept, reduced, can_split, walk)
    return _columns(region, target, kept, reduced, can_split)


def indices(region: Region) -> list[tuple[Affine, int]]:
    """The index of each load and store, and the bytes of an element there."""
    loads = [(e.index, e.element_type.bytes) for e in region.expressions() if isinstance(e, Load)]
    return [*loads, *((store.index, store.value.element_type.bytes) for store in region.stores)]


def _axis(region: Region, name: str, dims: Sequence[int], block: int) -> Axis:
    return Axis(name, tuple(dims), tuple(region.dims[d] for d in dims), block)


def _warps(elements: int, per_lane: int = _ELEMENTS_PER_LANE) -> int:
    wanted = elements // (32 * per_lane)
    return max(w for w in _WARPS if w <= max(wanted, 1))


# ---- Points


def _pointwise(region: Region, target: Target) -> Tiling:
    real = [d for d, size in enumerate(region.dims) if size != 1]
    size = prod(region.dims)
    cut = _transposed_at(region, real)
    if cut is None:
        if (rows := _rows_of_points(region, target, real)) is not None:
            return rows
        block = min(_FLAT_BLOCK, power_of_two(size))
        # What is small, as a step of a loop, is done the sooner the more of the device shares it.
        while block > _LEAST_BLOCK and size // block < 2 * target.multiprocessors:
            block //= 2
        return Tiling((_axis(region, "x", real, block),), _warps(block, _points_per_lane(region)))
    outer, inner = real[: cut + 1], real[cut + 1 :]
    blocks = [min(_SQUARE, power_of_two(prod(region.dims[d] for d in dims))) for dims in (outer, inner)]
    return Tiling(
        (_axis(region, "y", outer, blocks[0]), _axis(region, "x", inner, blocks[1])),
        _warps(prod(blocks), min(_ELEMENTS_PER_LANE, most_per_lane(region))),
    )


def _rows_of_points(region: Region, target: Target, real: Sequence[int]) -> Tiling | None:
    """Blocks within rows, so that what a row shares is loaded once for it, and nothing is divided to find the row. None
    where rows share nothing, where their ends would be much of a block, or where they begin between units of memory."""
    shared = [d for d in (_last_of_shared(region, index, real) for index, _ in indices(region)) if d is not None]
    if not shared:
        return None
    cut = max(shared)
    outer, inner = real[: cut + 1], real[cut + 1 :]
    width = prod(region.dims[d] for d in inner)
    unit = _VECTOR_BYTES // min(size for _, size in indices(region))
    few = prod(region.dims) < 2 * target.multiprocessors * _FLAT_BLOCK
    if few or width < _LEAST_ROW_OF_POINTS or width % max(unit, 1):
        return None
    block = _FLAT_BLOCK
    while -(-width // block) * block > _MOST_PAST_END * width:
        block //= 2
    if block < _SQUARE:
        return None
    height = _FLAT_BLOCK // block
    axes = _axis(region, "y", outer, height), _axis(region, "x", inner, block)
    return Tiling(axes, _warps(_FLAT_BLOCK, _points_per_lane(region)))


def _points_per_lane(region: Region) -> int:
    operations = sum(isinstance(e, Apply) for e in region.expressions())
    return min(_POINTS_PER_LANE * (2 if operations <= _FEW_OPERATIONS else 1), most_per_lane(region))


def _last_of_shared(region: Region, index: Affine, real: Sequence[int]) -> int | None:
    """The position in ``real`` of the last dimension that ``index`` varies along; None where it is the last of all, or
    it varies along none."""
    along = [position for position, d in enumerate(real) if d in region.along(index)]
    return along[-1] if along and along[-1] != len(real) - 1 else None


def _transposed_at(region: Region, real: Sequence[int]) -> int | None:
    """The position in ``real`` of the dimension that some load is contiguous in while the others are in the last one.

    None when all agree, or when the dimensions are too small for a square to pay.
    """
    if not real:
        return None
    varying = [index for index, _ in indices(region) if index.coefficients[real[-1]]]
    fastest = {_fastest(index, real) for index in varying} - {None, real[-1]}
    positions = [real.index(d) for d in fastest if d is not None and region.dims[d] >= 8]
    if not positions or region.dims[real[-1]] < 8 or all(_fastest(s.index, real) != real[-1] for s in region.stores):
        return None
    return max(positions)


def _fastest(index: Affine, real: Sequence[int]) -> int | None:
    """The dimension in which ``index`` steps least, of those that it depends on."""
    steps = [(abs(index.coefficients[d]), d) for d in real if index.coefficients[d]]
    return min(steps)[1] if steps else None


# ---- Reductions


def _is_inner(region: Region, reduced: Sequence[int], kept: Sequence[int]) -> bool:
    """Whether most of what the region reads is contiguous along the reduced dimensions."""
    both = [*kept, *reduced]
    votes = 0
    for index, size in indices(region):
        if not index.dims.isdisjoint(reduced):
            votes += size if _fastest(index, both) in reduced else -size
    return votes > 0 or (votes == 0 and not kept)


def _can_split(region: Region) -> bool:
    """Whether no reduction goes into another, or into where another begins, and every stored value with a reduction in
    it is kept, and stored once."""
    depends: dict[Expression, tuple[bool, bool]] = {}  # on a reduction, on the reduced dimensions
    reduced = region.reduced
    for expression in region.expressions():
        if isinstance(expression, Load | Index):
            depends[expression] = False, not region.reach[expression].isdisjoint(reduced)
        elif isinstance(expression, Apply):
            found = [depends[operand] for operand in expression.operands]
            depends[expression] = any(f for f, _ in found), any(d for _, d in found)
        elif isinstance(expression, Reduce):
            if any(depends[operand][0] for operand in expression.operands):
                return False
            depends[expression] = True, False
        else:
            depends[expression] = False, False
    for store in region.stores:
        has_reduction, varies = depends[store.value]
        if has_reduction and (varies or not region.along(store.index).isdisjoint(reduced)):
            return False
    return True


def only_reductions(region: Region) -> bool:
    """Whether the region has reductions over the same dimensions, and stores no more than what comes of each: it is cut
    as one of them would be."""
    reduced, groups = set(region.reduced), {reduction.dims for reduction in region.reductions}
    return len(groups) == 1 and _can_split(region) and all(s.index.dims.isdisjoint(reduced) for s in region.stores)


def _parts(region: Region, blocks: int, programs: int, target: Target) -> int:
    """Into how many runs ``blocks`` steps of a loop go so that the device is busy. Each has at least four steps, or one
    where a program alone takes longer for all of them than the kernel that reduces the runs' results takes to start."""
    wanted = -(-4 * target.multiprocessors // max(programs, 1))
    few = min(wanted, blocks // 4)
    if few <= 1 < blocks and not is_over_at_once(region, programs, target):
        return min(wanted, blocks)
    return max(few, 1)


def _rows(
    region: Region, target: Target, kept: Sequence[int], reduced: Sequence[int], can_split: bool, walk: Walk
) -> Tiling:
    size, rows = prod(region.dims[d] for d in reduced), prod(region.dims[d] for d in kept)
    block = power_of_two(size)
    programs_wanted = 2 * target.multiprocessors
    row = _Row.of(region, kept, reduced)
    if MAX_ROW < block <= MAX_LONG_ROW and rows >= programs_wanted and row.pays_ahead(target, block):
        axes = _axis(region, "x", kept, 1), _axis(region, "r", reduced, block)
        warps = _warps(block, _LONG_ROW_PER_LANE)
        return Tiling(axes, warps, Loop.FIRST, target.multiprocessors, stages=_ROW_STAGES)
    fits = block <= MAX_ROW or (block <= MAX_LONG_ROW and row.is_wide and row.fits_registers)
    if fits and (rows >= programs_wanted or size <= _TILE or not can_split):
        together = min(max(_WARP_ROW // block, 1), power_of_two(rows))
        # Few rows are spread over the device rather than taken together.
        while together > 1 and rows // together < programs_wanted:
            together //= 2
        axes = _axis(region, "x", kept, together), _axis(region, "r", reduced, block)
        # Warps wait for one another at each reduction, unless a row is one warp's. Few rows are done sooner by more of
        # them.
        few = rows // together < programs_wanted and block < _TILE
        per_lane = _ONLY_ROW_PER_LANE if rows == 1 else _ELEMENTS_PER_LANE if few else _ROW_PER_LANE
        return Tiling(axes, _warps(together * block, min(per_lane, most_per_lane(region))))
    step, per_lane, unroll = row.step(target, rows, walk)
    most = most_per_lane(region)
    if most < per_lane * unroll:
        # What computes so much for each point gains nothing by reading more of them at a time.
        unroll = max(most // per_lane, 1)
        step, per_lane = step // max(per_lane // most, 1), min(per_lane, most)
    axes = _axis(region, "x", kept, 1), _axis(region, "r", reduced, min(step, block))
    parts = _parts(region, axes[1].blocks, rows, target) if can_split else 1
    warps = _warps(axes[1].block, min(_ONLY_ROW_PER_LANE, per_lane) if rows == parts == 1 else per_lane)
    if parts > 1 or axes[1].blocks == 1:
        return Tiling(axes, warps, Loop.SECOND, parts)
    alignment = Alignment.of(region, kept, reduced)
    return Tiling(axes, warps, Loop.SECOND, unroll=unroll, alignment=alignment)


@dataclass(frozen=True, slots=True)
class _Row:
    """Of a region with reductions over its rows: ``size``, elements of a row; ``loaded`` and ``stored``, bytes of an
    element of each array with such rows; ``shares``, whether all rows read one array; ``held``, how many values of each
    position are held, at most, while a reduction ends."""

    size: int
    loaded: tuple[int, ...]
    stored: tuple[int, ...]
    shares: bool
    held: int

    @staticmethod
    def of(region: Region, kept: Sequence[int], reduced: Sequence[int]) -> _Row:
        def varies(index: Affine, dims: Sequence[int]) -> bool:
            return not region.along(index).isdisjoint(dims)

        loads = [e for e in region.expressions() if isinstance(e, Load) and varies(e.index, reduced)]
        own = [load for load in loads if varies(load.index, kept)]
        stored = [s.value.element_type.bytes for s in region.stores if varies(s.index, reduced)]
        return _Row(
            prod(region.dims[d] for d in reduced),
            tuple(load.element_type.bytes for load in own),
            tuple(stored),
            len(own) < len(loads),
            _held_through(region, reduced),
        )

    @property
    def is_wide(self) -> bool:
        return all(width >= _WIDE_BYTES for width in self.loaded)

    @property
    def fits_registers(self) -> bool:
        return 0 < self.held * self.size <= _HELD

    def pays_ahead(self, target: Target, block: int) -> bool:
        """Whether whole rows in blocks of ``block`` are faster loaded ahead, and can be. What all rows read would be
        held as well, and of rows that are only reduced the instructions are few."""
        has_room = (_ROW_STAGES - 1) * sum(self.loaded) * block <= target.shared_memory_bytes
        return has_room and bool(self.stored) and not self.is_wide and not self.shares and self.fits_registers

    def step(self, target: Target, rows: int, walk: Walk) -> tuple[int, int, int]:
        """How much of a row is read at a time where ``rows`` are walked, how much of that by each lane, and how many
        such steps are compiled as one."""
        if not self.stored:  # mostly walked once
            if rows >= 2 * target.multiprocessors:
                return _REDUCTION_STEP, _ROW_PER_LANE, _ROW_UNROLL
            return _ROW_STEP, _ELEMENTS_PER_LANE, _ROW_UNROLL
        if self.size >= _LONG_ROW:
            unroll = _MORE_UNROLL if walk is Walk.ALONE else _ROW_UNROLL
            return _LONG_ROW_STEP, _ELEMENTS_PER_LANE, unroll
        per_lane = _WALKED_PER_LANE if walk is Walk.ALONE else _ELEMENTS_PER_LANE
        if self.held > len(self.loaded):
            return _HOLDING_STEP, per_lane, _MORE_UNROLL
        return _ROW_STEP, per_lane, _ROW_UNROLL


def _held_through(region: Region, reduced: Sequence[int]) -> int:
    """How many values of each position of a row are held, at most, while a reduction over the row ends."""
    expressions = region.expressions()
    varies: dict[Expression, bool] = {}
    level: dict[Expression, int] = {}  # how many reductions, one in the other, are over before it is known
    for e in expressions:
        level[e] = max((level[o] for o in e.operands), default=0) + isinstance(e, Reduce)
        varies[e] = not isinstance(e, Reduce) and any(varies[o] for o in e.operands)
        if isinstance(e, Load):
            varies[e] = not region.reach[e].isdisjoint(reduced)
    # A reduction takes its value a level before it is known itself, stores come last, and loads can wait for their use,
    # also where they are converted. What only says where a store begins has none.
    given: set[Expression] = {e for e in expressions if isinstance(e, Load | Index)}
    given |= {e for e in expressions if isinstance(e, Apply) and e.opcode is Opcode.CONVERT and e.operands[0] in given}
    uses: dict[Expression, list[int]] = {e: [] if e in given else [level[e]] for e in expressions}
    for e in expressions:
        for operand in e.operands:
            uses[operand].append(level[e] - isinstance(e, Reduce))
    last_level = max(level.values())
    for store in region.stores:
        uses[store.value].append(last_level)
    spans = [(min(uses[e]), max(uses[e])) for e in expressions if varies[e] and uses[e] and not isinstance(e, Index)]
    return max((sum(first <= end < last for first, last in spans) for end in range(last_level)), default=0)


def _columns(region: Region, target: Target, kept: Sequence[int], reduced: Sequence[int], can_split: bool) -> Tiling:
    size, columns = prod(region.dims[d] for d in reduced), prod(region.dims[d] for d in kept)
    widest = max((size for index, size in indices(region) if not index.dims.isdisjoint(reduced)), default=4)
    width = min(max(_COLUMN_BYTES // widest, 16), power_of_two(columns))
    height = min(_TILE // width, power_of_two(size))
    axes = _axis(region, "x", kept, width), _axis(region, "r", reduced, height)
    warps = _warps(width * height, min(_ELEMENTS_PER_LANE, most_per_lane(region)))
    if axes[1].blocks == 1:
        return Tiling(axes, warps)
    parts = _parts(region, axes[1].blocks, axes[0].blocks, target) if can_split else 1
    return Tiling(axes, warps, Loop.SECOND, parts)


def _rows_and_columns(region: Region, target: Target, groups: Sequence[tuple[int, ...]]) -> Tiling:
    """Rows as whole blocks, walked by each program; reductions over the rows leave partial results."""
    columns, rows = groups
    width = power_of_two(prod(region.dims[d] for d in rows))
    height = min(max(_WARP_ROW // width, 1), power_of_two(prod(region.dims[d] for d in columns)))
    axes = _axis(region, "x", columns, height), _axis(region, "r", rows, width)
    warps = _warps(width * height, min(_ROW_PER_LANE, most_per_lane(region)))
    # What a lane adds up, and the rows it holds meanwhile, leave registers for so many warps.
    programs = max(_WALKING_WARPS // warps, 1)
    # Each leaves a partial result; of few rows, fewer programs do.
    enough = max(axes[0].blocks // _LEAST_WALK, 2 * target.multiprocessors)
    parts = min(programs * target.multiprocessors, enough, axes[0].blocks)
    row = _Row.of(region, columns, rows)
    step = sum(row.loaded) * width * height
    stages = min(_ROW_STAGES, target.shared_memory_bytes // programs // max(step, 1))
    return Tiling(axes, warps, Loop.FIRST, parts, stages=max(stages, 1))


def supports(region: Region) -> bool:
    """Whether a tiling for ``region`` exists: all reductions over the same dimensions, or over two complementary groups
    of which the inner one fits a block and the outer one's reductions only leave results. No load or store waits for a
    reduction."""
    places = [o for e in region.expressions() if isinstance(e, Load) for o in e.operands]
    places += [start for store in region.stores for start in store.index.starts]
    if any(isinstance(e, Reduce) for e in below(places)):
        return False
    real = [d for d, size in enumerate(region.dims) if size != 1]
    groups = sorted(
        {tuple(d for d in reduction.dims if d in real) for reduction in region.reductions}, key=lambda g: (g[-1:], g)
    )
    if len(groups) <= 1:
        return True
    if len(groups) > 2 or sorted(d for group in groups for d in group) != real or () in groups:
        return False
    columns, rows = groups
    outer = [reduction for reduction in region.reductions if set(reduction.dims) & set(columns)]
    inner = [reduction.value for reduction in region.reductions]
    inner += [s.value for s in region.stores if not s.index.dims.isdisjoint(columns)]
    return prod(region.dims[d] for d in rows) <= MAX_ROW and not set(below(inner)).intersection(outer)
