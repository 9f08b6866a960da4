# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of a matrix laid out by columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def transpose(source, result, ROWS, COLUMNS, STRIDE, MORE_ROWS, MORE_COLUMNS, BLOCK: tl.constexpr):
    """source [ROWS, COLUMNS], STRIDE from row to row -> result [MORE_COLUMNS, MORE_ROWS], zeros beyond the source."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    places = rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    block = tl.trans(tl.load(source + places, mask=inside, other=0))
    kept = (columns < MORE_COLUMNS)[:, None] & (rows < MORE_ROWS)[None, :]
    tl.store(result + columns.to(tl.int64)[:, None] * MORE_ROWS + rows[None, :], block, mask=kept)
