"""The elementary functions of machine code, element by element, against NumPy's long doubles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flagos_backend.codegen.cpu.llvm import functions
from flagos_backend.codegen.cpu.llvm.code import Function, Memory
from flagos_backend.codegen.cpu.llvm.runs import Module
from flagos_backend.compile.machine_code import MachineCode
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType

_EDGES = (
    0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1,
    -1,
    88.8,
    -104,
    -745.3,
    709.9,
    710.5,
    1e-310,
    5e-324,
    1e-8,
    -1e-8,
    -1 + 1e-6,
)
_REFERENCE: dict[Opcode, Callable[[Any], Any]] = {
    Opcode.EXP: np.exp,
    Opcode.EXPM1: np.expm1,
    Opcode.LOG: np.log,
    Opcode.LOG1P: np.log1p,
    Opcode.TANH: np.tanh,
    Opcode.LOGISTIC: lambda x: 1 / (1 + np.exp(-x)),
    Opcode.RSQRT: lambda x: 1 / np.sqrt(x),
    Opcode.SIN: np.sin,
    Opcode.CBRT: np.cbrt,
    Opcode.ATANH: np.arctanh,
}
# Units in the last place: what tiles promise of floats, and of doubles.
_ALLOWED = {ElementType.F32: 0.51, ElementType.F64: 2.3}


def _compiled(opcode: Opcode, element_type: ElementType, size: int) -> tuple[Any, MachineCode]:
    function = Function("run0")
    source, target = (Memory(function.slot(number), function.scope()) for number in range(2))
    scopes = (source.scope, target.scope)
    with function.loop(size) as index:
        value = function.load(source, element_type, index, scopes)
        result = functions.call(function, opcode, element_type, [value])
        function.store(target, element_type, index, result, scopes)
    code = MachineCode(Module([function]).text(), ["run0"])
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.addresses[0]), code


@pytest.mark.parametrize("element_type", [ElementType.F32, ElementType.F64], ids=str)
@pytest.mark.parametrize("opcode", _REFERENCE, ids=str)
def test_functions_round_as_those_of_tiles(opcode: Opcode, element_type: ElementType, rng: np.random.Generator) -> None:
    dtype = np.dtype({ElementType.F32: np.float32, ElementType.F64: np.float64}[element_type])
    normal = rng.normal(size=1000)
    with np.errstate(over="ignore", under="ignore"):
        parts = (normal, normal * 100, np.exp(normal * 20), -np.exp(-normal * 5), normal * 1e-5, normal * 1e-30, _EDGES)
        x = np.concatenate(parts).astype(dtype)
    y = np.zeros_like(x)
    run, _code = _compiled(opcode, element_type, len(x))
    run((ctypes.c_void_p * 2)(x.ctypes.data, y.ctypes.data))
    with np.errstate(all="ignore"):
        exact = _REFERENCE[opcode](x.astype(np.longdouble))
        wanted = exact.astype(dtype)
        # Subnormal results may be zero where they are quotients.
        finite = np.isfinite(wanted) & np.isfinite(y) & (np.abs(exact) >= np.finfo(dtype).tiny)
        error = np.abs(y - exact)[finite] / np.spacing(np.abs(wanted[finite])).astype(np.longdouble)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(wanted))
    np.testing.assert_array_equal(y[np.isinf(wanted) & np.isinf(y)], wanted[np.isinf(wanted) & np.isinf(y)])
    np.testing.assert_array_equal(np.signbit(y[wanted == 0]), np.signbit(wanted[wanted == 0]))
    # Where the greatest number or infinity is nearer is a matter of one rounding.
    differs = np.isinf(wanted) != np.isinf(y)
    assert (np.abs(exact[differs & ~np.isnan(wanted)]) > np.finfo(dtype).max * (1 - 1e-6)).all()
    allowed = _ALLOWED[element_type] if opcode in functions.FORMULAS else 3.5
    assert error.max() <= allowed, (x[finite][error.argmax()], y[finite][error.argmax()])
