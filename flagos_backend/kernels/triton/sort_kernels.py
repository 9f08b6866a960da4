# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of sort: a bitonic network over rows that one program holds in registers.

An element's number within the program has three parts, from the low bits up: its place in a thread (E), the lane (L)
and the warp (W). So the many short distances of a network cost a thread nothing but the comparisons, the next ones a
shuffle, and only the few long ones go through shared memory. Loops at run time over all but the first keep the code
small.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merged(bits, BITS: tl.constexpr, INFINITY: tl.constexpr):
    """Of float bits, sign extended to int32: zeros as +0, NaNs as the greatest of them."""
    NAN: tl.constexpr = (1 << (BITS - 1)) - 1
    magnitude = bits & NAN
    return tl.where(magnitude == 0, 0, tl.where(magnitude > INFINITY, NAN, bits))


@triton.jit
def _ordered(bits, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_UNSIGNED: tl.constexpr, DESCENDING: tl.constexpr):
    """Bits, sign extended to int32, to integers of the same width in the order that is asked for."""
    if IS_FLOAT:
        bits = bits ^ ((bits >> 31) & ((1 << (BITS - 1)) - 1))
    if IS_UNSIGNED:
        bits = bits ^ (-(1 << (BITS - 1)))
    if DESCENDING:
        bits = ~bits
    return bits


@triton.jit
def _bits(
    ordered, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_UNSIGNED: tl.constexpr, DESCENDING: tl.constexpr
):  # fmt: skip
    """What ``_ordered`` was given: each of its steps undoes itself, and none but the last meets the sign."""
    if DESCENDING:
        ordered = ~ordered
    return _ordered(ordered, BITS, IS_FLOAT, IS_UNSIGNED, False)


@triton.jit
def _exchange_in_threads(x, DISTANCE: tl.constexpr):
    """x [E, W, L]: the lesser of two elements that lie ``DISTANCE`` apart in a thread comes first."""
    pairs = tl.reshape(x, [x.shape[0] // (2 * DISTANCE), 2, DISTANCE, x.shape[1], x.shape[2]])
    second = tl.arange(0, 2)[None, :, None, None, None] == 1
    pairs = tl.where(second, tl.max(pairs, 1, keep_dims=True), tl.min(pairs, 1, keep_dims=True))
    return tl.reshape(pairs, x.shape)


@triton.jit
def _network(x, LOG: tl.constexpr, LOG_E: tl.constexpr, LOG_L: tl.constexpr):
    """x [E, W, L] with each run of 2**LOG elements in ascending order. LOG > LOG_E.

    A merge makes one run of two, the first of which ascends and the second descends. All exchanges are ascending ones
    nevertheless: the bits of every second run are flipped while it is made, and integers are in the opposite order
    then. Between two merges bits are flipped where just one of them wants it so.
    """
    E: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    L: tl.constexpr = x.shape[2]
    place = tl.arange(0, E)[:, None, None]
    warp = tl.arange(0, W)[None, :, None]
    lane = tl.arange(0, L)[None, None, :]
    thread = (warp * L + lane) % (1 << (LOG - LOG_E))
    number = thread << LOG_E | place
    x ^= (-(number & 1)).to(x.dtype)
    for log in tl.static_range(1, LOG_E + 1):
        x ^= (-((number >> log ^ number >> (log - 1)) & 1)).to(x.dtype)
        for step in tl.static_range(log):
            x = _exchange_in_threads(x, 1 << (log - 1 - step))
    for log in range(LOG_E + 1, LOG + 1):
        runs = thread >> (log - 1 - LOG_E)
        x ^= (-((runs >> 1 ^ runs) & 1)).to(x.dtype)
        if LOG > LOG_E + LOG_L:
            for step in range(LOG_E + LOG_L, log):
                distance = 1 << (log - 1 - step)
                # Through one dimension: of several the compiler would make a gather within warps, and move all data
                # before and after it.
                index = tl.reshape(place * (W * L) + (warp ^ distance) * L + lane, [E * W * L])
                other = tl.reshape(tl.gather(tl.reshape(x, [E * W * L]), index, 0), [E, W, L])
                x = tl.where((other < x) != ((warp & distance) != 0), other, x)
        in_warps = min(log, LOG_E + LOG_L)
        for step in range(LOG_E, in_warps):
            distance = 1 << (in_warps - 1 - step)
            other = tl.gather(x, tl.broadcast_to(lane ^ distance, [E, W, L]), 2)
            x = tl.where((other < x) != ((lane & distance) != 0), other, x)
        for step in tl.static_range(LOG_E):
            x = _exchange_in_threads(x, 1 << (LOG_E - 1 - step))
    return x


@triton.jit
def _restore(
    values, results, N, merged_bits, BLOCK: tl.constexpr, INFINITY: tl.constexpr, DESCENDING: tl.constexpr
):  # fmt: skip
    """Of one sorted row of float32: its elements that ``_merged`` makes ``merged_bits``, as they were and in their old
    order, over what was stored for them."""
    key = _ordered(merged_bits, 32, True, False, DESCENDING)
    place = 0
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        merged = _merged(tl.load(values + columns, columns < N, 0), 32, INFINITY)
        before = (_ordered(merged, 32, True, False, DESCENDING) < key) & (columns < N)
        place += tl.sum(before.to(tl.int32))
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        bits = tl.load(values + columns, columns < N, 0)
        member = (_merged(bits, 32, INFINITY) == merged_bits) & (columns < N)
        tl.store(results + place + tl.cumsum(member.to(tl.int32)) - 1, bits, member)
        place += tl.sum(member.to(tl.int32))


# Sizes that are known to be multiples of 16 would make loads wide, and the order of registers and lanes another.
@triton.jit(do_not_specialize=["N", "rows"])
def sort_rows(
    keys, sources, results, N, rows, LOG: tl.constexpr, LOG_E: tl.constexpr, LOG_W: tl.constexpr, LOG_L: tl.constexpr,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_UNSIGNED: tl.constexpr, DESCENDING: tl.constexpr,
    INFINITY: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Grid: rows over what a program holds, which are whole rows. 2**(LOG - 1) < N <= 2**LOG. keys int[rows, N], BITS
    wide; sources and results: tuples of int[rows, N]. ``INFINITY``: that float's bits where zeros and NaNs are merged,
    else 0.

    ``ALONE``: the keys, of 32 bits, are all there is to sort. Otherwise a key carries its column in the bits below it,
    which breaks ties, and everything is gathered by columns in the end.
    """
    E: tl.constexpr = 1 << LOG_E
    T: tl.constexpr = 1 << (LOG_W + LOG_L)
    THREADS_OF_ROW: tl.constexpr = 1 << (LOG - LOG_E)
    first = tl.program_id(0).to(tl.int64) * (T // THREADS_OF_ROW)
    left = rows - first.to(tl.int32)
    thread = tl.arange(0, T)[None, :]
    column = tl.arange(0, E)[:, None] * THREADS_OF_ROW + thread % THREADS_OF_ROW
    row = thread // THREADS_OF_ROW
    bits = tl.load(keys + first * N + (row * N + column), (column < N) & (row < left), 0).to(tl.int32)
    merged = bits
    if INFINITY:
        merged = _merged(bits, BITS, INFINITY)
        # Here, so that no registers keep both.
        lost = tl.max((merged != bits).to(tl.int32))
    # Padding: equal to the greatest key, and behind it.
    x = _ordered(merged, BITS, IS_FLOAT, IS_UNSIGNED, DESCENDING)
    GREATEST: tl.constexpr = (1 << (BITS - 1)) - 1
    x = tl.where(column < N, x, GREATEST)
    if not ALONE and BITS == 32:
        x = (x.to(tl.int64) << 32) | column
    elif not ALONE:
        x = (x << 16) | column
    x = _network(tl.reshape(x, [E, 1 << LOG_W, 1 << LOG_L]), LOG, LOG_E, LOG_L)

    x = tl.reshape(tl.permute(x, [1, 2, 0]), [E * T])
    number = tl.arange(0, E * T)
    row = number >> LOG
    column = number & ((1 << LOG) - 1)
    inside = (column < N) & (row < left)
    if ALONE:
        ordered = _bits(x, BITS, IS_FLOAT, IS_UNSIGNED, DESCENDING)
        tl.store(results[0] + first * N + (row * N + column), ordered, inside)
        if INFINITY:
            tl.debug_barrier()
            for each in range(2 * lost * min(left, T // THREADS_OF_ROW)):
                start = (first + each // 2) * N
                # Once for zeros, once for NaNs.
                _restore(keys + start, results[0] + start, N, each % 2 * GREATEST, T, INFINITY, DESCENDING)
    else:
        source = (x & 0xFFFF).to(tl.int32) if BITS < 32 else x.to(tl.int32)
        for operand in tl.static_range(len(sources)):
            values = tl.load(sources[operand] + first * N + (row * N + source), inside)
            tl.store(results[operand] + first * N + (row * N + column), values, inside)
