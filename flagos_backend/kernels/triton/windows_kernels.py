# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of reductions over windows and of select-and-scatter, as pooling and its gradient are.

An array is [A, H, W, B]: H and W are what windows reach over, B what is contiguous behind them. Windows are [A, OH, OW,
B]. A place is a position inside the window, counted row by row. Numbers are computed with as ACC.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kernels take a dozen sizes, which one to a line would bury the code: lists of them are filled.
# fmt: off


@triton.jit
def _split(offsets, ROWS: tl.constexpr, COLUMNS: tl.constexpr, B: tl.constexpr):
    """Elements of an array [A, ROWS, COLUMNS, B] as a, row, column, b."""
    b = offsets % B
    rest = offsets // B
    return rest // (COLUMNS * ROWS), rest // COLUMNS % ROWS, rest % COLUMNS, b


@triton.jit
def reduce_windows(
    x, initial, result, count,
    H: tl.constexpr, W: tl.constexpr, B: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, COMBINE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, row, column, b = _split(offsets, OH, OW, B)
    reduced = tl.zeros((BLOCK,), ACC) + tl.load(initial).to(ACC)
    for kh in tl.static_range(KH):
        h = row * SH - PH + kh * DH
        for kw in tl.static_range(KW):
            w = column * SW - PW + kw * DW
            inside = (offsets < count) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            value = tl.load(x + ((a * H + h) * W + w) * B + b, mask=inside, other=0.0).to(ACC)
            if COMBINE == "maximum":
                value = tl.maximum(reduced, value, propagate_nan=tl.PropagateNan.ALL)
            elif COMBINE == "minimum":
                value = tl.minimum(reduced, value, propagate_nan=tl.PropagateNan.ALL)
            else:
                value = reduced + value
            reduced = tl.where(inside, value, reduced)
    tl.store(result + offsets, reduced.to(result.dtype.element_ty), mask=offsets < count)


@triton.jit
def select_places(
    x, places, count,
    H: tl.constexpr, W: tl.constexpr, B: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, COMPARE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):
    """The place that each window selects, -1 where it holds no element. What is selected stays so while it compares
    true with the next one."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, row, column, b = _split(offsets, OH, OW, B)
    selected = tl.zeros((BLOCK,), ACC)
    place = tl.full((BLOCK,), -1, tl.int32)
    for kh in tl.static_range(KH):
        h = row * SH - PH + kh * DH
        for kw in tl.static_range(KW):
            w = column * SW - PW + kw * DW
            inside = (offsets < count) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            value = tl.load(x + ((a * H + h) * W + w) * B + b, mask=inside, other=0.0).to(ACC)
            if COMPARE == "GE":
                stays = selected >= value
            elif COMPARE == "GT":
                stays = selected > value
            elif COMPARE == "LE":
                stays = selected <= value
            else:
                stays = selected < value
            better = inside & ((place < 0) | (stays == 0))
            selected = tl.where(better, value, selected)
            place = tl.where(better, kh * KW + kw, place)
    tl.store(places + offsets, place.to(tl.int8), mask=offsets < count)


@triton.jit
def gather_selected(
    places, source, initial, result, count,
    H: tl.constexpr, W: tl.constexpr, B: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):
    """For each element of the array the sum over the windows that selected it, in a fixed order."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, h, w, b = _split(offsets, H, W, B)
    total = tl.zeros((BLOCK,), ACC) + tl.load(initial).to(ACC)
    for kh in tl.static_range(KH):
        down = h + PH - kh * DH
        for kw in tl.static_range(KW):
            right = w + PW - kw * DW
            there = (offsets < count) & (down >= 0) & (down % SH == 0) & (down // SH < OH)
            there = there & (right >= 0) & (right % SW == 0) & (right // SW < OW)
            window = ((a * OH + down // SH) * OW + right // SW) * B + b
            there = there & (tl.load(places + window, mask=there, other=-1).to(tl.int32) == kh * KW + kw)
            total += tl.load(source + window, mask=there, other=0.0).to(ACC)
    tl.store(result + offsets, total.to(result.dtype.element_ty), mask=offsets < count)
