"""The rows of elementwise functions: what they name exists, and every target computes each of them."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from flagos_backend.codegen.cpu.llvm import functions as machine_code
from flagos_backend.codegen.triton import formulas, scalars
from flagos_backend.codegen.triton.elements import Dialect
from flagos_backend.ir.functions import FUNCTION_OF_TARGET, TABLE, TARGET_OF_FUNCTION, WRITTEN, Function
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.elementwise import unary_function
from flagos_backend.loop_ir.region import Apply, Literal

# Of the checkout: what is installed has no sources of C++.
_NATIVE = Path(__file__).resolve().parents[3] / "flagos_backend" / "native" / "cpu"

each = pytest.mark.parametrize("function", TABLE, ids=lambda function: function.opcode.name)


@each
def test_the_reference_computes_it(function: Function) -> None:
    x = torch.tensor([0.25])
    assert unary_function(function.opcode, ElementType.F32)(x).dtype is torch.float32


@each
def test_what_pytorch_has_of_it_exists(function: Function) -> None:
    if function.in_torch != WRITTEN:
        assert callable(getattr(torch, function.in_torch))
    if function.in_aten != WRITTEN:
        assert getattr(torch.ops.aten, function.in_aten).default.name() == f"aten::{function.in_aten}"


@each
def test_machine_code_has_it_by_one_way_at_most(function: Function) -> None:
    library = ctypes.CDLL("libm.so.6")
    if function.in_libm != WRITTEN:
        assert hasattr(library, function.in_libm) and hasattr(library, f"{function.in_libm}f")
    assert function.in_libm == WRITTEN or function.opcode not in machine_code.FORMULAS


@each
def test_triton_has_it_with_and_without_a_device_library(function: Function) -> None:
    expression = Apply(ElementType.F32, function.opcode, (Literal(ElementType.F32, bytes(4)),))
    for dialect in Dialect:
        text = scalars.apply(expression, ["a"], dialect)
        assert "(a)" in text or dialect is Dialect.LIBDEVICE
        for name in re.findall(r"\bfm\.(\w+)", text):
            assert hasattr(formulas, name), text
    assert "libdevice" not in scalars.apply(expression, ["a"], Dialect.PLAIN)


@each
def test_cpp_has_what_the_row_calls(function: Function) -> None:
    source = "".join(path.read_text() for path in sorted(_NATIVE.glob("*.inc")))
    for expression in function.on_host:
        name = expression.partition("(")[0]
        if expression == WRITTEN:
            assert re.search(rf"FLAGOS_TRIGONOMETRIC\({function.opcode.name.capitalize()},", source)
        elif not name.startswith("std::"):
            assert f" {name}(" in source


def test_what_hlo_lacks_is_a_custom_call() -> None:
    assert {function.opcode for function in TABLE if not function.in_hlo} == set(TARGET_OF_FUNCTION)
    assert FUNCTION_OF_TARGET["flagos.erfc"] is Opcode.ERFC
    assert Opcode.ERF not in TARGET_OF_FUNCTION
