"""What is folded, to what bytes; what numpy cannot do as XLA does stays."""

import numpy as np
import pytest
from jaxlib import _hlo

from flagos_backend.importer import export_module, import_module
from flagos_backend.ir.constants import constant_array
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.verifier import verify
from flagos_backend.passes.fold_constants import fold_constants
from programs import run_on_xla


def folded(body):
    module = import_module(
        _hlo.hlo_module_from_text(f"HloModule m\nENTRY e {{\n{body}\n}}").as_serialized_hlo_module_proto()
    )
    result = fold_constants(module)
    verify(result)
    return module, result


A = " a = s32[3] constant({7, -8, 2147483647})\n b = s32[3] constant({2, 3, 1})\n"
F = " a = f32[4] constant({1.5, -0.0, inf, 1e30})\n b = f32[4] constant({0.1, 2, 3, 1e30})\n"
U = " a = u8[3] constant({200, 1, 255})\n b = u8[3] constant({100, 2, 255})\n"


@pytest.mark.parametrize(
    "body",
    [
        A + " ROOT r = s32[3] add(a, b)",
        A + " ROOT r = s32[3] multiply(a, b)",
        A + " ROOT r = s32[3] maximum(a, b)",
        A + " ROOT r = pred[3] compare(a, b), direction=GT",
        A + " ROOT r = s8[3] convert(a)",
        A + " ROOT r = u64[3] convert(a)",
        A + " ROOT r = f32[3] convert(a)",
        " a = s32[3] constant({7, 0, -2})\n ROOT r = pred[3] convert(a)",
        A + " ROOT r = s32[3] reverse(a), dimensions={0}",
        A + " ROOT r = s32[6] concatenate(a, b), dimensions={0}",
        A + " ROOT r = s32[2] slice(a), slice={[0:3:2]}",
        A + " ROOT r = s32[3] abs(a)",
        U + " ROOT r = u8[3] add(a, b)",
        U + " ROOT r = u8[3] not(a)",
        U + " ROOT r = u8[3] negate(a)",
        F + " ROOT r = f32[4] add(a, b)",
        F + " ROOT r = f32[4] multiply(a, b)",
        F + " ROOT r = f32[4] divide(a, b)",
        F + " ROOT r = f32[4] floor(a)",
        F + " ROOT r = pred[4] compare(a, b), direction=LE",
        F + " ROOT r = f64[4] convert(a)",
        F + " c = pred[4] compare(a, b), direction=LT\n ROOT r = f32[4] select(c, a, b)",
        " a = s32[2,3] constant({{1, 2, 3}, {4, 5, 6}})\n ROOT r = s32[3,2] transpose(a), dimensions={1,0}",
        " a = pred[2] constant({1, 0})\n ROOT r = pred[2] not(a)",
        " p = pred[] constant(0)\n a = c64[] constant((1, -2))\n b = c64[] constant((3, 4))\n"
        " ROOT r = c64[] select(p, a, b)",
        " a = c64[3] constant({(1, 2), (3, 4), (0, -1)})\n ROOT r = c64[3] reverse(a), dimensions={0}",
    ],
)
def test_folds_to_what_xla_computes(body):
    module, result = folded(body)
    assert result.entry.root.opcode is Opcode.CONSTANT
    expected = run_on_xla(export_module(module), [])[0]
    assert constant_array(result.entry.root).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "body",
    [
        F + " ROOT r = s32[4] convert(a)",  # XLA saturates
        F + " ROOT r = f16[4] convert(a)",
        F + " ROOT r = f32[4] maximum(a, b)",  # NaN
        F + " ROOT r = f32[4] exponential(a)",
        F + " ROOT r = f32[4] subtract(a, a)",  # inf - inf: the sign of NaN
        A + " ROOT r = s32[3] divide(a, b)",
        " a = f32[2] constant({1e-20, 1})\n ROOT r = f32[2] multiply(a, a)",  # denormal
        " a = bf16[2] constant({1, 2})\n ROOT r = bf16[2] add(a, a)",
        " a = f32[3] constant({1, 2, 3})\n ROOT r = f32[2,3] broadcast(a), dimensions={1}",
        " a = s32[3] constant({1, 2, 3})\n x = s32[3] parameter(0)\n ROOT r = s32[3] add(a, x)",
        " a = s4[3] constant({7, 2, 3})\n ROOT r = s4[3] add(a, a)",
        " ROOT r = s32[8] iota(), iota_dimension=0",
    ],
)
def test_stays(body):
    module, result = folded(body)
    assert result is module


def test_repeated_element_becomes_a_broadcast():
    _, result = folded(" ROOT r = f32[2,3] constant({{2, 2, 2}, {2, 2, 2}})")
    assert result.entry.root.opcode is Opcode.BROADCAST
    assert constant_array(result.entry.root.operands[0]).tolist() == 2.0


def test_zeros_of_either_sign_are_not_repeated():
    module, result = folded(" ROOT r = f32[2] constant({0, -0.0})")
    assert result is module


def test_large_constants_stay():
    values = np.arange(2000, dtype=np.int32)
    text = ", ".join(map(str, values))
    module, result = folded(f" a = s32[2000] constant({{{text}}})\n ROOT r = s32[2000] add(a, a)")
    assert result is module
