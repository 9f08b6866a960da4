# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Scalar functions in NVIDIA's assembly, which generated kernels for its chips import where they need them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_alone(x, y):
    """Of 16-bit integers, wrapping around, and never two in one instruction (packed_sums.py)."""
    return tl.inline_asm_elementwise("add.s16 $0, $1, $2;", "=h,h,h", [x, y], dtype=x.dtype, is_pure=True, pack=1)


@triton.jit
def subtract_alone(x, y):
    """As add_alone."""
    return tl.inline_asm_elementwise("sub.s16 $0, $1, $2;", "=h,h,h", [x, y], dtype=x.dtype, is_pure=True, pack=1)
