"""Which library calls are kept to one thread: small ones of libraries that use several, but no operators of ATen."""

from __future__ import annotations

import pytest

from flagos_backend.importer import import_module
from flagos_backend.ir.library_calls import may_use_threads, runs_alone
from support.against_xla import hlo_of_text

CALLS = {
    "a small transform": ("x = c64[32,32] parameter(0)", "c64[32,32] fft(x), fft_type=FFT, fft_length={32,32}", True),
    "a large transform": (
        "x = c64[2048,2048] parameter(0)",
        "c64[2048,2048] fft(x), fft_type=FFT, fft_length={2048}",
        False,
    ),
    "a small factorization": ("x = f32[16,16] parameter(0)", "f32[16,16] cholesky(x), lower=true", True),
    "an operator of ATen": (
        "x = f32[16] parameter(0)",
        'f32[16] custom-call(x), custom_call_target="aten::native_layer_norm.default"',
        False,
    ),
    "a function of the host": (
        "x = f32[16] parameter(0)",
        'f32[16] custom-call(x), custom_call_target="flagos.host_callback", backend_config="{}"',
        False,
    ),
    "an addition": ("x = f32[16] parameter(0)", "f32[16] add(x, x)", False),
}


@pytest.mark.parametrize("name", CALLS)
def test_small_calls_run_alone(name: str) -> None:
    parameter, instruction, expected = CALLS[name]
    root = import_module(hlo_of_text(f"ENTRY e {{\n  {parameter}\n  ROOT y = {instruction}\n}}")).entry.root
    assert runs_alone(root) is expected
    assert may_use_threads(root) or not expected
