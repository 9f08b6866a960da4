"""Ranges of integers that the front end derives, against the values that computed arrays hold."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.frontends.torch.compile.lowering.index_ranges import range_of
from flagos_backend.importer import import_module
from support.against_xla import hlo_of_text, run_module

# An array of s32 from x, an s32[6,4] parameter of any numbers.
CASES = {
    "positions": "ROOT r = s32[6,4] iota(), iota_dimension=1",
    "moved": "i = s32[6,4] iota(), iota_dimension=0\n ROOT r = s32[4,6] transpose(i), dimensions={1,0}",
    "a constant": "ROOT r = s32[3] constant({4, -2, 7})",
    "clamped": "a = s32[] constant(-1)\n b = s32[] constant(3)\n ROOT r = s32[6,4] clamp(a, x, b)",
    "bounded below and above": "a = s32[6,4] iota(), iota_dimension=0\n b = s32[6,4] minimum(x, a)\n"
    " z = s32[] constant(0)\n y = s32[6,4] broadcast(z), dimensions={}\n ROOT r = s32[6,4] maximum(b, y)",
    "arithmetic": "a = s32[6,4] iota(), iota_dimension=0\n b = s32[6,4] iota(), iota_dimension=1\n"
    " c = s32[] constant(-3)\n"
    " d = s32[6,4] broadcast(c), dimensions={}\n e = s32[6,4] multiply(a, d)\n f = s32[6,4] subtract(e, b)\n"
    " ROOT r = s32[6,4] add(f, d)",
    "bits": "a = s32[6,4] iota(), iota_dimension=0\n ROOT r = s32[6,4] and(x, a)",
    "a remainder": "a = s32[] constant(5)\n b = s32[6,4] broadcast(a), dimensions={}\n"
    " ROOT r = s32[6,4] remainder(x, b)",
    "one of two": "a = s32[6,4] iota(), iota_dimension=0\n b = s32[6,4] iota(), iota_dimension=1\n"
    " p = pred[6,4] compare(x, a), direction=LT\n ROOT r = s32[6,4] select(p, a, b)",
    "truth": "a = s32[6,4] iota(), iota_dimension=0\n p = pred[6,4] compare(x, a), direction=LT\n"
    " ROOT r = s32[6,4] convert(p)",
}


@pytest.mark.parametrize("name", CASES)
def test_all_values_lie_in_the_range(name: str, rng: np.random.Generator) -> None:
    module = import_module(hlo_of_text(f"ENTRY e {{ x = s32[6,4] parameter(0)\n {CASES[name]} }}"))
    found = range_of(module.entry.root, {})
    assert found is not None
    for scale in (1, 10, 1 << 31):
        x = rng.integers(-scale, scale, (6, 4)).astype(np.int32)
        (values,) = run_module(module, [x])
        assert found[0] <= values.min() and values.max() <= found[1]


@pytest.mark.parametrize(
    "text",
    [
        "ROOT r = s32[6,4] negate(x)",
        "ROOT r = s32[6,4] copy(x)",
        "a = s32[] constant(2147483647)\n b = s32[6,4] broadcast(a), dimensions={}\n ROOT r = s32[6,4] add(b, b)",
        "a = f32[6,4] convert(x)\n ROOT r = s32[6,4] convert(a)",
    ],
)
def test_what_the_data_say_or_what_wraps_has_no_range(text: str) -> None:
    module = import_module(hlo_of_text(f"ENTRY e {{ x = s32[6,4] parameter(0)\n {text} }}"))
    assert range_of(module.entry.root, {}) is None
