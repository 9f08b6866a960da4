# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Scalar functions in plain Triton, which generated kernels import: what the language lacks, with HLO's semantics.

Blocks of any shape; ``x`` is float32 or float64 unless said otherwise. Below scalars.py, which picks between these and
a vendor's device library.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_f16(x):
    """Rounded to float16, held as float32."""
    return x.to(tl.float16).to(tl.float32)


@triton.jit
def as_bf16(x):
    """Rounded to bfloat16, held as float32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def as_bf16_by_bits(x):
    """As as_bf16, where a conversion may cut off instead of rounding to nearest even."""
    b = x.to(tl.uint32, bitcast=True)
    nearest = b + 0x7FFF + ((b >> 16) & 1)
    rounded = tl.where(x != x, b | 0x400000, nearest) & 0xFFFF0000
    return rounded.to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits_as_f32(b):
    """Of uint16."""
    return (b.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def f32_as_bf16_bits(x):
    """Rounded to bfloat16, as uint16."""
    return (as_bf16_by_bits(x).to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)


@triton.jit
def bits(x):
    """The bits of a float as a signed integer."""
    return x.to(tl.int64, bitcast=True) if x.dtype == tl.float64 else x.to(tl.int32, bitcast=True)


@triton.jit
def signbit(x):
    return bits(x) < 0


@triton.jit
def negate(x):
    return x * -1.0


@triton.jit
def copysign(x, sign):
    magnitude = tl.abs(x)
    return tl.where(signbit(sign), negate(magnitude), magnitude)


@triton.jit
def divide(a, b):
    """Correctly rounded."""
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def divisor_scale(b):
    """A power of two with the sign of ``b``, so that their product is positive and its reciprocal finite."""
    return copysign(tl.where(tl.abs(b) < 7.888609052210118e-31, 1.8446744073709552e19, 1.0), b)


@triton.jit
def divide_corrected(a, b, inverse):
    """a / b of float32, for ``b`` >= 0 and its reciprocal. Correctly rounded where abs(a) >= 2**-100, unless the
    reciprocal or the quotient is subnormal, and else within a unit in the last place."""
    q = a * inverse
    rest = tl.fma(q, b, negate(a))
    better = tl.fma(negate(rest), inverse, q)
    # There is no rest where the quotient is infinite or NaN.
    return tl.where(better != better, q, better)


@triton.jit
def divide_by_sum(a, b, inverse):
    """As divide_corrected, for ``a`` from 0 to 1 and finite ``b`` from 1 on, or NaN: there always is a rest."""
    q = a * inverse
    return tl.fma(negate(tl.fma(q, b, negate(a))), inverse, q)


@triton.jit
def sqrt(x):
    """Correctly rounded."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def rsqrt(x):
    root = sqrt(x)
    return divide(tl.full(root.shape, 1.0, root.dtype), root)


@triton.jit
def reciprocal(x):
    return divide(tl.full(x.shape, 1.0, x.dtype), x)


@triton.jit
def maximum(a, b):
    """NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum_by_comparison(a, b):
    """As maximum, for hardware whose own instruction drops NaN."""
    return tl.where((a != a) | (a > b), a, b)


@triton.jit
def minimum_by_comparison(a, b):
    """As minimum, for hardware whose own instruction drops NaN."""
    return tl.where((a != a) | (a < b), a, b)


@triton.jit
def is_at(position, other):
    """Whether two integers are equal. Of positions that follow one another, eight share all of it but one operation."""
    return ((position >> 3) == (other >> 3)) & ((position & 7) == (other & 7))


@triton.jit
def total_order(x):
    """An integer that orders floats as HLO's total order does."""
    b = bits(x)
    return b ^ ((b >> 63) & 0x7FFFFFFFFFFFFFFF) if x.dtype == tl.float64 else b ^ ((b >> 31) & 0x7FFFFFFF)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def sign(x):
    one = tl.full(x.shape, 1.0, x.dtype)
    return tl.where((x != x) | (x == 0), x, tl.where(x > 0, one, negate(one)))


@triton.jit
def truncate(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    low = tl.floor(x)
    rest = x - low
    odd = low - 2.0 * tl.floor(low * 0.5) != 0
    rounded = tl.where((rest > 0.5) | ((rest == 0.5) & odd), low + 1.0, low)
    return copysign(tl.where(is_finite(x), rounded, x), x)


@triton.jit
def round_away(x):
    whole = truncate(x)
    rounded = tl.where(tl.abs(x - whole) >= 0.5, whole + sign(x), whole)
    return copysign(tl.where(is_finite(x), rounded, x), x)


@triton.jit
def logistic(x):
    return reciprocal(1.0 + tl.exp(negate(x)))


@triton.jit
def expm1(x):
    """Taylor's series on |x| < 0.35; beyond, W. Kahan's: the error of exp(x) is divided out by the logarithm of what it
    became."""
    series = tl.full(x.shape, 1.0, x.dtype)
    for n in tl.static_range(13, 1, -1):
        series = 1.0 + x * (1.0 / n) * series
    u = tl.exp(x)
    result = (u - 1.0) * divide(x, tl.log(u))
    result = tl.where(tl.abs(x) < 0.35, x * series, tl.where(u - 1.0 == -1.0, u - 1.0, result))
    return tl.where(u == float("inf"), u, result)


@triton.jit
def log1p(x):
    """W. Kahan's, as expm1."""
    u = 1.0 + x
    result = tl.log(u) * divide(x, u - 1.0)
    return tl.where((u == 1.0) | (u == float("inf")), x, result)


@triton.jit
def tanh(x):
    e = expm1(2.0 * tl.minimum(tl.abs(x), 22.0))
    return copysign(tl.where(x != x, x, divide(e, e + 2.0)), x)


@triton.jit
def half_exp(a):
    """exp(a) / 2 for a >= 0, which has a value where exp(a) has none any more."""
    e, root = tl.exp(a), tl.exp(a * 0.5)
    return tl.where(is_finite(e), 0.5 * e, (0.5 * root) * root)


@triton.jit
def sinh(x):
    a = tl.abs(x)
    e = expm1(a)
    return copysign(tl.where(a < 22.0, 0.5 * (e + divide(e, e + 1.0)), half_exp(a)), x)


@triton.jit
def cosh(x):
    a = tl.abs(x)
    e = tl.exp(a)
    return tl.where(a < 22.0, 0.5 * (e + reciprocal(e)), half_exp(a))


@triton.jit
def tan(x):
    return divide(tl.sin(x), tl.cos(x))


@triton.jit
def atan_positive(x):
    """For x >= 0: an eighth or a quarter of a turn is taken off, then Taylor's series on |y| < 0.42."""
    steep, middle = x > 2.414213562373095, x > 0.41421356237309503
    y = tl.where(steep, -reciprocal(x), tl.where(middle, divide(x - 1.0, x + 1.0), x))
    z = y * y
    series = tl.full(y.shape, 1.0 / 43.0, y.dtype)
    for n in tl.static_range(20, -1, -1):
        series = 1.0 / (2 * n + 1) - z * series
    angle = y * series
    return tl.where(steep, 1.5707963267948966 + angle, tl.where(middle, 0.7853981633974483 + angle, angle))


@triton.jit
def atan2(y, x):
    b, a = tl.abs(y), tl.abs(x)
    low, high = tl.minimum(a, b), tl.maximum(a, b)
    slope = tl.where(low == high, tl.full(low.shape, 1.0, low.dtype), divide(low, high))
    angle = atan_positive(tl.where(high == 0, low, slope))
    angle = tl.where(b > a, 1.5707963267948966 - angle, angle)
    angle = tl.where(signbit(x), 3.141592653589793 - angle, angle)
    return tl.where((x != x) | (y != y), x + y, copysign(angle, y))


@triton.jit
def asin(x):
    return copysign(atan_positive(divide(tl.abs(x), sqrt((1.0 - x) * (1.0 + x)))), x)


@triton.jit
def acos(x):
    return 2.0 * atan_positive(sqrt(divide(1.0 - x, 1.0 + x)))


@triton.jit
def asinh(x):
    a = tl.abs(x)
    near = tl.minimum(a, 1.0e8)
    square = near * near
    small = log1p(near + divide(square, 1.0 + sqrt(square + 1.0)))
    return copysign(tl.where(a < 1.0e8, small, tl.log(a) + 0.6931471805599453), x)


@triton.jit
def acosh(x):
    t = tl.minimum(x, 1.0e8) - 1.0
    small = log1p(t + sqrt(2.0 * t + t * t))
    result = tl.where(x < 1.0e8, small, tl.log(x) + 0.6931471805599453)
    return tl.where(x < 1.0, float("nan"), result)


@triton.jit
def atanh(x):
    a = tl.abs(x)
    return copysign(0.5 * log1p(divide(2.0 * a, 1.0 - a)), x)


@triton.jit
def cbrt(x):
    """From exponential and logarithm, then two steps of Newton's method."""
    a = tl.abs(x)
    regular = (a > 0) & (a < float("inf"))
    a = tl.where(regular, a, 1.0)
    root = tl.exp(tl.log(a) * (1.0 / 3.0))
    root = root - divide(root - divide(a, root * root), tl.full(a.shape, 3.0, a.dtype))
    root = root - divide(root - divide(a, root * root), tl.full(a.shape, 3.0, a.dtype))
    return tl.where(regular, copysign(root, x), x)


@triton.jit
def erfc(x):
    """After W. J. Cody, "Rational Chebyshev approximations for the error function" (1969), through float64."""
    wide = x.to(tl.float64)
    t = tl.abs(wide)
    # erf(t) / t where t is small
    z = tl.minimum(t, 0.5) * tl.minimum(t, 0.5)
    above = ((z * 0.18577770618460315 + 3.1611237438705655) * z + 113.86415415105016) * z + 377.485237685302
    above = above * z + 3209.3775891384694
    below = (((z + 23.601290952344122) * z + 244.02463793444417) * z + 1282.6165260773723) * z + 2844.236833439171
    near = 1.0 - wide * (above / below)
    # erfc(t) exp(t^2) up to 4, and from there on
    s = tl.minimum(tl.maximum(t, 0.46875), 4.0)
    above = ((s * 2.1531153547440383e-08 + 0.5641884969886701) * s + 8.883149794388377) * s + 66.11919063714163
    above = ((above * s + 298.6351381974001) * s + 881.952221241769) * s + 1712.0476126340707
    above = (above * s + 2051.0783778260716) * s + 1230.3393547979972
    below = (((s + 15.744926110709835) * s + 117.6939508913125) * s + 537.1811018620099) * s + 1621.3895745666903
    below = ((below * s + 3290.7992357334597) * s + 4362.619090143247) * s + 3439.3676741437216
    below = below * s + 1230.3393548037495
    scaled = above / below
    s = tl.minimum(tl.maximum(t, 4.0), 30.0)  # erfc(30) is no double above zero
    z = 1.0 / (s * s)
    above = ((z * 0.016315387137302097 + 0.30532663496123236) * z + 0.36034489994980445) * z + 0.12578172611122926
    above = (above * z + 0.016083785148742275) * z + 0.0006587491615298378
    below = (((z + 2.568520192289822) * z + 1.8729528499234673) * z + 0.5279051029514285) * z + 0.06051834131244132
    below = below * z + 0.0023352049762686918
    scaled = tl.where(t > 4.0, (0.5641895835477563 - z * (above / below)) / s, scaled)
    # exp(-t^2): the square of a number of few bits is exact
    s = tl.minimum(t, 30.0)
    short = tl.floor(s * 1024.0) * 0.0009765625
    far = scaled * (tl.exp(negate(short * short)) * tl.exp(negate((s - short) * (s + short))))
    result = tl.where(t < 0.46875, near, tl.where(wide < 0.0, 2.0 - far, far))
    return tl.where(x != x, x, result.to(x.dtype))


@triton.jit
def power(x, y):
    """IEEE 754's pow, through float64."""
    a = tl.abs(x)
    result = tl.exp(y.to(tl.float64) * tl.log(a.to(tl.float64))).to(x.dtype)
    odd = (tl.floor(y) == y) & is_finite(y) & (y - 2.0 * tl.floor(y * 0.5) != 0)
    result = tl.where(signbit(x) & odd, negate(result), result)
    result = tl.where((x < 0) & (a < float("inf")) & (tl.floor(y) != y), float("nan"), result)
    return tl.where((y == 0) | (x == 1.0) | ((a == 1.0) & (tl.abs(y) == float("inf"))), 1.0, result)


@triton.jit
def power_of_two(exponent, dtype: tl.constexpr):
    """2 ** exponent as ``dtype``, for exponents of normal numbers."""
    if dtype == tl.float64:
        result = ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    else:
        result = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return result


@triton.jit
def exponent_field(x):
    mantissa: tl.constexpr = 52 if x.dtype == tl.float64 else 23
    return (bits(tl.abs(x)) >> mantissa).to(tl.int32)


@triton.jit
def remainder(x, y):
    """fmod, exact: long division, a step for each bit of the greatest quotient in the block."""
    rest, divisor = tl.abs(x), tl.abs(y)
    defined = is_finite(x) & (y == y) & (y != 0)
    # A subnormal divisor may be as small as its last bit.
    low = exponent_field(y)
    low = tl.where(low == 0, -52 if x.dtype == tl.float64 else -23, low)
    steps = tl.max(tl.where(defined, exponent_field(x) - low + 2, 0))
    for step in range(steps):
        exponent = steps - 1 - step
        third = exponent // 3
        factor = power_of_two(third, x.dtype)
        multiple = divisor * factor * factor * power_of_two(exponent - 2 * third, x.dtype)
        rest = tl.where(rest >= multiple, rest - multiple, rest)
    return tl.where(defined, copysign(rest, x), float("nan"))


@triton.jit
def clamp(low, x, high):
    return minimum(maximum(x, low), high)


@triton.jit
def clamp_by_comparison(low, x, high):
    return minimum_by_comparison(maximum_by_comparison(x, low), high)


@triton.jit
def to_integer(x, dtype: tl.constexpr, low: tl.constexpr, high: tl.constexpr, past: tl.constexpr):
    """A float truncated to ``dtype``, which holds ``low`` to ``high``; ``past`` is high + 1. Saturates, NaN is 0."""
    inside = (x > low * 1.0) & (x < past * 1.0)
    whole = tl.where(inside, x, 0.0).to(dtype)
    rest = tl.where(x >= past * 1.0, tl.full(x.shape, high, dtype), tl.full(x.shape, low, dtype))
    return tl.where(inside | (x != x), whole, rest)


# ---- Integers


@triton.jit
def divide_integer(a, b, ones: tl.constexpr, least: tl.constexpr):
    """Truncates. By zero: all bits set; the least number by -1 (``least``, signed only, is it): itself."""
    one = tl.full(b.shape, 1, b.dtype)
    safe = tl.where(b == 0, one, b)
    if least == 0:
        quotient = a // safe
    else:
        overflow = (a == tl.full(a.shape, least, a.dtype)) & (b == tl.full(b.shape, -1, b.dtype))
        quotient = a // tl.where(overflow, one, safe)
    return tl.where(b == 0, tl.full(b.shape, ones, b.dtype), quotient)


@triton.jit
def remainder_integer(a, b, least: tl.constexpr):
    """Of the sign of ``a``. By zero: ``a``; by -1: 0."""
    one = tl.full(b.shape, 1, b.dtype)
    safe = tl.where(b == 0, one, b)
    if least != 0:
        safe = tl.where(b == tl.full(b.shape, -1, b.dtype), one, safe)
    return tl.where(b == 0, a, a % safe)


@triton.jit
def shift_left(value, amount, width: tl.constexpr):
    """``amount`` is of the unsigned type of the same width. Zero past the width."""
    inside = amount < width
    safe = tl.where(inside, amount, tl.full(amount.shape, 0, amount.dtype)).to(value.dtype, bitcast=True)
    return tl.where(inside, value << safe, tl.full(value.shape, 0, value.dtype))


@triton.jit
def shift_right(value, amount, width: tl.constexpr, signed: tl.constexpr):
    """``amount`` as for shift_left. Of a signed ``value`` arithmetic: past the width all bits are its sign."""
    inside = amount < width
    zero = tl.full(value.shape, 0, value.dtype)
    shifted = value >> tl.where(inside, amount, tl.full(amount.shape, 0, amount.dtype)).to(value.dtype, bitcast=True)
    past = zero
    if signed:
        past = tl.where(value < 0, tl.full(value.shape, -1, value.dtype), zero)
    return tl.where(inside, shifted, past)


@triton.jit
def count_ones_32(x):
    """Of uint32: sums in fields of 2, 4, 8, ... bits."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@triton.jit
def count_ones_64(x):
    """Of uint64, as count_ones_32."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56


@triton.jit
def smear_32(x):
    """Sets every bit below the highest one, of uint32."""
    x = x | (x >> 1)
    x = x | (x >> 2)
    x = x | (x >> 4)
    x = x | (x >> 8)
    return x | (x >> 16)


@triton.jit
def smear_64(x):
    """As smear_32, of uint64."""
    x = smear_32(x)
    return x | (x >> 32)


@triton.jit
def power_integer(x, y, places: tl.constexpr, signed: tl.constexpr):
    """Wraps around. A negative exponent gives the truncated reciprocal power."""
    one, zero = tl.full(x.shape, 1, x.dtype), tl.full(x.shape, 0, x.dtype)
    result, square, rest = one, x, y
    for _ in range(places):
        result = tl.where((rest & 1) != 0, result * square, result)
        square = square * square
        rest = rest >> 1
    if signed:
        least = tl.full(x.shape, -1, x.dtype)
        parity = tl.where((y & 1) != 0, least, one)
        reciprocal_power = tl.where(x == 1, one, tl.where(x == least, parity, zero))
        result = tl.where(y < 0, reciprocal_power, result)
    return result


# ---- What reductions combine with; see tl.reduce


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def bitwise_and(a, b):
    return a & b


@triton.jit
def bitwise_or(a, b):
    return a | b


@triton.jit
def bitwise_xor(a, b):
    return a ^ b


@triton.jit
def shift(x):
    """What is subtracted before an exponential where ``x`` is the maximum: -inf - -inf would be NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def largest(x, axis: tl.constexpr):
    """tl.max along ``axis``, which stays with size 1; NaN if any is, whatever the hardware's own reduction does."""
    found = tl.max(x, axis, keep_dims=True)
    nan = tl.max((x != x).to(tl.int32), axis, keep_dims=True) != 0
    return tl.where(nan, float("nan"), found)


@triton.jit
def smallest(x, axis: tl.constexpr):
    """As largest."""
    found = tl.min(x, axis, keep_dims=True)
    nan = tl.max((x != x).to(tl.int32), axis, keep_dims=True) != 0
    return tl.where(nan, float("nan"), found)


# ---- Logarithms to base 2 of float64: that of CUDA's device library is none at powers of two


@triton.jit
def _centered_bits(x):
    """The bits of |x| scaled to [sqrt(1/2), sqrt(2)), plus its exponent; x is finite, and no zero."""
    subnormal = tl.abs(x) < 2.2250738585072014e-308
    b = bits(tl.where(subnormal, x * 18014398509481984.0, x)) & 0x7FFFFFFFFFFFFFFF
    over = b - 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2)
    exponent = over >> 52
    return b - (exponent << 52), exponent - tl.where(subnormal, 54, 0)


@triton.jit
def centered(x):
    """What log2_of_centered needs the natural logarithm of: x without its power of two."""
    return _centered_bits(x)[0].to(tl.float64, bitcast=True)


@triton.jit
def log2_of_centered(x, natural):
    """``natural``: the logarithm of centered(x). The exponent is exact, and the rest a product in twice the digits."""
    exponent = _centered_bits(x)[1].to(tl.float64)
    factor = tl.full(natural.shape, 1.4426950408889634, tl.float64)  # tl.fma takes a plain number as float32
    product = natural * factor
    rest = tl.fma(natural, factor, negate(product)) + natural * 2.0355273740931033e-17
    total = exponent + product
    result = total + ((exponent - total) + product + rest)
    result = tl.where(x == 0, float("-inf"), tl.where(x < 0, float("nan"), result))
    return tl.where(is_finite(x), result, tl.where(x == float("-inf"), float("nan"), x))


@triton.jit
def truth(x, kind: tl.constexpr):
    """1 or 0 of a float type, in one instruction, where a conversion takes two."""
    return tl.where(x, tl.full(x.shape, 1.0, kind), tl.full(x.shape, 0.0, kind))
