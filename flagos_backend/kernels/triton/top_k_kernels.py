# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of top-k: one program walks a row and keeps the best of what it has seen."""

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
    best = tl.full([K], LOWEST, tl.int64)
    for start in tl.range(0, N, BLOCK):  # The first block too: the network takes seconds to compile.
        keys = _keys(row, start + tl.arange(0, BLOCK), N, BITS, IS_FLOAT, IS_UNSIGNED, LARGEST)
        best = tl.topk(tl.reshape(tl.join(best, tl.topk(keys, K)), [2 * K]), K)
    rank = tl.arange(0, K)
    columns = -(best & LAST).to(tl.int32) + LAST
    tl.store(best_columns + number * k + rank, columns, rank < k)
    tl.store(best_values + number * k + rank, tl.load(row + columns, rank < k), rank < k)
