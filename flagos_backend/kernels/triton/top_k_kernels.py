# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of top-k: one program walks a row, or a segment of one, and keeps the best of what it has seen."""

from __future__ import annotations

import triton
import triton.language as tl

# Below every key.
LOWEST = tl.constexpr(-(1 << 63))
LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys(
    row, columns, N, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_UNSIGNED: tl.constexpr, LARGEST: tl.constexpr
):
    """int64 that no two columns share: the total order of the value, which is BITS wide and stored as an integer, above
    the column, the lower one first."""
    bits = tl.load(row + columns, columns < N, 0).to(tl.int32)
    if IS_FLOAT:
        bits = bits ^ ((bits >> 31) & ((1 << (BITS - 1)) - 1))
    if IS_UNSIGNED:
        bits = bits ^ (-(1 << (BITS - 1)))
    if not LARGEST:
        bits = ~bits
    return tl.where(columns < N, (bits.to(tl.int64) << 32) | (-columns + LAST).to(tl.int64), LOWEST)


@triton.jit
def top_k(
    values, best_values, best_columns, N, k, K: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, IS_UNSIGNED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid (rows). values int[rows, N], best_values int[rows, k], best_columns int32[rows, k]; ``K``: the next power of
    two from ``k`` on."""
    number = tl.program_id(0).to(tl.int64)
    row = values + number * N
    best = _best_of(row, 0, N, N, K, BLOCK, BITS, IS_FLOAT, IS_UNSIGNED, LARGEST)
    _write(row, best, best_values, best_columns, number, k, K)


@triton.jit
def top_of_segments(
    values, keys, N, BLOCKS, K: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr,
    IS_UNSIGNED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Grid (rows, segments of BLOCKS blocks each). keys int64[rows, segments, K]: the best of each segment."""
    number, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, first = values + number * N, segment * BLOCKS * BLOCK
    end = tl.minimum(first + BLOCKS * BLOCK, N)
    best = _best_of(row, first, end, N, K, BLOCK, BITS, IS_FLOAT, IS_UNSIGNED, LARGEST)
    tl.store(keys + (number * tl.num_programs(1) + segment) * K + tl.arange(0, K), best)


@triton.jit
def top_of_keys(
    values, keys, best_values, best_columns, N, KEYS, k, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows). keys int64[rows, KEYS], which say what the best of a row are; the rest as of ``top_k``."""
    number = tl.program_id(0).to(tl.int64)
    best = tl.full([K], LOWEST, tl.int64)
    for start in tl.range(0, KEYS, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        found = tl.load(keys + number * KEYS + columns, columns < KEYS, LOWEST)
        best = tl.topk(tl.reshape(tl.join(best, tl.topk(found, K)), [2 * K]), K)
    _write(values + number * N, best, best_values, best_columns, number, k, K)


@triton.jit
def _best_of(
    row, first, end, N, K: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr,
    IS_UNSIGNED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """The keys of the best from column ``first`` to ``end``, which is a block's end or the row's."""
    best = tl.full([K], LOWEST, tl.int64)
    for start in tl.range(first, end, BLOCK):  # The first block too: the network takes seconds to compile.
        keys = _keys(row, start + tl.arange(0, BLOCK), N, BITS, IS_FLOAT, IS_UNSIGNED, LARGEST)
        best = tl.topk(tl.reshape(tl.join(best, tl.topk(keys, K)), [2 * K]), K)
    return best


@triton.jit
def _write(row, best, best_values, best_columns, number, k, K: tl.constexpr):
    rank = tl.arange(0, K)
    columns = -(best & LAST).to(tl.int32) + LAST
    tl.store(best_columns + number * k + rank, columns, rank < k)
    tl.store(best_values + number * k + rank, tl.load(row + columns, rank < k), rank < k)
