# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of attention and its gradients: online softmax over blocks of keys, so no array over queries and keys.

Shapes: B batches, H heads of the query, G heads of the query to one of the key, T and S positions, D and E channels.
One program computes a block of BLOCK_M queries (or BLOCK_N keys) of one head. Logits are kept in units of log2.
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
# In units of log2: below it a row's statistics are its maximum, to which no logarithm of a sum adds anything.
DEEP = tl.constexpr(-(2.0**29))


@triton.jit
def _as_multiplied(x, element: tl.constexpr, PRECISION: tl.constexpr):
    """What a product of such elements reads of float32 ``x``: matrix units cut float32 to the 19 bits of TF32. What has
    to cancel with a product is computed from the same numbers."""
    if element == tl.float32 and PRECISION == "tf32":
        x = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return x


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
    PRECISION: tl.constexpr,
):
    """One online-softmax step for each block of keys in [first, last)."""
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in tl.range(first, last, BLOCK_N):
        s = start + tl.arange(0, BLOCK_N)
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
    HAS_SINK: tl.constexpr, EMPTY_ROWS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
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
    t = start + tl.arange(0, BLOCK_M)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
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
            BLOCK_E, True, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN, PRECISION,
        )
    accumulator, row_sum, row_maximum = _forward_blocks(
        accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, full_first, full_last, T, S, D, E, key_s,
        key_d, value_s, value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D,
        BLOCK_E, False, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN, PRECISION,
    )
    accumulator, row_sum, row_maximum = _forward_blocks(
        accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, full_last, last, T, S, D, E, key_s, key_d,
        value_s, value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D, BLOCK_E, True,
        CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN, PRECISION,
    )
    if HAS_MASK and FINITE_FILL:
        # A row that sees no key has equal weights over all keys, also those that the band skipped.
        blind = tl.max(((row_maximum <= 0.5 * fill) & (t < T)).to(tl.int32), 0) > 0
        if HAS_LOWER:
            accumulator, row_sum, row_maximum = _forward_blocks(
                accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, 0, tl.where(blind, first, 0), T, S, D,
                E, key_s, key_d, value_s, value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N,
                BLOCK_D, BLOCK_E, True, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN, PRECISION,
            )
        if HAS_UPPER:
            rest = (tl.maximum(last, full_last) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            accumulator, row_sum, row_maximum = _forward_blocks(
                accumulator, row_sum, row_maximum, q, key, value, bias, mask, t, rest, tl.where(blind, S, rest), T, S,
                D, E, key_s, key_d, value_s, value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower,
                BLOCK_N, BLOCK_D, BLOCK_E, True, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, EMPTY_ROWS, EVEN,
                PRECISION,
            )
    tl.store(statistics + tl.program_id(1).to(tl.int64) * T + t, (row_maximum + tl.log2(row_sum)) / LOG2E, mask=t < T)
    out = accumulator / row_sum[:, None]
    tl.store(
        output + t[:, None] * output_t + e[None, :] * output_e,
        out.to(output.dtype.element_ty),
        mask=(t < T)[:, None] & (e < E)[None, :],
    )


@triton.jit
def attention_delta(
    output, gradient, statistics, sink, delta, sink_gradient, output_b, output_h, output_t, output_e, gradient_b,
    gradient_h, gradient_t, gradient_e, sink_b, sink_h, dsink_b, dsink_h, dsink_t, H, T, E, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr, HAS_SINK: tl.constexpr, PRECISION: tl.constexpr,
):
    """Grid (blocks of queries, B·H). delta f32[B,H,T]: the sum over channels of output times its gradient. With
    HAS_SINK also ``sink_gradient`` [B,H,T]: of each row's sink, whose weight its statistics tell."""
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    inside = (t < T)[:, None] & (e < E)[None, :]
    o = tl.load(
        output + b * output_b + h * output_h + t[:, None] * output_t + e[None, :] * output_e, mask=inside, other=0
    )
    g = tl.load(
        gradient + b * gradient_b + h * gradient_h + t[:, None] * gradient_t + e[None, :] * gradient_e,
        mask=inside,
        other=0,
    )
    wide = _as_multiplied(g.to(tl.float32), gradient.dtype.element_ty, PRECISION)
    total = tl.sum(o.to(tl.float32) * wide, 1)
    row = tl.program_id(1).to(tl.int64) * T + t
    tl.store(delta + row, total, mask=t < T)
    if HAS_SINK:
        of_sink = tl.load(sink + b * sink_b + h * sink_h).to(tl.float32)
        weights = tl.exp2((of_sink - tl.load(statistics + row, mask=t < T, other=float("inf"))) * LOG2E)
        place = b * dsink_b + h * dsink_h + t * dsink_t
        tl.store(sink_gradient + place, (-weights * total).to(sink_gradient.dtype.element_ty), mask=t < T)


@triton.jit
def _weights(
    logits, hidden, statistics, t, s, S, fill, upper, lower, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, FINITE_FILL: tl.constexpr, EDGE: tl.constexpr,
):
    """The softmax from its statistics (in units of log2): float32[t, s]. Where a bias hides all that a row sees, the
    weights are taken to be equal."""
    weights = tl.exp2(logits - statistics[:, None])
    if HAS_BIAS and not HAS_MASK:
        seen = tl.minimum(S, t + upper + 1) if HAS_UPPER else t * 0 + S
        if HAS_LOWER:
            seen -= tl.maximum(0, t - lower)
        greatest = logits >= (statistics * 1.000001)[:, None]
        equal = tl.where(greatest, (1.0 / tl.maximum(seen, 1))[:, None], 0.0)
        deep = (statistics < DEEP) & (statistics > float("-inf"))
        weights = tl.where(deep[:, None], equal, weights)
    if EDGE or HAS_MASK:
        weights = tl.where(hidden, 0.0, weights)
    if HAS_MASK:
        if FINITE_FILL:
            blind = (statistics <= 0.5 * fill)[:, None] & (s < S)[None, :]
            weights = tl.where(blind, 1.0 / S, weights)
        else:
            weights = tl.where((statistics == float("-inf"))[:, None], float("nan"), weights)
    return weights


@triton.jit
def _key_gradient_blocks(
    key_gradient, value_gradient, query, gradient, k, v, bias, mask, statistics, delta, s, first, last, T, S, D, E,
    query_t, query_d, gradient_t, gradient_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, EDGE: tl.constexpr, CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr,
    FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Adds what the queries of [first, last) give to the gradients of one block of keys and values."""
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in tl.range(first, last, BLOCK_M):
        t = start + tl.arange(0, BLOCK_M)
        q_pointers = query + t[:, None] * query_t + d[None, :] * query_d
        g_pointers = gradient + t[:, None] * gradient_t + e[None, :] * gradient_e
        if EDGE or not EVEN:
            q = tl.load(q_pointers, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
            g = tl.load(g_pointers, mask=(t < T)[:, None] & (e < E)[None, :], other=0.0)
            stats = tl.load(statistics + t, mask=t < T, other=float("inf")) * LOG2E
            dots = tl.load(delta + t, mask=t < T, other=0.0)
        else:
            q, g = tl.load(q_pointers), tl.load(g_pointers)
            stats, dots = tl.load(statistics + t) * LOG2E, tl.load(delta + t)
        logits, hidden, capped = _logits(
            q, k, bias, mask, t, s, T, S, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, EDGE, CAP,
            HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, PRECISION,
        )
        weights = _weights(
            logits, hidden, stats, t, s, S, fill, upper, lower, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL,
            EDGE,
        )
        value_gradient = tl.dot(tl.trans(weights.to(g.dtype)), g, value_gradient, input_precision=PRECISION)
        slope = tl.dot(g, tl.trans(v), input_precision=PRECISION) - dots[:, None]
        if CAP > 0:
            slope *= 1.0 - capped * capped
        logits_gradient = weights * slope
        if (EDGE or HAS_MASK) and not ADDED:
            logits_gradient = tl.where(hidden, 0.0, logits_gradient)
        key_gradient = tl.dot(tl.trans(logits_gradient.to(q.dtype)), q, key_gradient, input_precision=PRECISION)
    return key_gradient, value_gradient


@triton.jit
def attention_key_gradient(
    query, key, value, bias, mask, gradient, statistics, delta, key_gradient, value_gradient, query_b, query_h, query_t,
    query_d, key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_e, bias_b, bias_h, bias_t, bias_s, mask_b,
    mask_h, mask_t, mask_s, gradient_b, gradient_h, gradient_t, gradient_e, dk_b, dk_h, dk_s, dk_d, dv_b, dv_h, dv_s,
    dv_e, H, G, T, S, D, E, scale, fill, upper, lower, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, FINITE_FILL: tl.constexpr, ADDED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Grid (blocks of keys, B·H/G). ``key_gradient`` [B,K,S,D] and ``value_gradient`` [B,K,S,E]."""
    start = tl.program_id(0) * BLOCK_N
    heads = H // G
    b, kh = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    s = start + tl.arange(0, BLOCK_N)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_key, in_value = (s < S)[:, None] & (d < D)[None, :], (s < S)[:, None] & (e < E)[None, :]
    k = tl.load(key + b * key_b + kh * key_h + s[:, None] * key_s + d[None, :] * key_d, mask=in_key, other=0.0)
    v = tl.load(
        value + b * value_b + kh * value_h + s[:, None] * value_s + e[None, :] * value_e, mask=in_value, other=0.0
    )
    dk, dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    # Queries [first, last) see some of these keys; those of [full_first, full_last) see all of them.
    first, last = 0, T
    full_first, full_last = 0, T // BLOCK_M * BLOCK_M
    if HAS_UPPER:
        first = tl.maximum(0, start - upper) // BLOCK_M * BLOCK_M
        full_first = (tl.maximum(0, start + BLOCK_N - 1 - upper) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if HAS_LOWER:
        last = tl.minimum(T, start + BLOCK_N + lower)
        full_last = tl.minimum(full_last, tl.maximum(0, start + lower + 1) // BLOCK_M * BLOCK_M)
    if HAS_MASK and FINITE_FILL:  # rows that see no key give every key a weight
        first, last = 0, T
    full_first = tl.where(start + BLOCK_N > S, T + BLOCK_M, full_first)  # keys past the end: none is full
    full_first = tl.minimum(full_first, (tl.maximum(first, last) + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    full_last = tl.maximum(full_last, full_first)
    for group in range(G):
        h = kh * G + group
        row = (b * H + h) * T
        q, g = query + b * query_b + h * query_h, gradient + b * gradient_b + h * gradient_h
        bias_here, mask_here = bias + b * bias_b + h * bias_h, mask + b * mask_b + h * mask_h
        dk, dv = _key_gradient_blocks(
            dk, dv, q, g, k, v, bias_here, mask_here, statistics + row, delta + row, s, first, full_first, T, S, D, E,
            query_t, query_d, gradient_t, gradient_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower,
            BLOCK_M, BLOCK_D, BLOCK_E, True, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN,
            PRECISION,
        )
        dk, dv = _key_gradient_blocks(
            dk, dv, q, g, k, v, bias_here, mask_here, statistics + row, delta + row, s, full_first, full_last, T, S, D,
            E, query_t, query_d, gradient_t, gradient_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower,
            BLOCK_M, BLOCK_D, BLOCK_E, False, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN,
            PRECISION,
        )
        dk, dv = _key_gradient_blocks(
            dk, dv, q, g, k, v, bias_here, mask_here, statistics + row, delta + row, s, full_last, last, T, S, D, E,
            query_t, query_d, gradient_t, gradient_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower,
            BLOCK_M, BLOCK_D, BLOCK_E, True, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN,
            PRECISION,
        )
    key_place = b * dk_b + kh * dk_h + s[:, None] * dk_s + d[None, :] * dk_d
    value_place = b * dv_b + kh * dv_h + s[:, None] * dv_s + e[None, :] * dv_e
    tl.store(key_gradient + key_place, (dk * factor).to(key_gradient.dtype.element_ty), mask=in_key)
    tl.store(value_gradient + value_place, dv.to(value_gradient.dtype.element_ty), mask=in_value)


@triton.jit
def _query_gradient_blocks(
    query_gradient, q, g, stats, dots, key, value, bias, mask, t, first, last, T, S, D, E, key_s, key_d, value_s,
    value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, EDGE: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr, FINITE_FILL: tl.constexpr, ADDED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):
    """Adds what the keys of [first, last) give to the gradient of one block of queries."""
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    for start in tl.range(first, last, BLOCK_N):
        s = start + tl.arange(0, BLOCK_N)
        k_pointers = key + s[:, None] * key_s + d[None, :] * key_d
        v_pointers = value + s[:, None] * value_s + e[None, :] * value_e
        if EDGE or not EVEN:
            k = tl.load(k_pointers, mask=(s < S)[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_pointers, mask=(s < S)[:, None] & (e < E)[None, :], other=0.0)
        else:
            k, v = tl.load(k_pointers), tl.load(v_pointers)
        logits, hidden, capped = _logits(
            q, k, bias, mask, t, s, T, S, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, EDGE, CAP,
            HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, PRECISION,
        )
        weights = _weights(
            logits, hidden, stats, t, s, S, fill, upper, lower, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL,
            EDGE,
        )
        slope = tl.dot(g, tl.trans(v), input_precision=PRECISION) - dots[:, None]
        if CAP > 0:
            slope *= 1.0 - capped * capped
        logits_gradient = weights * slope
        if (EDGE or HAS_MASK) and not ADDED:
            logits_gradient = tl.where(hidden, 0.0, logits_gradient)
        query_gradient = tl.dot(logits_gradient.to(k.dtype), k, query_gradient, input_precision=PRECISION)
    return query_gradient


@triton.jit
def attention_query_gradient(
    query, key, value, bias, mask, gradient, statistics, delta, query_gradient, query_b, query_h, query_t, query_d,
    key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_e, bias_b, bias_h, bias_t, bias_s, mask_b, mask_h,
    mask_t, mask_s, gradient_b, gradient_h, gradient_t, gradient_e, dq_b, dq_h, dq_t, dq_d, H, G, T, S, D, E, scale,
    fill, upper, lower, factor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_UPPER: tl.constexpr,
    HAS_LOWER: tl.constexpr, FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of queries, B·H). ``query_gradient`` [B,H,T,D]."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    kh = h // G
    t = start + tl.arange(0, BLOCK_M)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_query = (t < T)[:, None] & (d < D)[None, :]
    q = tl.load(
        query + b * query_b + h * query_h + t[:, None] * query_t + d[None, :] * query_d, mask=in_query, other=0.0
    )
    g = tl.load(
        gradient + b * gradient_b + h * gradient_h + t[:, None] * gradient_t + e[None, :] * gradient_e,
        mask=(t < T)[:, None] & (e < E)[None, :],
        other=0.0,
    )
    row = tl.program_id(1).to(tl.int64) * T + t
    stats = tl.load(statistics + row, mask=t < T, other=float("inf")) * LOG2E
    dots = tl.load(delta + row, mask=t < T, other=0.0)
    key, value = key + b * key_b + kh * key_h, value + b * value_b + kh * value_h
    bias, mask = bias + b * bias_b + h * bias_h, mask + b * mask_b + h * mask_h
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first, full_first, full_last, last = _key_range(start, BLOCK_M, T, S, upper, lower, BLOCK_N, HAS_UPPER, HAS_LOWER)
    if HAS_MASK and FINITE_FILL and ADDED:  # keys that the band skips have weights, too
        blind = tl.max(((stats <= 0.5 * fill) & (t < T)).to(tl.int32), 0) > 0
        first, last = tl.where(blind, 0, first), tl.where(blind, S, last)
    if HAS_LOWER:
        dq = _query_gradient_blocks(
            dq, q, g, stats, dots, key, value, bias, mask, t, first, full_first, T, S, D, E, key_s, key_d, value_s,
            value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D, BLOCK_E, True,
            CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN, PRECISION,
        )
    dq = _query_gradient_blocks(
        dq, q, g, stats, dots, key, value, bias, mask, t, full_first, full_last, T, S, D, E, key_s, key_d, value_s,
        value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D, BLOCK_E, False,
        CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN, PRECISION,
    )
    dq = _query_gradient_blocks(
        dq, q, g, stats, dots, key, value, bias, mask, t, full_last, last, T, S, D, E, key_s, key_d, value_s,
        value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D, BLOCK_E, True,
        CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN, PRECISION,
    )
    place = b * dq_b + h * dq_h + t[:, None] * dq_t + d[None, :] * dq_d
    tl.store(query_gradient + place, (dq * factor).to(query_gradient.dtype.element_ty), mask=in_query)
