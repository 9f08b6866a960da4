# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of cumulative operations along one dimension.

An array is [A, N, B], with N scanned and B contiguous behind it. A program has LANES scans, which are neighbours in A
where B is 1 (AXIS 1: a tile is [LANES, BLOCK]) and in B elsewhere (AXIS 0: [BLOCK, LANES]), and goes through a segment
of N, block by block; what lies before its segment is the reduction of the segments' totals.

A state is what COMBINE is of some elements. For log-add-exp that is their greatest, and the sum of all exponentials
divided by its own; for maximum-place and minimum-place a minimum or maximum, and the last place where it is; for
everything else the second part, PART, is None.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kernels take a dozen sizes, which one to a line would bury the code: lists of them are filled.
# fmt: off


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _log_add_exp(greatest, total, other_greatest, other_total):
    both = tl.maximum(greatest, other_greatest, propagate_nan=tl.PropagateNan.ALL)
    # Differences of equal infinities are NaN.
    scale = tl.where(greatest == other_greatest, 1.0, tl.exp(-tl.abs(greatest - other_greatest)))
    total = tl.where(greatest >= other_greatest, total + other_total * scale, total * scale + other_total)
    return both, total


@triton.jit
def _last_maximum(value, place, other_value, other_place):
    nan, other_nan = value != value, other_value != other_value
    same = (value == other_value) | (nan & other_nan)
    takes = (other_value > value) | (other_nan & (nan == 0)) | (same & (other_place > place))
    return tl.where(takes, other_value, value), tl.where(takes, other_place, place)


@triton.jit
def _last_minimum(value, place, other_value, other_place):
    nan, other_nan = value != value, other_value != other_value
    same = (value == other_value) | (nan & other_nan)
    takes = (other_value < value) | (other_nan & (nan == 0)) | (same & (other_place > place))
    return tl.where(takes, other_value, value), tl.where(takes, other_place, place)


@triton.jit
def _join(value, total, other_value, other_total, COMBINE: tl.constexpr):
    if COMBINE == "log-add-exp":
        value, total = _log_add_exp(value, total, other_value, other_total)
    elif COMBINE == "maximum-place":
        value, total = _last_maximum(value, total, other_value, other_total)
    elif COMBINE == "minimum-place":
        value, total = _last_minimum(value, total, other_value, other_total)
    elif COMBINE == "multiply":
        value = value * other_value
    elif COMBINE == "maximum":
        value = _maximum(value, other_value)
    elif COMBINE == "minimum":
        value = _minimum(value, other_value)
    else:
        value = value + other_value
    return value, total


@triton.jit
def _scan(value, total, COMBINE: tl.constexpr, AXIS: tl.constexpr):
    if COMBINE == "log-add-exp":
        value, total = tl.associative_scan((value, total), AXIS, _log_add_exp)
    elif COMBINE == "maximum-place":
        value, total = tl.associative_scan((value, total), AXIS, _last_maximum)
    elif COMBINE == "minimum-place":
        value, total = tl.associative_scan((value, total), AXIS, _last_minimum)
    elif COMBINE == "multiply":
        value = tl.associative_scan(value, AXIS, _multiply)
    elif COMBINE == "maximum":
        value = tl.associative_scan(value, AXIS, _maximum)
    elif COMBINE == "minimum":
        value = tl.associative_scan(value, AXIS, _minimum)
    else:
        value = tl.associative_scan(value, AXIS, _add)
    return value, total


@triton.jit
def _reduction(value, total, COMBINE: tl.constexpr, AXIS: tl.constexpr):
    """Along AXIS, which is kept with a size of one."""
    if COMBINE == "log-add-exp":
        value, total = tl.reduce((value, total), AXIS, _log_add_exp)
        total = tl.expand_dims(total, AXIS)
    elif COMBINE == "maximum-place":
        value, total = tl.reduce((value, total), AXIS, _last_maximum)
        total = tl.expand_dims(total, AXIS)
    elif COMBINE == "minimum-place":
        value, total = tl.reduce((value, total), AXIS, _last_minimum)
        total = tl.expand_dims(total, AXIS)
    elif COMBINE == "multiply":
        value = tl.reduce(value, AXIS, _multiply)
    elif COMBINE == "maximum":
        value = tl.reduce(value, AXIS, _maximum)
    elif COMBINE == "minimum":
        value = tl.reduce(value, AXIS, _minimum)
    else:
        value = tl.reduce(value, AXIS, _add)
    return tl.expand_dims(value, AXIS), total


@triton.jit
def _no_elements(
    IDENTITY: tl.constexpr, ACC: tl.constexpr, PART: tl.constexpr, AXIS: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of states."""
    value = tl.full([LANES, BLOCK] if AXIS == 1 else [BLOCK, LANES], IDENTITY, ACC)
    total = value
    if PART is not None:
        total = tl.full(value.shape, 0 if PART.is_floating() else -1, PART)
    return value, total


@triton.jit
def _places(N, B, count, AXIS: tl.constexpr, LANES: tl.constexpr):
    """Where this program's scans begin in an array [A, N, B], and which of them there are. ``count``: A."""
    program = tl.program_id(0)
    if AXIS == 1:
        lane = tl.expand_dims(program * LANES + tl.arange(0, LANES), 1)
        first = lane * N
        inside = lane < count
    else:
        tiles = tl.cdiv(B, LANES)
        lane = tl.expand_dims(program % tiles * LANES + tl.arange(0, LANES), 0)
        first = program // tiles * N * B + lane
        inside = lane < B
    return first, inside


@triton.jit
def _steps(block, AXIS: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers of a block's elements in the order of the scan."""
    return tl.expand_dims(block * BLOCK + tl.arange(0, BLOCK), 1 - AXIS)


@triton.jit
def _load(
    x, first, inside, steps, N, B, REVERSE: tl.constexpr, IDENTITY: tl.constexpr, SEEN: tl.constexpr, ACC: tl.constexpr,
    PART: tl.constexpr,
):
    """A tile of states, each of one element. ``SEEN``: what its bits are."""
    inside = inside & (steps < N)
    place = N - 1 - steps if REVERSE else steps
    value = tl.load(x + (first + place * B), inside)
    if SEEN is not None:
        value = value.to(SEEN, bitcast=True)
    value = tl.where(inside, value.to(ACC), tl.full([1, 1], IDENTITY, ACC))
    total = value
    if PART is not None:
        total = tl.full(value.shape, 1, PART) if PART.is_floating() else tl.where(inside, place, -1)
    return value, total


@triton.jit
def reduce_segments(
    x, values, totals, N, B, count, blocks, segments, AXIS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    REVERSE: tl.constexpr, COMBINE: tl.constexpr, IDENTITY: tl.constexpr, SEEN: tl.constexpr, ACC: tl.constexpr,
    PART: tl.constexpr,
):
    """Grid (tiles, segments but the last), which have ``blocks`` blocks each. values, totals: ACC and PART
    [A, segments, B], the states of whole segments in the order of the scan."""
    segment = tl.program_id(1)
    first, inside = _places(N, B, count, AXIS, LANES)
    value, total = _no_elements(IDENTITY, ACC, PART, AXIS, LANES, BLOCK)
    for number in range(blocks):
        steps = _steps(segment * blocks + number, AXIS, BLOCK)
        other_value, other_total = _load(x, first, inside, steps, N, B, REVERSE, IDENTITY, SEEN, ACC, PART)
        value, total = _join(value, total, other_value, other_total, COMBINE)
    value, total = _reduction(value, total, COMBINE, AXIS)
    place, _ = _places(segments, B, count, AXIS, LANES)
    tl.store(values + place + segment * B, value, inside)
    if PART is not None:
        tl.store(totals + place + segment * B, total, inside)


@triton.jit
def _before(
    values, totals, B, count, segments, AXIS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    COMBINE: tl.constexpr, IDENTITY: tl.constexpr, ACC: tl.constexpr, PART: tl.constexpr,
):
    """The state of all segments before this program's."""
    segment = tl.program_id(1)
    place, lanes = _places(segments, B, count, AXIS, LANES)
    value, total = _no_elements(IDENTITY, ACC, PART, AXIS, LANES, BLOCK)
    empty = total
    for block in range(tl.cdiv(segment, BLOCK)):
        steps = _steps(block, AXIS, BLOCK)
        inside = lanes & (steps < segment)
        identity = tl.full([1, 1], IDENTITY, ACC)
        other_value = tl.where(inside, tl.load(values + place + steps * B, inside).to(ACC), identity)
        other_total = total
        if PART is not None:
            # Of no elements, as ``total`` is where it has none yet.
            other_total = tl.where(inside, tl.load(totals + place + steps * B, inside), empty)
        value, total = _join(value, total, other_value, other_total, COMBINE)
    return _reduction(value, total, COMBINE, AXIS)


@triton.jit
def scan_segments(
    x, result, places, values, totals, N, B, count, blocks, segments,
    AXIS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr, COMBINE: tl.constexpr,
    IDENTITY: tl.constexpr, SEEN: tl.constexpr, ACC: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Grid (tiles, segments). blocks, values, totals: as of ``reduce_segments``, which is not called where there is one
    segment. x, result: [A, N, B]; places: int64 of the same, written where ``PLACES``."""
    segment = tl.program_id(1)
    first, inside = _places(N, B, count, AXIS, LANES)
    if SPLIT:
        value, total = _before(values, totals, B, count, segments, AXIS, LANES, BLOCK, COMBINE, IDENTITY, ACC, PART)
    else:
        value, total = _no_elements(IDENTITY, ACC, PART, AXIS, LANES, 1)
    for number in range(blocks):
        steps = _steps(segment * blocks + number, AXIS, BLOCK)
        other_value, other_total = _load(x, first, inside, steps, N, B, REVERSE, IDENTITY, SEEN, ACC, PART)
        other_value, other_total = _scan(other_value, other_total, COMBINE, AXIS)
        scanned, scanned_total = _join(value, total, other_value, other_total, COMBINE)
        if COMBINE == "log-add-exp":
            scanned = scanned + tl.log(scanned_total)
        place = first + (N - 1 - steps if REVERSE else steps) * B
        tl.store(result + place, scanned.to(result.dtype.element_ty), inside & (steps < N))
        if PLACES:
            tl.store(places + place, scanned_total.to(tl.int64), inside & (steps < N))
        # The last state of the block is that of all of it.
        last = tl.expand_dims(tl.arange(0, BLOCK) == BLOCK - 1, 1 - AXIS)
        other_value = tl.sum(tl.where(last, other_value, 0), AXIS, keep_dims=True)
        if PART is not None:
            other_total = tl.sum(tl.where(last, other_total, 0), AXIS, keep_dims=True)
        value, total = _join(value, total, other_value, other_total, COMBINE)
