"""Which 16-bit products the processor has, by Linux's list of its instructions."""

from __future__ import annotations

import pytest

from flagos_backend.devices import processor
from flagos_backend.ir.types import ElementType


@pytest.mark.parametrize(
    ("flags", "bf16", "f16"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512f avx512bw", False, False),
        ("flags\t\t: fpu avx512f avx512_bf16", True, False),
        ("flags\t\t: fpu amx_bf16 avx512_fp16", True, True),
    ],
)
def test_products(flags: str, bf16: bool, f16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_flags", lambda: processor.flags_of(flags))
    assert processor.has_products_of(ElementType.BF16) is bf16
    assert processor.has_products_of(ElementType.F16) is f16
