"""What the host's processor can compute, for decisions that leave results as they are."""

from __future__ import annotations

import functools
from pathlib import Path

from flagos_backend.ir.types import ElementType

_CPU_INFO = Path("/proc/cpuinfo")
# Linux's names of the instructions that multiply and add up each type. AVX-512 alone has none: libraries then widen, or
# loop over elements.
_PRODUCTS = {
    ElementType.BF16: frozenset({"avx512_bf16", "amx_bf16"}),
    ElementType.F16: frozenset({"avx512_fp16", "amx_fp16"}),
}


def has_products_of(element_type: ElementType) -> bool:
    """Whether the processor has instructions for products of the 16-bit ``element_type``; False where Linux does not
    tell."""
    return not _PRODUCTS[element_type].isdisjoint(_flags())


@functools.cache
def _flags() -> frozenset[str]:
    try:
        with _CPU_INFO.open(encoding="ascii", errors="replace") as lines:
            return next((flags_of(line) for line in lines if line.startswith("flags")), frozenset())
    except OSError:
        return frozenset()


def flags_of(line: str) -> frozenset[str]:
    """Of a line ``flags : a b c``."""
    return frozenset(line.partition(":")[2].split())
