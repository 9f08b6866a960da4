"""Functions of complex numbers: accuracy against mpmath at 40 digits, special values against stock XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

from flagos_backend.ir.opcode import Opcode as O
from flagos_backend.ir.types import ElementType as E
from programs import run_on_xla
from support.against_xla import check, hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE, complex_distance, distance, special_values

TYPES = [E.C64, E.C128]


def _log1p(z: Any) -> Any:
    return mpmath.log(1 + z)


EXACT: dict[O, Callable[[Any], Any]] = {
    O.ABS: abs,
    O.ACOS: mpmath.acos,
    O.ACOSH: mpmath.acosh,
    O.ASIN: mpmath.asin,
    O.ASINH: mpmath.asinh,
    O.ATANH: mpmath.atanh,
    O.COS: mpmath.cos,
    O.COSH: mpmath.cosh,
    O.EXP: mpmath.exp,
    O.EXPM1: lambda z: mpmath.exp(z) - 1,
    O.LOG: mpmath.log,
    O.LOG1P: _log1p,
    O.LOGISTIC: lambda z: 1 / (1 + mpmath.exp(-z)),
    O.NEGATE: lambda z: -z,
    O.RSQRT: lambda z: 1 / mpmath.sqrt(z),
    O.SIGN: lambda z: z / abs(z),
    O.SIN: mpmath.sin,
    O.SINH: mpmath.sinh,
    O.SQRT: mpmath.sqrt,
    O.TAN: mpmath.tan,
    O.TANH: mpmath.tanh,
}


def unary_program(name: O, element_type: E, count: int) -> bytes:
    source = element_type.name.lower()
    target = element_type.real.name.lower() if name is O.ABS else source
    return hlo_of_text(f"ENTRY e {{ z = {source}[{count}] parameter(0)\n ROOT r = {target}[{count}] {name}(z) }}")


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("name", EXACT, ids=str)
def test_accuracy(name: O, element_type: E, rng: np.random.Generator) -> None:
    scale = rng.choice([1e-6, 1e-3, 0.1, 1.0, 4.0], 150)
    real, imaginary = rng.standard_normal((2, 150)) * scale
    values = (real + 1j * imaginary).astype(element_type_dtype(element_type))
    (ours,) = run_on_backend(unary_program(name, element_type, len(values)), [values])
    with mpmath.workdps(40):
        exact = [EXACT[name](mpmath.mpc(z.real, z.imag)) for z in values.tolist()]
    expected = np.array([float(v) if name is O.ABS else complex(v) for v in exact])
    as_complex = ours.astype(values.dtype)
    worst = float(complex_distance(as_complex, expected.astype(values.dtype)).max())
    assert worst <= 32, f"{worst} ulp"


def element_type_dtype(element_type: E) -> type:
    return np.complex64 if element_type is E.C64 else np.complex128


SPECIAL = [o for o in EXACT if o not in (O.ACOS, O.ACOSH, O.ASIN, O.ASINH, O.ATANH, O.COSH, O.SINH)]


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("name", SPECIAL, ids=str)
def test_special_values(name: O, element_type: E) -> None:
    """Where XLA's own result has a NaN part and its operand none, ours may be the better one of C99."""
    values = special_values(element_type)
    parts = np.abs(np.stack([values.real, values.imag]))
    # XLA flushes or overflows on the way for numbers of these sizes, and takes sqrt(-1 - 0i) for its conjugate.
    doubtful = np.isnan(parts) | (np.isfinite(parts) & (parts > 50)) | (parts == np.finfo(parts.dtype).tiny)
    values = values[~doubtful.any(0) & ~((values.real < 0) & (values.imag == 0))]
    program = unary_program(name, element_type, len(values))
    ((ours,), (theirs,)) = run_on_backend(program, [values]), run_on_xla(program, [values])
    off = distance(ours, theirs)
    off = np.where(np.isnan(theirs), 0, off)
    worst = int(np.argmax(off))
    assert off[worst] <= 128, f"{name}({values[worst]}) = {ours[worst]}, XLA {theirs[worst]}"


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_signs_of_zeros(element_type: E) -> None:
    """They say on which side of a branch cut a number lies: 1 / sqrt(-(1 + 0i)) is i, not -i."""
    dtype = element_type_dtype(element_type)
    z = np.array([complex(x, y) for x in (-4.0, -0.0, 0.0, 1.0, 4.0) for y in (-0.0, 0.0)], dtype)
    away = z[z != 0]
    (negated,) = run_on_backend(unary_program(O.NEGATE, element_type, len(z)), [z])
    (sign,) = run_on_backend(unary_program(O.SIGN, element_type, len(z)), [z])
    (root,) = run_on_backend(unary_program(O.RSQRT, element_type, len(away)), [away])
    for ours, expected in (
        (negated.real, -z.real),
        (negated.imag, -z.imag),
        (sign[z == 0].real, z[z == 0].real),
        (sign[z == 0].imag, z[z == 0].imag),
        (root.real, np.where(away.real > 0, 1 / np.sqrt(np.abs(away.real)), 0.0)),
        (root.imag, np.copysign(np.where(away.real < 0, 1 / np.sqrt(np.abs(away.real)), 0.0), -away.imag)),
    ):
        np.testing.assert_array_equal(ours, expected.astype(ours.dtype))
        np.testing.assert_array_equal(np.signbit(ours), np.signbit(expected))


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_tangent_of_what_has_none(element_type: E) -> None:
    name = element_type.name.lower()
    values = np.array([complex(x, y) for x in (np.inf, -np.inf, np.nan) for y in (0.0, -0.0)])
    check(
        f"ENTRY e {{ z = {name}[6] parameter(0)\n ROOT r = {name}[6] tan(z) }}",
        values.astype(element_type_dtype(element_type)),
    )


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_sums_keep_infinite_parts_apart(element_type: E) -> None:
    special = special_values(element_type)
    a, b = (grid.ravel()[:3000] for grid in np.meshgrid(special[::3], special[1::5]))
    array = f"{element_type.name.lower()}[{len(a)}]"
    check(
        f"""ENTRY e {{
          a = {array} parameter(0)
          b = {array} parameter(1)
          s = {array} add(a, b)
          d = {array} subtract(a, b)
          n = {array} negate(a)
          ROOT t = ({array}, {array}, {array}) tuple(s, d, n) }}""",
        a,
        b,
    )


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("name", [O.MULTIPLY, O.DIVIDE, O.POWER], ids=str)
def test_products_quotients_and_powers(name: O, element_type: E, rng: np.random.Generator) -> None:
    dtype = element_type_dtype(element_type)
    a, b = ((rng.standard_normal(200) + 1j * rng.standard_normal(200)).astype(dtype) for _ in range(2))
    array = f"{element_type.name.lower()}[200]"
    hlo = hlo_of_text(
        f"ENTRY e {{ a = {array} parameter(0)\n b = {array} parameter(1)\n ROOT r = {array} {name}(a, b) }}"
    )
    (ours,) = run_on_backend(hlo, [a, b])
    function = {O.MULTIPLY: lambda x, y: x * y, O.DIVIDE: lambda x, y: x / y, O.POWER: lambda x, y: x**y}[name]
    with mpmath.workdps(40):
        exact = [complex(function(mpmath.mpc(x), mpmath.mpc(y))) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    worst = float(complex_distance(ours, np.array(exact).astype(dtype)).max())
    assert worst <= 16, f"{worst} ulp"


@pytest.mark.parametrize(
    ("numerator", "denominator", "quotient"),
    [
        (1 + 0j, 0j, complex(np.inf, np.nan)),
        (-2 + 3j, 0j, complex(-np.inf, np.inf)),
        (3 + 2j, complex(np.inf, 1), 0j),
        (complex(np.inf, 1), 2 + 1j, complex(np.inf, -np.inf)),
    ],
)
def test_quotients_at_infinity_and_zero(numerator: complex, denominator: complex, quotient: complex) -> None:
    a, b = (np.array([v, v], np.complex128) for v in (numerator, denominator))
    text = "ENTRY e { a = c128[2] parameter(0)\n b = c128[2] parameter(1)\n ROOT r = c128[2] divide(a, b) }"
    (ours,) = check(text, a, b)
    np.testing.assert_array_equal(ours, np.array([quotient] * 2))


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_arc_tangents_of_quotients(element_type: E, rng: np.random.Generator) -> None:
    dtype = NUMPY_DTYPE[element_type]
    # Away from x² + y² = 0, where the function has its poles.
    y, x = (rng.uniform(0.5, 2, 200) + 1j * rng.uniform(-0.4, 0.4, 200) for _ in range(2))
    y, x = y.astype(dtype), x.astype(dtype)
    name = element_type.name.lower()
    text = f"ENTRY e {{ y = {name}[200] parameter(0) x = {name}[200] parameter(1) ROOT r = {name}[200] atan2(y, x) }}"
    (ours,) = run_on_backend(hlo_of_text(text), [y, x])
    exact = [complex(mpmath.atan(mpmath.mpc(a) / mpmath.mpc(b))) for a, b in zip(y.tolist(), x.tolist(), strict=True)]
    np.testing.assert_allclose(ours, exact, rtol=8 * float(np.finfo(dtype).eps), atol=8 * float(np.finfo(dtype).eps))
    real = rng.standard_normal((2, 200))
    (ours,) = run_on_backend(hlo_of_text(text), [*real.astype(dtype)])
    expected = np.arctan2(*real.astype(dtype).real.astype(np.float64))
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=8 * float(np.finfo(dtype).eps))
