"""Products and quotients of complex numbers in native code, against rational numbers and C99's Annex G."""

from __future__ import annotations

import math
from collections.abc import Callable
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
        # No array of the repeated number is written before.
        assert explanation.count("native loop") == int(element == "c64")
        memory = context.devices[0].default_memory
        ours = get(run(executable, *(put(memory, x) for x in given))[0])
    whole = np.broadcast_to(b, a.shape).copy()
    lhs, rhs = ({"a": a, "repeated": whole}[name] for name in operands.split(", "))
    assert np.array_equal(ours, _computed(context, opcode, lhs, rhs))


_SPECIAL = [0.0, -0.0, 1.0, -2.5, 1e-30, 3e38, _INF, -_INF, _NAN]


def _special_numbers(rng: np.random.Generator) -> np.ndarray:
    """All pairs of special parts, then ordinary numbers, no multiple of a vector's width."""
    parts = np.array([complex(a, b) for a in _SPECIAL for b in _SPECIAL], np.complex64)
    return np.concatenate([parts, _numbers(rng, np.complex64, 8)])


@pytest.mark.parametrize(
    ("result", "operation", "expected"),
    [
        ("f32", "abs(a)", lambda a, b: np.hypot(a.real.astype(float), a.imag.astype(float)).astype(np.float32)),
        ("f32", "real(a)", lambda a, b: a.real),
        ("f32", "imag(a)", lambda a, b: a.imag),
        ("pred", "compare(a, b), direction=EQ", lambda a, b: (a.real == b.real) & (a.imag == b.imag)),
        ("pred", "compare(a, b), direction=NE", lambda a, b: (a.real != b.real) | (a.imag != b.imag)),
        ("c64", "negate(a)", lambda a, b: _joined(-a.real, -a.imag)),
        ("c64", "add(a, b)", lambda a, b: _joined(a.real + b.real, a.imag + b.imag)),
        ("c64", "subtract(a, b)", lambda a, b: _joined(a.real - b.real, a.imag - b.imag)),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_elements_of_two_floats(
    result: str, operation: str, expected: Callable[..., np.ndarray], context: Context, rng: np.random.Generator
) -> None:
    a = _special_numbers(rng)
    b = np.where(rng.random(a.size) < 0.5, a, rng.permutation(a))
    text = f"""ENTRY main {{
  a = c64[{a.size}] parameter(0)
  b = c64[{a.size}] parameter(1)
  ROOT c = {result}[{a.size}] {operation}
}}"""
    with compile(context, text) as executable:
        assert "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        memory = context.devices[0].default_memory
        ours = get(run(executable, put(memory, a), put(memory, b))[0])
    exact = expected(a, b)
    if operation == "abs(a)":
        np.testing.assert_allclose(ours, exact, rtol=1.2e-7)
    else:
        np.testing.assert_array_equal(ours, exact)
        if result != "pred":  # zeros keep their signs
            parts, exact_parts = ours.view(np.float32), np.ascontiguousarray(exact).view(np.float32)
            zero = exact_parts == 0
            np.testing.assert_array_equal(np.signbit(parts[zero]), np.signbit(exact_parts[zero]))


def test_choosing_between_two_numbers(context: Context, rng: np.random.Generator) -> None:
    x, y = rng.permutation(_special_numbers(rng))[:2]
    chosen = rng.random(197) < 0.5
    text = """ENTRY main {
  p = pred[197] parameter(0)
  x = c64[] parameter(1)
  y = c64[] parameter(2)
  a = c64[197] broadcast(x), dimensions={}
  b = c64[197] broadcast(y), dimensions={}
  ROOT c = c64[197] select(p, a, b)
}"""
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        ours = get(run(executable, *(put(memory, np.asarray(a)) for a in (chosen, x, y)))[0])
    np.testing.assert_array_equal(ours, np.where(chosen, x, y))


def _joined(real: np.ndarray, imaginary: np.ndarray) -> np.ndarray:
    return np.stack([real, imaginary], -1).view(np.complex64)[..., 0]


def test_a_chain_is_one_loop(context: Context, rng: np.random.Generator) -> None:
    a, x = _numbers(rng, np.complex64, 2), rng.standard_normal(2000).astype(np.float32)
    text = """ENTRY main {
  a = c64[2000] parameter(0)
  x = f32[2000] parameter(1)
  wide = c64[2000] convert(x)
  product = c64[2000] multiply(a, wide)
  size = f32[2000] abs(product)
  is_large = pred[2000] compare(size, x), direction=GT
  joined = c64[2000] complex(size, x)
  ROOT c = c64[2000] select(is_large, product, joined)
}"""
    with compile(context, text) as executable:
        explanation = executable.artifact(Artifact.EXPLANATION).decode()
        assert "with 0 library calls" in explanation and explanation.count("native loop") == 1
        memory = context.devices[0].default_memory
        ours = get(run(executable, put(memory, a), put(memory, x))[0])
    product = a.astype(np.complex128) * x
    exact = np.where(np.abs(product) > x, product, np.abs(product) + 1j * x)
    near = np.abs(np.abs(product) - x) <= 1e-5 * np.abs(x)  # either side of the comparison
    np.testing.assert_allclose(ours[~near], exact[~near], rtol=1e-6)
