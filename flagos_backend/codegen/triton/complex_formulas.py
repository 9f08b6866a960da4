# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Arithmetic of complex numbers of two float32 in plain Triton, which has no type for them: each is an int64, the real
part in its lower half, as it lies in memory. Compilers keep the halves in registers of their own.

Blocks of any shape: ``z`` is complex, ``x`` and ``y`` are float32. Used by scalars.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flagos_backend.codegen.triton.formulas import copysign, divide, negate, sqrt


@triton.jit
def real(z):
    return z.to(tl.uint64, bitcast=True).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def imaginary(z):
    return (z.to(tl.uint64, bitcast=True) >> 32).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def complex_of(x, y):
    low = x.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = y.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (low | (high << 32)).to(tl.int64, bitcast=True)


@triton.jit
def from_real(x):
    return complex_of(x, tl.full(x.shape, 0.0, tl.float32))


@triton.jit
def add(a, b):
    return complex_of(real(a) + real(b), imaginary(a) + imaginary(b))


@triton.jit
def subtract(a, b):
    return complex_of(real(a) - real(b), imaginary(a) - imaginary(b))


@triton.jit
def negative(z):
    return complex_of(negate(real(z)), negate(imaginary(z)))


@triton.jit
def equal(a, b):
    return (real(a) == real(b)) & (imaginary(a) == imaginary(b))


@triton.jit
def different(a, b):
    return (real(a) != real(b)) | (imaginary(a) != imaginary(b))


@triton.jit
def sum_of_products(a, b, c, d):
    """a b + c d of float32 within 1.5 units in the last place, also where they cancel (Kahan; Jeannerod, Louvet and
    Muller, 2013)."""
    product = c * d
    error = tl.fma(c, d, negate(product))
    # A product that is infinite or NaN has none.
    return tl.fma(a, b, product) + tl.where(tl.abs(error) < float("inf"), error, 0.0)


@triton.jit
def multiply(a, b):
    ar, ai, br, bi = real(a), imaginary(a), real(b), imaginary(b)
    return complex_of(sum_of_products(ar, br, negate(ai), bi), sum_of_products(ar, bi, ai, br))


@triton.jit
def exponent(x, y):
    """That of the larger one, as float32 has it in its bits, from 1 to 253; 253 for an infinity or NaN."""
    a, b = tl.abs(x).to(tl.int32, bitcast=True), tl.abs(y).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(tl.maximum(a, b) >> 23, 1), 253)


@triton.jit
def power_of_two(e):
    """2**e for integers from -126 to 127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def absolute(z):
    """Beside an infinity a NaN does not count."""
    x, y = real(z), imaginary(z)
    e = exponent(x, y)
    down = power_of_two(127 - e)
    root = sqrt(sum_of_products(x * down, x * down, y * down, y * down)) * power_of_two(e - 127)
    is_infinite = (tl.abs(x) == float("inf")) | (tl.abs(y) == float("inf"))
    return tl.where(is_infinite, float("inf"), root)


@triton.jit
def infinite_as_one(x):
    """1 or 0 with its sign: whether ``x`` is infinite."""
    return copysign(tl.where(tl.abs(x) == float("inf"), 1.0, 0.0), x)


@triton.jit
def quotient(a, b):
    """Within a few units in the last place. Infinities, zeros and NaN as in C99's Annex G."""
    ar, ai, br, bi = real(a), imaginary(a), real(b), imaginary(b)
    above, below = exponent(ar, ai), exponent(br, bi)
    # Both about 1: nothing overflows, nor vanishes.
    up, down = power_of_two(127 - above), power_of_two(127 - below)
    nr, ni, dr, di = ar * up, ai * up, br * down, bi * down
    size = sum_of_products(dr, dr, di, di)
    x = divide(sum_of_products(nr, dr, ni, di), size)
    y = divide(sum_of_products(ni, dr, negate(nr), di), size)
    # Twice a half of what is between the exponents, which may be no exponent itself.
    half = (above - below) >> 1
    x = x * power_of_two(half) * power_of_two(above - below - half)
    y = y * power_of_two(half) * power_of_two(above - below - half)

    infinity = tl.full(x.shape, float("inf"), tl.float32)
    a_is_finite = (tl.abs(ar) < infinity) & (tl.abs(ai) < infinity)
    b_is_finite = (tl.abs(br) < infinity) & (tl.abs(bi) < infinity)
    a_is_infinite = (tl.abs(ar) == infinity) | (tl.abs(ai) == infinity)
    b_is_infinite = (tl.abs(br) == infinity) | (tl.abs(bi) == infinity)
    by_zero = (br == 0) & (bi == 0) & ((ar == ar) | (ai == ai))
    is_infinite = a_is_infinite & b_is_finite
    vanishes = b_is_infinite & a_is_finite
    # Of an infinite operand only which parts are; signs alone decide.
    sr, si = tl.where(is_infinite, infinite_as_one(ar), ar), tl.where(is_infinite, infinite_as_one(ai), ai)
    tr, ti = tl.where(vanishes, infinite_as_one(br), br), tl.where(vanishes, infinite_as_one(bi), bi)
    scale = tl.where(is_infinite, infinity, 0.0)
    other_x, other_y = scale * (sr * tr + si * ti), scale * (si * tr - sr * ti)
    signed = copysign(infinity, br)
    other_x, other_y = tl.where(by_zero, signed * ar, other_x), tl.where(by_zero, signed * ai, other_y)
    is_other = (x != x) & (y != y) & (by_zero | is_infinite | vanishes)
    return complex_of(tl.where(is_other, other_x, x), tl.where(is_other, other_y, y))
