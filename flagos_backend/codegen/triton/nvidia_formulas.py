# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What generated kernels for NVIDIA's chips import where they need it: scalar functions in its assembly, and how
kernels start early."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: First of all in a kernel that starts early (programmatic dependent launch): waits until the kernels ahead have ended,
#: and what they stored can be read. Triton's own names: a function of ours would be parsed again for each kernel.
wait_for_previous = gdc_wait
#: Lets the next kernel start early as soon as all programs are here, not only when they have ended.
start_next = gdc_launch_dependents


@triton.jit
def add_alone(x, y):
    """Of 16-bit integers, wrapping around, and never two in one instruction (packed_sums.py)."""
    return tl.inline_asm_elementwise("add.s16 $0, $1, $2;", "=h,h,h", [x, y], dtype=x.dtype, is_pure=True, pack=1)


@triton.jit
def subtract_alone(x, y):
    """As add_alone."""
    return tl.inline_asm_elementwise("sub.s16 $0, $1, $2;", "=h,h,h", [x, y], dtype=x.dtype, is_pure=True, pack=1)


@triton.jit
def divide_straight(a, b):
    """a / b of float32, correctly rounded, without a branch. In float64: no quotient of float32 is nearer to the middle
    between two of them than 2**-49 of itself."""
    a, b = a.to(tl.float64), b.to(tl.float64)
    near = tl.inline_asm_elementwise("rcp.approx.ftz.f64 $0, $1;", "=d,d", [b], dtype=tl.float64, is_pure=True, pack=1)
    inverse = tl.fma(tl.fma(-b, near, tl.full(b.shape, 1.0, tl.float64)), near, near)
    q = a * inverse
    rest = tl.fma(-b, q, a)
    better = tl.where(rest == 0, q, tl.fma(rest, inverse, q))
    # Of 0, infinity and NaN there is no rest.
    return tl.where(better != better, a * near, better).to(tl.float32)


@triton.jit
def exp_below(x):
    """exp(x) of float32 that is 0, below, or NaN; 0 where it would be subnormal. Off by up to four units in the last
    place, two above -20. The power of two is of a rounded argument, and corrected by what that lacks; where x is
    infinite, no argument is."""
    # In one piece: taken apart, assemblers hold more of it at a time.
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 x, argument, lack, power;
        max.NaN.f32 x, $1, 0fC2D00000;
        mul.rn.f32 argument, x, 0f3FB8AA3B;
        fma.rn.f32 lack, argument, 0fBF317218, x;
        ex2.approx.ftz.f32 power, argument;
        fma.rn.f32 $0, power, lack, power;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def exp_term(x):
    """As exp_below, but off by up to 1.23 * |x| * 2**-24 of itself more: in a sum to which the largest term adds 1 each
    is by less than a rounding, and n alike are by log(n) of them."""
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 argument;
        mul.rn.f32 argument, $1, 0f3FB8AA3B;
        ex2.approx.ftz.f32 $0, argument;
        }""",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def log2_of_rest(x):
    """log2(1 - x * x) of float32, within 2**-22 where x * x is up to 0.5, and within 2**-22 of itself elsewhere (PTX),
    but for what the rest is rounded by."""
    rest = tl.fma(-x, x, tl.full(x.shape, 1.0, tl.float32))
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [rest], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sqrt_near(x):
    """The square root of float32, within 2**-23 of itself (PTX). Subnormal numbers count as 0."""
    return tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
