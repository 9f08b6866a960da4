# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What compile_server.py compiles first."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(source, target):
    number = tl.arange(0, 128)
    tl.store(target + number, tl.load(source + number))
