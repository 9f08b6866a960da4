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
from flagos_backend.ir.functions import ALL, FUNCTION_OF_TARGET, TARGET_OF_FUNCTION, WRITTEN, Function
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.elementwise import binary_function, unary_function
from flagos_backend.loop_ir.region import Apply, Literal

# Of the checkout: what is installed has no sources of C++.
_NATIVE = Path(__file__).resolve().parents[3] / "flagos_backend" / "native" / "cpu"

each = pytest.mark.parametrize("function", ALL, ids=lambda function: function.opcode.name)


@each
def test_the_reference_computes_it(function: Function) -> None:
    x = torch.tensor([0.25])
    if function.operands == 1:
        result = unary_function(function.opcode, ElementType.F32)(x)
    else:
        result = binary_function(function.opcode, ElementType.F32)(x, x)
    assert result.dtype is torch.float32


@each
def test_what_pytorch_has_of_it_exists(function: Function) -> None:
    if function.in_torch != WRITTEN:
        assert callable(getattr(torch, function.in_torch))
    if function.in_aten != WRITTEN:
        assert getattr(torch.ops.aten, function.in_aten).overloads()


@each
def test_machine_code_has_it_by_one_way_at_most(function: Function) -> None:
    library = ctypes.CDLL("libm.so.6")
    if function.in_libm != WRITTEN:
        assert hasattr(library, function.in_libm) and hasattr(library, f"{function.in_libm}f")
    assert function.in_libm == WRITTEN or function.opcode not in machine_code.FORMULAS


@each
def test_triton_has_it_with_and_without_a_device_library(function: Function) -> None:
    expression = Apply(ElementType.F32, function.opcode, (Literal(ElementType.F32, bytes(4)),) * function.operands)
    names = ["a", "b"][: function.operands]
    for dialect in Dialect:
        text = scalars.apply(expression, names, dialect)
        assert f"({', '.join(names)})" in text or dialect is Dialect.LIBDEVICE
        for name in re.findall(r"\bfm\.(\w+)", text):
            assert hasattr(formulas, name), text
    assert "libdevice" not in scalars.apply(expression, names, Dialect.PLAIN)


@each
def test_cpp_has_what_the_row_calls(function: Function) -> None:
    source = "".join(path.read_text() for path in sorted(_NATIVE.glob("*.inc")))
    for expression in function.on_host:
        name = expression.partition("(")[0]
        if expression == WRITTEN:
            macro = "FLAGOS_TRIGONOMETRIC" if function.operands == 1 else "FLAGOS_BINARY"
            assert re.search(rf"{macro}\({function.opcode.name.capitalize()},", source)
        elif not name.startswith("std::"):
            assert f" {name}(" in source


@pytest.mark.parametrize("opcode", TARGET_OF_FUNCTION, ids=str)
def test_no_other_file_names_a_function_that_has_a_row(opcode: Opcode) -> None:
    """As docs/howto.md promises whoever adds one. What HLO has may have meanings of its own to passes."""
    package = _NATIVE.parents[1]
    naming = [path for path in package.rglob("*.py") if re.search(rf"\b{opcode.name}\b", path.read_text())]
    assert {path.relative_to(package).as_posix() for path in naming} == {"ir/functions.py", "ir/opcode.py"}


def test_what_hlo_lacks_is_a_custom_call() -> None:
    assert {function.opcode for function in ALL if not function.in_hlo} == set(TARGET_OF_FUNCTION)
    assert FUNCTION_OF_TARGET["flagos.erfc"] is Opcode.ERFC
    assert Opcode.ERF not in TARGET_OF_FUNCTION
