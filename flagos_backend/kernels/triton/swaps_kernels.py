# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of row orders: what the swaps of an LU factorisation make of 0, 1, 2, ..."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compose_swaps(pivots, order, SWAPS, ROWS, BLOCK: tl.constexpr):
    """For swaps i <-> pivots[b, i] the row that comes to each place: from the last swap back, each place alone."""
    matrix = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = places
    for back in range(SWAPS):
        swap = SWAPS - 1 - back
        other = tl.load(pivots + matrix * SWAPS + swap)
        rows = tl.where(rows == swap, other, tl.where(rows == other, swap, rows))
    tl.store(order + matrix * ROWS + places, rows, mask=places < ROWS)
