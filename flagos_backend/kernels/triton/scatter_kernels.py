# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of scatters: windows of updates, each added to, compared with or written over a place of an array."""

from __future__ import annotations

import triton
import triton.language as tl

# How an update and what is there are combined.
SET, ADD, AND, OR, XOR, MAXIMUM, MINIMUM, FLOAT_MAXIMUM, FLOAT_MINIMUM = map(tl.constexpr, range(9))
# Which of the windows at one place is written: any, the last one in the list, the one that the table of places has.
ANY, LAST, OF_TABLE = map(tl.constexpr, range(3))


@triton.jit
def _start(
    indices, windows, WINDOWS, limit_0, limit_1, limit_2, limit_3, step_0, step_1, step_2, step_3,
    COMPONENTS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Where windows begin, counted in elements, and whether they lie inside. ``BITS``: those of an unsigned index that
    is stored as signed, else 0."""
    valid = windows < WINDOWS
    start = windows * 0
    for number in tl.static_range(COMPONENTS):
        limit, step = limit_0, step_0
        if number == 1:
            limit, step = limit_1, step_1
        if number == 2:
            limit, step = limit_2, step_2
        if number == 3:
            limit, step = limit_3, step_3
        index = tl.load(indices + windows * COMPONENTS + number, mask=windows < WINDOWS, other=0).to(tl.int64)
        if BITS == 16:
            index = index & 0xFFFF
        if BITS == 32:
            index = index & 0xFFFFFFFF
        valid = valid & (index >= 0) & (index <= limit)
        start += index * step
    return start, valid


@triton.jit
def last_windows(
    table, indices, WINDOWS, WIDTH, limit_0, limit_1, limit_2, limit_3, step_0, step_1, step_2, step_3,
    COMPONENTS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """table s32 [places of WIDTH elements], -1 everywhere -> the last window at each place."""
    windows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start, valid = _start(
        indices, windows, WINDOWS, limit_0, limit_1, limit_2, limit_3, step_0, step_1, step_2, step_3, COMPONENTS, BITS
    )
    tl.atomic_max(table + start // WIDTH, windows.to(tl.int32), mask=valid, sem="relaxed")


@triton.jit
def scatter(
    target, unsigned_target, indices, updates, offsets, table, WINDOWS, ELEMENTS, limit_0, limit_1, limit_2, limit_3,
    step_0, step_1, step_2, step_3, COMPONENTS: tl.constexpr, BITS: tl.constexpr, IN_A_ROW: tl.constexpr,
    COMBINE: tl.constexpr, WRITTEN: tl.constexpr, INFINITE: tl.constexpr, GREATEST: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """updates [WINDOWS, ELEMENTS], indices [WINDOWS, COMPONENTS]. The elements of a window are IN_A_ROW, or at
    ``offsets`` from its first one. ``unsigned_target`` is ``target``. Floats are compared by their bits, of which
    INFINITE are infinity's and GREATEST all but the sign: a NaN is made one that is above or below everything, as those
    of ``target`` must have been (``with_nan_of_extremum``)."""
    windows = tl.program_id(0).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    elements = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    start, valid = _start(
        indices, windows, WINDOWS, limit_0, limit_1, limit_2, limit_3, step_0, step_1, step_2, step_3, COMPONENTS, BITS
    )
    if WRITTEN == LAST:
        for first in range(0, WINDOWS, BLOCK_W):
            others = first + tl.arange(0, BLOCK_W).to(tl.int64)
            places, inside = _start(
                indices, others, WINDOWS, limit_0, limit_1, limit_2, limit_3, step_0, step_1, step_2, step_3,
                COMPONENTS, BITS,
            )  # fmt: skip
            later = (others[None, :] > windows[:, None]) & (places[None, :] == start[:, None]) & inside[None, :]
            valid = valid & (tl.max(later.to(tl.int32), 1) == 0)
    if WRITTEN == OF_TABLE:
        valid = valid & (tl.load(table + start // ELEMENTS, mask=valid, other=-1) == windows)
    inside = valid[:, None] & (elements < ELEMENTS)[None, :]
    value = tl.load(updates + windows[:, None] * ELEMENTS + elements[None, :], mask=inside, other=0)
    if IN_A_ROW:
        place = start[:, None] + elements[None, :]
    else:
        place = start[:, None] + tl.load(offsets + elements, mask=elements < ELEMENTS, other=0)[None, :]
    if COMBINE == SET:
        tl.store(target + place, value, mask=inside)
    if COMBINE == ADD:
        tl.atomic_add(target + place, value, mask=inside, sem="relaxed")
    if COMBINE == AND:
        tl.atomic_and(target + place, value, mask=inside, sem="relaxed")
    if COMBINE == OR:
        tl.atomic_or(target + place, value, mask=inside, sem="relaxed")
    if COMBINE == XOR:
        tl.atomic_xor(target + place, value, mask=inside, sem="relaxed")
    if COMBINE == MAXIMUM:
        tl.atomic_max(target + place, value, mask=inside, sem="relaxed")
    if COMBINE == MINIMUM:
        tl.atomic_min(target + place, value, mask=inside, sem="relaxed")
    # Floats without a sign are ordered as integers, those with one as unsigned integers the other way round.
    if COMBINE == FLOAT_MAXIMUM:
        value = tl.where((value & GREATEST) > INFINITE, GREATEST, value)
        unsigned = value.to(unsigned_target.dtype.element_ty, bitcast=True)
        tl.atomic_max(target + place, value, mask=inside & (value >= 0), sem="relaxed")
        tl.atomic_min(unsigned_target + place, unsigned, mask=inside & (value < 0), sem="relaxed")
    if COMBINE == FLOAT_MINIMUM:
        value = tl.where((value & GREATEST) > INFINITE, -1, value)
        unsigned = value.to(unsigned_target.dtype.element_ty, bitcast=True)
        tl.atomic_min(target + place, value, mask=inside & (value >= 0), sem="relaxed")
        tl.atomic_max(unsigned_target + place, unsigned, mask=inside & (value < 0), sem="relaxed")


@triton.jit
def with_nan_of_extremum(
    source, copy, SIZE, INFINITE: tl.constexpr, GREATEST: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies the bits of floats; of every NaN it makes ``NAN``."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + places, mask=places < SIZE, other=0)
    tl.store(copy + places, tl.where((value & GREATEST) > INFINITE, NAN, value), mask=places < SIZE)
