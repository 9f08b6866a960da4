# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of attention: online softmax over blocks of keys, so no array over queries and keys. Its logits are those
of the gradients' kernels (attention_gradient_kernels.py), too.

Shapes: B batches, H heads of the query, G heads of the query to one of the key, T and S positions, D and E channels.
One program computes a block of BLOCK_M queries of one head. Logits are kept in units of log2.
Method: Dao, FlashAttention-2 (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kernels take dozens of arguments, which one to a line would bury the code: lists of them are filled.
# fmt: off
LOG2E = tl.constexpr(1.4426950408889634)
# Above what stands for hidden keys (attention.py), and a number in units of log2.
LOWEST_BIAS = tl.constexpr(-1e29)


@triton.jit
def _as_multiplied(x, element: tl.constexpr, PRECISION: tl.constexpr):
    """What a product of such elements reads of float32 ``x``: matrix units cut float32 to the 19 bits of TF32. What has
    to cancel with a product is computed from the same numbers."""
    if element == tl.float32 and PRECISION == "tf32":
        x = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _range(SIZE: tl.constexpr, WIDE: tl.constexpr):
    """0 to SIZE - 1, in 64 bits where positions that start with them, times a stride, take more than 32."""
    numbers = tl.arange(0, SIZE)
    if WIDE:
        numbers = numbers.to(tl.int64)
    return numbers


@triton.jit
def _hidden(t, s, upper, lower, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr):
    """Which key positions ``s`` the band hides from query positions ``t``; int1[t, s]."""
    hidden = (t + s) < 0
    if HAS_UPPER:
        hidden = hidden | (s > t + upper)
    if HAS_LOWER:
        hidden = hidden | (s < t - lower)
    return hidden


@triton.jit
def _key_range(
    start, rows, T, S, upper, lower, BLOCK_N: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr
):
    """Keys that a block of queries can see: [first, last), of which [full_first, full_last) need no look at the band.
    Bounds of the full part are multiples of BLOCK_N, as is ``first``."""
    first, last = 0, S
    full_first, full_last = 0, S // BLOCK_N * BLOCK_N
    if HAS_UPPER:
        last = tl.minimum(S, tl.maximum(0, start + rows + upper))
        full_last = tl.minimum(full_last, tl.maximum(0, start + upper + 1) // BLOCK_N * BLOCK_N)
    if HAS_LOWER:
        first = tl.minimum(last, tl.maximum(0, start - lower)) // BLOCK_N * BLOCK_N
        full_first = (tl.maximum(0, tl.minimum(start + rows, T) - 1 - lower) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        full_first = tl.minimum(full_first, (last + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        full_last = tl.maximum(full_last, full_first)
    return first, full_first, full_last, last


@triton.jit
def _tanh(x):
    """Within three units of the last place: by its series near zero, where the exponential has lost x."""
    square = x * x
    series = -17.0 / 315.0 + square * (62.0 / 2835.0 - square * (1382.0 / 155925.0))
    series = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * series))
    return tl.where(tl.abs(x) < 0.4, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def _logits(
    q, k, bias, mask, t, s, T, S, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, EDGE: tl.constexpr,
    CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits times log2(e) of queries ``t`` and keys ``s``, hidden ones at ``fill``, keys past the end at -infinity;
    which are hidden, and with a soft CAP (in units of log2) the tanh that it is made with, of the products times
    ``scale``. Only with EDGE there may be keys past the end or outside the band."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    capped = logits
    if CAP > 0:
        capped = _tanh(logits)
        logits = capped * CAP
    inside = (t < T)[:, None] & (s < S)[None, :]
    if HAS_BIAS:
        b = tl.load(bias + t[:, None] * bias_t + s[None, :] * bias_s, mask=inside, other=0.0)
        b = b.to(tl.float32)
        lowest = (b < LOWEST_BIAS) & (b > float("-inf"))
        logits += tl.where(lowest, LOWEST_BIAS, b) * LOG2E
    hidden = (t < 0)[:, None] & (s < 0)[None, :]
    if HAS_MASK:
        visible = tl.load(mask + t[:, None] * mask_t + s[None, :] * mask_s, mask=inside, other=1)
        hidden = visible == 0
    if EDGE:
        hidden = hidden | _hidden(t[:, None], s[None, :], upper, lower, HAS_UPPER, HAS_LOWER)
    if EDGE or HAS_MASK:
        logits = tl.where(hidden, fill, logits)
    if EDGE:
        logits = tl.where((s < S)[None, :], logits, float("-inf"))
    return logits, hidden, capped


@triton.jit
def _forward_blocks(
    accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, first, last, T, S, D, E, key_s, key_d, value_s,
    value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, EDGE: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, EMPTY_ROWS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    """One online-softmax step for each block of keys in [first, last)."""
    d, e = _range(BLOCK_D, WIDE), _range(BLOCK_E, WIDE)
    for start in tl.range(first, last, BLOCK_N):
        s = start + _range(BLOCK_N, WIDE)
        k_pointers = key + s[:, None] * key_s + d[None, :] * key_d
        v_pointers = value + s[:, None] * value_s + e[None, :] * value_e
        if EDGE or not EVEN:
            k = tl.load(k_pointers, mask=(s < S)[:, None] & (d < D)[None, :], other=0.0)
        else:
            k = tl.load(k_pointers)
        logits, _, _ = _logits(
            q, k, bias, mask, t, s, T, S, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, EDGE, CAP,
            HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, PRECISION,
        )
        maximum = tl.maximum(row_maximum, tl.max(logits, 1))
        shift = maximum
        if EMPTY_ROWS:  # nothing visible yet: exp2(-inf - -inf) would be NaN
            shift = tl.where(maximum == float("-inf"), 0.0, maximum)
        weights = tl.exp2(logits - shift[:, None])
        correction = tl.exp2(row_maximum - shift)
        weights = _as_multiplied(weights, value.dtype.element_ty, PRECISION)
        row_sum = row_sum * correction + tl.sum(weights, 1)
        accumulator = accumulator * correction[:, None]
        if EDGE or not EVEN:
            v = tl.load(v_pointers, mask=(s < S)[:, None] & (e < E)[None, :], other=0.0)
        else:
            v = tl.load(v_pointers)
        accumulator = tl.dot(weights.to(v.dtype), v, accumulator, input_precision=PRECISION)
        row_maximum = maximum
    return accumulator, row_sum, row_maximum


@triton.jit
def attention_forward(
    query, key, value, bias, mask, sink, output, statistics, query_b, query_h, query_t, query_d, key_b, key_h, key_s,
    key_d, value_b, value_h, value_s, value_e, bias_b, bias_h, bias_t, bias_s, mask_b, mask_h, mask_t, mask_s, sink_b,
    sink_h, output_b, output_h, output_t, output_e, H, G, T, S, D, E, scale, fill, upper, lower, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, FINITE_FILL: tl.constexpr,
    HAS_SINK: tl.constexpr, EMPTY_ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Grid (blocks of queries, B·H). ``scale``, ``fill`` in units of log2; ``statistics`` f32[B,H,T] in units of e."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the most keys first
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    b64, h64, kh = b.to(tl.int64), h.to(tl.int64), (h // G).to(tl.int64)
    query += b64 * query_b + h64 * query_h
    key += b64 * key_b + kh * key_h
    value += b64 * value_b + kh * value_h
    output += b64 * output_b + h64 * output_h
    bias += b64 * bias_b + h64 * bias_h
    mask += b64 * mask_b + h64 * mask_h
    start = block * BLOCK_M
    t = start + _range(BLOCK_M, WIDE)
    d, e = _range(BLOCK_D, WIDE), _range(BLOCK_E, WIDE)
    q = tl.load(
        query + t[:, None] * query_t + d[None, :] * query_d, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0
    )
    accumulator = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINK:  # one more logit, with no value; not in a row's sum where it is -infinity
        of_sink = tl.load(sink + b64 * sink_b + h64 * sink_h).to(tl.float32) * LOG2E
        row_maximum = tl.zeros([BLOCK_M], tl.float32) + of_sink
        row_sum = tl.where(row_maximum == float("-inf"), 0.0, tl.exp2(row_maximum - row_maximum))
    first, full_first, full_last, last = _key_range(start, BLOCK_M, T, S, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER)
    if HAS_LOWER:
        accumulator, row_sum, row_maximum = _forward_blocks(
            accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, first, full_first, T, S, D, E, key_s,
            key_d, value_s, value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D,
            BLOCK_E, True, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN, WIDE, PRECISION,
        )
    accumulator, row_sum, row_maximum = _forward_blocks(
        accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, full_first, full_last, T, S, D, E, key_s,
        key_d, value_s, value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D,
        BLOCK_E, False, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN, WIDE, PRECISION,
    )
    accumulator, row_sum, row_maximum = _forward_blocks(
        accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, full_last, last, T, S, D, E, key_s, key_d,
        value_s, value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D, BLOCK_E, True,
        CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN, WIDE, PRECISION,
    )
    if HAS_MASK and FINITE_FILL:
        # A row that sees no key has equal weights over all keys, also those that the band skipped.
        masked = tl.max(((row_maximum <= 0.5 * fill) & (t < T)).to(tl.int32), 0) > 0
        if HAS_LOWER:
            accumulator, row_sum, row_maximum = _forward_blocks(
                accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, 0, tl.where(masked, first, 0), T, S, D,
                E, key_s, key_d, value_s, value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N,
                BLOCK_D, BLOCK_E, True, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN, WIDE,
                PRECISION,
            )
        if HAS_UPPER:
            rest = (tl.maximum(last, full_last) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            accumulator, row_sum, row_maximum = _forward_blocks(
                accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, rest, tl.where(masked, S, rest), T, S,
                D, E, key_s, key_d, value_s, value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower,
                BLOCK_N, BLOCK_D, BLOCK_E, True, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN,
                WIDE, PRECISION,
            )
    tl.store(statistics + tl.program_id(1).to(tl.int64) * T + t, (row_maximum + tl.log2(row_sum)) / LOG2E, mask=t < T)
    out = accumulator / row_sum[:, None]
    tl.store(
        output + t[:, None] * output_t + e[None, :] * output_e,
        out.to(output.dtype.element_ty),
        mask=(t < T)[:, None] & (e < E)[None, :],
    )
