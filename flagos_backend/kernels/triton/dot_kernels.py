# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of small products: a program has a tile of the result and walks all of the contracted dimension."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _as_multiplied(x, PRECISION: tl.constexpr):
    """Matrix units cut f32 to TF32: rounded before, as libraries do, sums have a third of the error."""
    if x.dtype == tl.float32 and PRECISION == "tf32":
        rounded = (x.to(tl.int32, bitcast=True) + 0x1000) & ~0x1FFF
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)  # NaN's bits would wrap around
    return x


# Sizes and strides are a dozen, which one to a line would bury the code.
# fmt: off
@triton.jit
def multiply(
    lhs, rhs, result,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    LB: tl.constexpr, LM: tl.constexpr, LK: tl.constexpr, RB: tl.constexpr, RK: tl.constexpr, RN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    """[B, M, K] x [B, K, N] -> [B, M, N], the result row major. LB to RN: what a step along a dimension is. ``WIDE``:
    places in an operand, which may be a part of a larger array, take more than 32 bits."""
    columns: tl.constexpr = (N + BN - 1) // BN
    tiles: tl.constexpr = (M + BM - 1) // BM * columns
    program, step = tl.program_id(0), tl.arange(0, BK)
    if WIDE:
        program, step = program.to(tl.int64), step.to(tl.int64)
    batch, tile = program // tiles, program % tiles
    rows = tile // columns * BM + tl.arange(0, BM)[:, None]
    cols = tile % columns * BN + tl.arange(0, BN)[None, :]
    across, down = step[None, :], step[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(lhs + batch * LB + rows * LM + (k + across) * LK, mask=(rows < M) & (k + across < K), other=0.0)
        b = tl.load(rhs + batch * RB + (k + down) * RK + cols * RN, mask=(k + down < K) & (cols < N), other=0.0)
        total = tl.dot(
            _as_multiplied(a, PRECISION), _as_multiplied(b, PRECISION), total, input_precision=PRECISION
        )
    tl.store(result + (batch * M + rows) * N + cols, total.to(result.dtype.element_ty), mask=(rows < M) & (cols < N))
