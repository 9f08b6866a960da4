"""Products and quotients of complex numbers in native code, against rational numbers and C99's Annex G."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_ELEMENTS = {"c64": np.complex64, "c128": np.complex128}
_INF, _NAN = math.inf, math.nan


def _computed(context: Context, opcode: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    element = f"c{a.dtype.itemsize * 8}"
    text = f"""ENTRY main {{
  a = {element}[{a.size}] parameter(0)
  b = {element}[{a.size}] parameter(1)
  ROOT c = {element}[{a.size}] {opcode}(a, b)
}}"""
    with compile(context, text) as executable:
        assert "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        memory = context.devices[0].default_memory
        return get(run(executable, put(memory, a), put(memory, b))[0])


def _parts(opcode: str, a: complex, b: complex) -> tuple[Fraction, Fraction]:
    """The exact value."""
    ar, ai, br, bi = (Fraction(float(x)) for x in (a.real, a.imag, b.real, b.imag))
    if opcode == "multiply":
        return ar * br - ai * bi, ar * bi + ai * br
    size = br * br + bi * bi
    return (ar * br + ai * bi) / size, (ai * br - ar * bi) / size


def _error(value: float, exact: Fraction, dtype: np.dtype) -> float:
    """In units in the last place of the exact value; of the least normal number's below that."""
    information = np.finfo(dtype)
    if abs(exact) > Fraction(float(information.max)):
        return 0.0 if math.isinf(value) and (value > 0) == (exact > 0) else _INF
    if not math.isfinite(value):
        return _INF
    unit = Fraction(float(information.smallest_normal)) * Fraction(float(information.eps))
    size = abs(exact) / unit
    digits = information.nmant + 1
    if size >= 1 << digits:
        unit *= 1 << (int(size).bit_length() - digits)
    return float(abs(Fraction(float(value)) - exact) / unit)


def _numbers(rng: np.random.Generator, dtype: type[np.complexfloating], exponents: int) -> np.ndarray:
    size = 2000
    parts = [rng.standard_normal(size) * 2.0 ** rng.integers(-exponents, exponents + 1, size) for _ in range(2)]
    return (parts[0] + 1j * parts[1]).astype(dtype)


@pytest.mark.parametrize("opcode", ["multiply", "divide"])
@pytest.mark.parametrize("element", _ELEMENTS)
def test_parts_are_rounded_once(element: str, opcode: str, context: Context, rng: np.random.Generator) -> None:
    a, b = (_numbers(rng, _ELEMENTS[element], 12) for _ in range(2))
    # Parts that nearly cancel: a times its neighbour's inverse, and quotients of nearly conjugate numbers.
    b[:500] = (1 / a[:500] if opcode == "multiply" else a[:500] * 1j) * (1 + 3 * np.finfo(a.dtype).eps)
    values = _computed(context, opcode, a, b)
    errors = [
        _error(part, exact, a.real.dtype)
        for x, y, value in zip(a, b, values, strict=True)
        for part, exact in zip((value.real, value.imag), _parts(opcode, x, y), strict=True)
    ]
    assert max(errors) <= 0.501


@pytest.mark.parametrize(("element", "exponents"), [("c64", 126), ("c128", 1020)])
def test_quotients_of_any_exponents(element: str, exponents: int, context: Context, rng: np.random.Generator) -> None:
    a, b = (_numbers(rng, _ELEMENTS[element], exponents) for _ in range(2))
    values = _computed(context, "divide", a, b)
    for x, y, value in zip(a, b, values, strict=True):
        if not (np.isfinite(x) and np.isfinite(y) and y != 0):
            continue
        for part, exact in zip((value.real, value.imag), _parts("divide", x, y), strict=True):
            assert _error(part, exact, a.real.dtype) <= 0.501, (x, y, value)


@pytest.mark.parametrize("element", _ELEMENTS)
def test_quotients_that_are_infinite_or_vanish(element: str, context: Context) -> None:
    infinite = [
        (complex(1, 1), 0j),
        (complex(_NAN, 2), 0j),
        (complex(_INF, _NAN), complex(2, 3)),
        (complex(_NAN, -_INF), complex(2, 3)),
        (complex(_INF, _INF), complex(2, 3)),
    ]
    zero = [
        (complex(1, 1), complex(_INF, _NAN)),
        (complex(1, 1), complex(_INF, _INF)),
        (complex(2, 0), complex(_NAN, -_INF)),
        (0j, complex(2, 3)),
    ]
    undefined = [(0j, 0j), (complex(_NAN, _NAN), complex(2, 3)), (complex(_INF, 1), complex(_INF, 1))]
    # Each in a block of ordinary numbers too, which are not computed one by one.
    for pairs, holds in (
        (infinite, lambda z: np.isinf(z.real) | np.isinf(z.imag)),
        (zero, lambda z: z == 0),
        (undefined, lambda z: np.isnan(z.real) & np.isnan(z.imag)),
    ):
        a = np.tile(np.array([complex(6, 8), *(x for x, _ in pairs)], _ELEMENTS[element]), 50)
        b = np.tile(np.array([complex(3, 4), *(y for _, y in pairs)], _ELEMENTS[element]), 50)
        values = _computed(context, "divide", a, b).reshape(50, -1)
        np.testing.assert_array_equal(values[:, 0], 2)
        assert holds(values[:, 1:]).all(), values[0]


@pytest.mark.parametrize("element", _ELEMENTS)
def test_products_of_infinities_and_of_large_numbers(element: str, context: Context) -> None:
    large = np.finfo(_ELEMENTS[element]).max
    a = np.array([complex(_INF, 0), complex(_INF, 1), complex(large, 0), complex(_NAN, 1)], _ELEMENTS[element])
    b = np.array([complex(2, 3), complex(2, 3), complex(2, -2), complex(1, 0)], _ELEMENTS[element])
    real = np.array([_INF, _INF, _INF, _NAN])
    imaginary = np.array([_INF, _INF, -_INF, _NAN])
    values = _computed(context, "multiply", a, b)
    np.testing.assert_array_equal(values.real, real)
    np.testing.assert_array_equal(values.imag, imaginary)


def test_an_array_without_elements(context: Context) -> None:
    empty = np.zeros(0, np.complex128)
    assert _computed(context, "divide", empty, empty).shape == (0,)


@pytest.mark.parametrize("element", ["c64", "c128"])
@pytest.mark.parametrize("number", ["constant((1.5, -2.25))", "parameter(1)"])
@pytest.mark.parametrize(
    ("opcode", "operands"),
    [
        ("multiply", "a, repeated"),
        ("multiply", "repeated, a"),
        ("divide", "a, repeated"),
        ("divide", "repeated, a"),
        ("divide", "repeated, repeated"),
    ],
)
def test_one_number_for_all_elements(
    context: Context, rng: np.random.Generator, opcode: str, element: str, number: str, operands: str
) -> None:
    a = _numbers(rng, _ELEMENTS[element], 3)
    b = np.array(1.5 - 2.25j, a.dtype)
    given = [a] if number.startswith("constant") else [a, b]
    text = f"""ENTRY main {{
  a = {element}[{a.size}] parameter(0)
  b = {element}[] {number}
  repeated = {element}[{a.size}] broadcast(b), dimensions={{}}
  ROOT c = {element}[{a.size}] {opcode}({operands})
}}"""
    with compile(context, text) as executable:
        explanation = executable.artifact(Artifact.EXPLANATION).decode()
        assert "with 0 library calls" in explanation
        assert "native loop" not in explanation
        memory = context.devices[0].default_memory
        ours = get(run(executable, *(put(memory, x) for x in given))[0])
    whole = np.broadcast_to(b, a.shape).copy()
    lhs, rhs = ({"a": a, "repeated": whole}[name] for name in operands.split(", "))
    assert np.array_equal(ours, _computed(context, opcode, lhs, rhs))
