# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Device code of attention's gradients: logits again, and weights of them by each row's statistics, so that what is
summed over queries or over keys is no array over both. Letters and logits are those of attention_kernels.py.

One program computes a block of BLOCK_M queries, of BLOCK_N keys, or of both where the gradient is a bias's.
Method: Dao, FlashAttention-2 (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from flagos_backend.kernels.triton.attention_kernels import LOG2E, _as_multiplied, _key_range, _logits, _range

# Kernels take dozens of arguments, which one to a line would bury the code: lists of them are filled.
# fmt: off
# In units of log2: below it a row's statistics are its maximum, to which no logarithm of a sum adds anything.
DEEP = tl.constexpr(-(2.0**29))
# Rows of a head whose statistics are read at once.
SCANNED = tl.constexpr(1024)


@triton.jit
def attention_delta(
    output, gradient, statistics, sink, delta, sink_gradient, output_b, output_h, output_t, output_e, gradient_b,
    gradient_h, gradient_t, gradient_e, sink_b, sink_h, dsink_b, dsink_h, dsink_t, H, T, E, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr, HAS_SINK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Grid (blocks of queries, B·H). delta f32[B,H,T]: the sum over channels of output times its gradient. With
    HAS_SINK also ``sink_gradient`` [B,H,T]: of each row's sink, whose weight its statistics tell."""
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    t = tl.program_id(0) * BLOCK_M + _range(BLOCK_M, WIDE)
    e = _range(BLOCK_E, WIDE)
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
    if HAS_MASK and FINITE_FILL:
        masked = (statistics <= 0.5 * fill)[:, None] & (s < S)[None, :]
        weights = tl.where(masked, 1.0 / S, weights)
    elif HAS_MASK or (HAS_BIAS and EDGE and (HAS_UPPER or HAS_LOWER)):
        weights = tl.where((statistics == float("-inf"))[:, None], float("nan"), weights)
    return weights


@triton.jit
def _with_fully_masked_rows(first, last, statistics, rows, T, highest):
    """Queries [first, last), and from the first to the last of those whose statistics (in units of log2) are at most
    ``highest``, as are those of a row that sees no key. ``statistics`` [rows / T, T]. Reads 4 bytes of each row, which
    in a block of keys takes hundreds."""
    number = tl.arange(0, SCANNED)
    least, end = number * 0 + first, number * 0 + last
    for start in tl.range(0, rows, SCANNED):
        row = start + number
        masked = tl.load(statistics + row, mask=row < rows, other=float("inf")) * LOG2E <= highest
        least = tl.where(masked, tl.minimum(least, row % T), least)
        end = tl.where(masked, tl.maximum(end, row % T + 1), end)
    return tl.min(least, 0), tl.max(end, 0)


@triton.jit
def _key_gradient_blocks(
    key_gradient, value_gradient, query, gradient, k, v, bias, mask, statistics, delta, s, first, last, T, S, D, E,
    query_t, query_d, gradient_t, gradient_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, EDGE: tl.constexpr, CAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_UPPER: tl.constexpr, HAS_LOWER: tl.constexpr,
    FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Adds what the queries of [first, last) give to the gradients of one block of keys and values."""
    d, e = _range(BLOCK_D, WIDE), _range(BLOCK_E, WIDE)
    for start in tl.range(first, last, BLOCK_M):
        t = start + _range(BLOCK_M, WIDE)
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
    EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Grid (blocks of keys, B·H/G). ``key_gradient`` [B,K,S,D] and ``value_gradient`` [B,K,S,E]."""
    start = tl.program_id(0) * BLOCK_N
    heads = H // G
    b, kh = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    s = start + _range(BLOCK_N, WIDE)
    d, e = _range(BLOCK_D, WIDE), _range(BLOCK_E, WIDE)
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
    if (HAS_MASK or HAS_BIAS) and (HAS_UPPER or HAS_LOWER):
        # Rows that see no key give every key a weight, or are NaN for every key: also for those that the band skips.
        first, last = _with_fully_masked_rows(
            first, last, statistics + (b * H + kh * G) * T, G * T, T, 0.5 * fill if HAS_MASK else float("-inf")
        )
        first = first // BLOCK_M * BLOCK_M
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
            WIDE, PRECISION,
        )
        dk, dv = _key_gradient_blocks(
            dk, dv, q, g, k, v, bias_here, mask_here, statistics + row, delta + row, s, full_first, full_last, T, S, D,
            E, query_t, query_d, gradient_t, gradient_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower,
            BLOCK_M, BLOCK_D, BLOCK_E, False, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN,
            WIDE, PRECISION,
        )
        dk, dv = _key_gradient_blocks(
            dk, dv, q, g, k, v, bias_here, mask_here, statistics + row, delta + row, s, full_last, last, T, S, D, E,
            query_t, query_d, gradient_t, gradient_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower,
            BLOCK_M, BLOCK_D, BLOCK_E, True, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN,
            WIDE, PRECISION,
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
    EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Adds what the keys of [first, last) give to the gradient of one block of queries."""
    d, e = _range(BLOCK_D, WIDE), _range(BLOCK_E, WIDE)
    for start in tl.range(first, last, BLOCK_N):
        s = start + _range(BLOCK_N, WIDE)
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
        if EDGE:  # nor have keys past the end a gradient, also where a row that sees no key makes the slope NaN
            hidden = hidden | (s >= S)[None, :]
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
    HAS_LOWER: tl.constexpr, FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (blocks of queries, B·H). ``query_gradient`` [B,H,T,D]."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    kh = h // G
    t = start + _range(BLOCK_M, WIDE)
    d, e = _range(BLOCK_D, WIDE), _range(BLOCK_E, WIDE)
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
    if HAS_MASK and ADDED:  # keys that the band skips have weights, too
        masked = tl.max(((stats <= 0.5 * fill) & (t < T)).to(tl.int32), 0) > 0
        first, last = tl.where(masked, 0, first), tl.where(masked, S, last)
    if HAS_LOWER:
        dq = _query_gradient_blocks(
            dq, q, g, stats, dots, key, value, bias, mask, t, first, full_first, T, S, D, E, key_s, key_d, value_s,
            value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D, BLOCK_E, True,
            CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN, WIDE, PRECISION,
        )
    dq = _query_gradient_blocks(
        dq, q, g, stats, dots, key, value, bias, mask, t, full_first, full_last, T, S, D, E, key_s, key_d, value_s,
        value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D, BLOCK_E, False,
        CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN, WIDE, PRECISION,
    )
    dq = _query_gradient_blocks(
        dq, q, g, stats, dots, key, value, bias, mask, t, full_last, last, T, S, D, E, key_s, key_d, value_s,
        value_e, bias_t, bias_s, mask_t, mask_s, scale, fill, upper, lower, BLOCK_N, BLOCK_D, BLOCK_E, True,
        CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN, WIDE, PRECISION,
    )
    place = b * dq_b + h * dq_h + t[:, None] * dq_t + d[None, :] * dq_d
    tl.store(query_gradient + place, (dq * factor).to(query_gradient.dtype.element_ty), mask=in_query)


@triton.jit
def _bias_gradient_blocks(
    total, query, key, value, bias, mask, gradient, statistics, delta, kept, s, first_block, blocks, first, last,
    query_b, query_h, query_t, query_d, key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_e, bias_b, bias_h,
    bias_t, bias_s, mask_b, mask_h, mask_t, mask_s, gradient_b, gradient_h, gradient_t, gradient_e, H, G, T, S, D, E,
    scale, fill, upper, lower, K0, K1, R1, R2, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    EDGE: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_UPPER: tl.constexpr,
    HAS_LOWER: tl.constexpr, FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the gradient of the logits of keys ``s``: [first, last) count ``blocks`` blocks of queries from
    ``first_block`` on, of one after the other of the heads that share a bias."""
    d, e = _range(BLOCK_D, WIDE), _range(BLOCK_E, WIDE)
    for index in tl.range(first, last):
        t = (first_block + index % blocks) * BLOCK_M + _range(BLOCK_M, WIDE)
        shared = index // blocks
        row = shared // (R1 * R2) * K0 + kept // K1
        row = ((row * R1 + shared // R2 % R1) * K1 + kept % K1) * R2 + shared % R2
        b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
        kh = h // G
        q_pointers = query + b * query_b + h * query_h + t[:, None] * query_t + d[None, :] * query_d
        k_pointers = key + b * key_b + kh * key_h + s[:, None] * key_s + d[None, :] * key_d
        v_pointers = value + b * value_b + kh * value_h + s[:, None] * value_s + e[None, :] * value_e
        g_pointers = gradient + b * gradient_b + h * gradient_h + t[:, None] * gradient_t + e[None, :] * gradient_e
        of_row = row.to(tl.int64) * T + t
        if EDGE or not EVEN:
            q = tl.load(q_pointers, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
            k = tl.load(k_pointers, mask=(s < S)[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_pointers, mask=(s < S)[:, None] & (e < E)[None, :], other=0.0)
            g = tl.load(g_pointers, mask=(t < T)[:, None] & (e < E)[None, :], other=0.0)
            stats = tl.load(statistics + of_row, mask=t < T, other=float("inf")) * LOG2E
            dots = tl.load(delta + of_row, mask=t < T, other=0.0)
        else:
            q, k, v, g = tl.load(q_pointers), tl.load(k_pointers), tl.load(v_pointers), tl.load(g_pointers)
            stats, dots = tl.load(statistics + of_row) * LOG2E, tl.load(delta + of_row)
        logits, hidden, _ = _logits(
            q, k, bias + b * bias_b + h * bias_h, mask + b * mask_b + h * mask_h, t, s, T, S, bias_t, bias_s, mask_t,
            mask_s, scale, fill, upper, lower, EDGE, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, PRECISION,
        )
        weights = _weights(
            logits, hidden, stats, t, s, S, fill, upper, lower, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL,
            EDGE,
        )
        # A bias is added to what a soft cap gives: its slope is not in here.
        logits_gradient = weights * (tl.dot(g, tl.trans(v), input_precision=PRECISION) - dots[:, None])
        if (EDGE or HAS_MASK) and not ADDED:
            logits_gradient = tl.where(hidden, 0.0, logits_gradient)
        if EDGE:  # queries past the end, times a key that is infinite, are not zero in a sum over queries
            logits_gradient = tl.where((t < T)[:, None], logits_gradient, 0.0)
        total += logits_gradient
    return total


@triton.jit
def attention_bias_gradient(
    query, key, value, bias, mask, gradient, statistics, delta, bias_gradient, query_b, query_h, query_t, query_d,
    key_b, key_h, key_s, key_d, value_b, value_h, value_s, value_e, bias_b, bias_h, bias_t, bias_s, mask_b, mask_h,
    mask_t, mask_s, gradient_b, gradient_h, gradient_t, gradient_e, db_b, db_h, db_t, db_s, H, G, T, S, D, E, scale,
    fill, upper, lower, K0, K1, R0, R1, R2, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, CAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_UPPER: tl.constexpr,
    HAS_LOWER: tl.constexpr, FINITE_FILL: tl.constexpr, ADDED: tl.constexpr, SUMS_QUERIES: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):
    """Grid (blocks of keys times those of queries, K0·K1, parts). ``bias_gradient`` [parts, K0·K1, T or with
    SUMS_QUERIES 1, S]: the B·H batches and heads are [R0, K0, R1, K1, R2], and each program sums a part of those of R0,
    R1 and R2, one after the other."""
    key_blocks = tl.cdiv(S, BLOCK_N)
    first_block, key_block = tl.program_id(0) // key_blocks, tl.program_id(0) % key_blocks
    kept = tl.program_id(1)
    start, s_start = first_block * BLOCK_M, key_block * BLOCK_N
    s = s_start + _range(BLOCK_N, WIDE)
    blocks, full = 1, (start + BLOCK_M <= T) & (s_start + BLOCK_N <= S)
    if SUMS_QUERIES:
        blocks, full = tl.cdiv(T, BLOCK_M), False
    if HAS_UPPER:
        full = full & (s_start + BLOCK_N - 1 <= start + upper)
    if HAS_LOWER:
        full = full & (s_start >= start + BLOCK_M - 1 - lower)
    if not (HAS_MASK and ADDED):  # hidden keys have no gradient: blocks of queries that see none of these are left out
        last_block = first_block + blocks
        if HAS_UPPER:
            first_block = tl.maximum(first_block, tl.maximum(0, s_start - upper) // BLOCK_M)
        if HAS_LOWER:
            last_block = tl.minimum(last_block, tl.cdiv(tl.maximum(0, s_start + BLOCK_N + lower), BLOCK_M))
        blocks = tl.maximum(0, last_block - first_block)
    count = R0 * R1 * R2 * blocks
    part = tl.cdiv(count, tl.num_programs(2))
    first = tl.minimum(count, tl.program_id(2) * part)
    last = tl.minimum(count, first + part)
    edge = tl.where(full, last, first)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if not SUMS_QUERIES:
        total = _bias_gradient_blocks(
            total, query, key, value, bias, mask, gradient, statistics, delta, kept, s, first_block, blocks, first,
            edge, query_b, query_h, query_t, query_d, key_b, key_h, key_s, key_d, value_b,
            value_h, value_s, value_e, bias_b, bias_h, bias_t, bias_s, mask_b, mask_h, mask_t, mask_s, gradient_b,
            gradient_h, gradient_t, gradient_e, H, G, T, S, D, E, scale, fill, upper, lower, K0, K1, R1, R2, BLOCK_M,
            BLOCK_D, BLOCK_E, False, CAP, HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN, WIDE,
            PRECISION,
        )
    total = _bias_gradient_blocks(
        total, query, key, value, bias, mask, gradient, statistics, delta, kept, s, first_block, blocks, edge, last,
        query_b, query_h, query_t, query_d, key_b, key_h, key_s, key_d, value_b, value_h, value_s,
        value_e, bias_b, bias_h, bias_t, bias_s, mask_b, mask_h, mask_t, mask_s, gradient_b, gradient_h, gradient_t,
        gradient_e, H, G, T, S, D, E, scale, fill, upper, lower, K0, K1, R1, R2, BLOCK_M, BLOCK_D, BLOCK_E, True, CAP,
        HAS_BIAS, HAS_MASK, HAS_UPPER, HAS_LOWER, FINITE_FILL, ADDED, EVEN, WIDE, PRECISION,
    )
    place = bias_gradient + tl.program_id(2).to(tl.int64) * db_b + kept.to(tl.int64) * db_h + s.to(tl.int64) * db_s
    if SUMS_QUERIES:
        tl.store(place, tl.sum(total, 0).to(bias_gradient.dtype.element_ty), mask=s < S)
    else:
        t = start + _range(BLOCK_M, WIDE)
        tl.store(
            place[None, :] + t.to(tl.int64)[:, None] * db_t,
            total.to(bias_gradient.dtype.element_ty),
            mask=(t < T)[:, None] & (s < S)[None, :],
        )
