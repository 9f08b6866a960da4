"""Generated kernels of complex numbers, against rational numbers, C99's Annex G, and the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu.triton.harness import regions_of, run_both, run_generated
from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import CompareAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from programs import hlo_bytes, run_on_xla
from support.passes import for_accelerator

E = ElementType
O = Opcode  # noqa: E741

_INF, _NAN = math.inf, math.nan
_SPECIAL = [0.0, -0.0, 1.0, -2.5, 1e-40, -1e-30, 3e38, _INF, -_INF, _NAN]


def computed(opcode: Opcode, *arguments: np.ndarray) -> np.ndarray:
    builder = Builder("entry")
    types = {np.dtype(np.complex64): E.C64, np.dtype(np.float32): E.F32}
    operands = [builder.parameter(ArrayShape(types[a.dtype], a.shape)) for a in arguments]
    (result,), made = run_generated(builder.build(builder.add(opcode, operands)), arguments)
    assert len(made) == 1
    return result


def numbers(rng: np.random.Generator, exponents: int, size: int = 1500) -> np.ndarray:
    parts = [rng.standard_normal(size) * 2.0 ** rng.integers(-exponents, exponents + 1, size) for _ in range(2)]
    return (parts[0] + 1j * parts[1]).astype(np.complex64)


def special_pairs() -> np.ndarray:
    return np.array([complex(a, b) for a in _SPECIAL for b in _SPECIAL], np.complex64)


def parts(opcode: Opcode, a: complex, b: complex) -> tuple[Fraction, Fraction]:
    """The exact value."""
    ar, ai, br, bi = (Fraction(float(x)) for x in (a.real, a.imag, b.real, b.imag))
    if opcode is O.MULTIPLY:
        return ar * br - ai * bi, ar * bi + ai * br
    size = br * br + bi * bi
    return (ar * br + ai * bi) / size, (ai * br - ar * bi) / size


def error(value: float, exact: Fraction, size: Fraction = Fraction(0)) -> float:
    """In units in the last place of the exact value, or of ``size``; of the least normal number's below that."""
    if abs(exact) >= Fraction(2) ** 128:
        return 0.0 if math.isinf(value) and (value > 0) == (exact > 0) else _INF
    if not math.isfinite(value):
        return 0.0 if abs(exact) > Fraction(2) ** 128 * (1 - Fraction(2) ** -22) else _INF
    unit = Fraction(2) ** (max(math.frexp(float(max(abs(exact), size)))[1], -125) - 24)
    return float(abs(Fraction(float(value)) - exact) / unit)


@pytest.mark.parametrize(("opcode", "most"), [(O.MULTIPLY, 2), (O.DIVIDE, 5)])
def test_parts_are_exact_but_for_a_few_units(opcode: Opcode, most: float, rng: np.random.Generator) -> None:
    a, b = (numbers(rng, 12) for _ in range(2))
    # Parts that nearly cancel: a times its neighbour's inverse, and quotients of nearly conjugate numbers.
    b[:500] = (1 / a[:500] if opcode is O.MULTIPLY else a[:500] * 1j) * (1 + 3 * np.finfo(np.float32).eps)
    for x, y, value in zip(a, b, computed(opcode, a, b), strict=True):
        for part, exact in zip((value.real, value.imag), parts(opcode, x, y), strict=True):
            assert error(part, exact) <= most, (x, y, value)


def test_quotients_of_any_exponents(rng: np.random.Generator) -> None:
    """Against the larger part: both are scaled by the same power of two."""
    a, b = (numbers(rng, 126) for _ in range(2))
    a[:200] *= np.float32(1e-30)  # some are subnormal
    b[100:300] *= np.float32(1e-30)
    for x, y, value in zip(a, b, computed(O.DIVIDE, a, b), strict=True):
        if np.isfinite(x) and np.isfinite(y) and y != 0:
            exacts = parts(O.DIVIDE, x, y)
            for part, exact in zip((value.real, value.imag), exacts, strict=True):
                assert error(part, exact, max(map(abs, exacts))) <= 5, (x, y, value)


def test_quotients_that_are_infinite_vanish_or_are_undefined() -> None:
    infinite = [
        *((complex(1, 1), 0j), (complex(_NAN, 2), 0j), (complex(_INF, _NAN), complex(2, 3))),
        *((complex(_NAN, -_INF), complex(2, 3)), (complex(_INF, _INF), complex(2, 3))),
    ]
    zero = [
        *((complex(1, 1), complex(_INF, _NAN)), (complex(1, 1), complex(_INF, _INF))),
        *((complex(2, 0), complex(_NAN, -_INF)), (0j, complex(2, 3))),
    ]
    undefined = [(0j, 0j), (complex(_NAN, _NAN), complex(2, 3)), (complex(_INF, 1), complex(_INF, 1))]
    for pairs, holds in (
        (infinite, lambda z: np.isinf(z.real) | np.isinf(z.imag)),
        (zero, lambda z: z == 0),
        (undefined, lambda z: np.isnan(z.real) & np.isnan(z.imag)),
    ):
        a, b = (np.array(side, np.complex64) for side in zip(*pairs, strict=True))
        values = computed(O.DIVIDE, a, b)
        assert holds(values).all(), values


def test_products_of_infinities_and_of_large_numbers() -> None:
    large = float(np.finfo(np.float32).max)
    a = np.array([complex(_INF, 0), complex(_INF, 1), complex(large, 0), complex(_NAN, 1)], np.complex64)
    b = np.array([complex(2, 3), complex(2, 3), complex(2, -2), complex(1, 0)], np.complex64)
    values = computed(O.MULTIPLY, a, b)
    np.testing.assert_array_equal(values.real, [_INF, _INF, _INF, _NAN])
    np.testing.assert_array_equal(values.imag, [_INF, _INF, -_INF, _NAN])


def test_absolute_values(rng: np.random.Generator) -> None:
    z = np.concatenate([special_pairs(), numbers(rng, 126), numbers(rng, 3)])
    with np.errstate(all="ignore"):
        exact = np.hypot(z.real.astype(np.float64), z.imag.astype(np.float64))
        nearest = exact.astype(np.float32)
    values = computed(O.ABS, z)
    np.testing.assert_array_equal(np.isfinite(values), np.isfinite(nearest))
    np.testing.assert_array_equal(values[~np.isfinite(nearest)], nearest[~np.isfinite(nearest)])
    is_finite = np.isfinite(nearest)
    units = np.spacing(np.maximum(nearest[is_finite], np.finfo(np.float32).smallest_normal)).astype(np.float64)
    assert (np.abs(values[is_finite] - exact[is_finite]) <= 2 * units).all()


@pytest.mark.parametrize("opcode", [O.ADD, O.SUBTRACT, O.NEGATE, O.REAL, O.IMAG, O.COMPARE, O.COMPLEX, O.SELECT])
def test_what_each_part_has_for_itself(opcode: Opcode) -> None:
    """Exactly, with signs of zeros: all pairs of special parts with others."""
    a, b = special_pairs(), np.roll(special_pairs(), 7)
    b[::5] = a[::5]
    mask = np.arange(a.size) % 3 == 0

    def build(builder: Builder, x: Instruction, y: Instruction, chosen: Instruction) -> Instruction:
        if opcode is O.COMPARE:
            kinds = [CompareAttributes(direction) for direction in (Comparison.EQ, Comparison.NE)]
            return builder.tuple([builder.add(opcode, [x, y], kind) for kind in kinds])
        if opcode is O.COMPLEX:
            return builder.add(opcode, [builder.add(O.IMAG, [x]), builder.add(O.REAL, [y])])
        if opcode is O.SELECT:
            return builder.add(opcode, [chosen, x, y])
        return builder.add(opcode, [x, y] if opcode in (O.ADD, O.SUBTRACT) else [x])

    builder = Builder("entry")
    shape = ArrayShape(E.C64, a.shape)
    operands = [builder.parameter(s) for s in (shape, shape, ArrayShape(E.PRED, a.shape))]
    ours, theirs, made = run_both(builder.build(build(builder, *operands)), [a, b, mask])
    assert made
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, other)
        if opcode not in (O.ADD, O.SUBTRACT, O.COMPARE):
            signs = [np.signbit(np.where(np.isnan(z.real), 0, z.real)) for z in (mine, other)]
            np.testing.assert_array_equal(*signs)


def program(function: Callable[..., jax.Array], *arguments: np.ndarray) -> tuple[Computation, bytes]:
    hlo = hlo_bytes(function, *arguments)
    return for_accelerator(import_module(hlo)).entry, hlo


def _chain_z(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.complex128)[:, None] * b.astype(np.complex128)[None, :] + (2 - 1j)


def _chain_exactly(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The chain in 128 bits, and how far its roundings, each at most u of what it rounds, can take it in 64 bits.

    A part of a product is two products and their sum: at most 2 u |a| |b|, and twice that in magnitude covers both
    parts (the factor is the root of 2). What z is off by, the chain divides by its divisor, which may be small; a
    quotient of complex numbers adds at most 8 u of itself, a sum u of itself. First order in u, so doubled.
    """
    u = 2.0**-24
    z, factor = _chain_z(a, b), x.astype(np.float64)
    divisor = z + 2j
    size = np.abs(z)
    off = 3 * u * np.abs(z - (2 - 1j)) + 2 * u * size
    quotient = size**2 / divisor
    inside = (2 * size * off + 4 * u * size**2) / np.abs(divisor)
    inside += np.abs(quotient) * ((off + 2 * u * np.abs(divisor)) / np.abs(divisor) + 8 * u)
    outside = np.abs(factor) * (off + u * size)
    taken = np.where(size < 3, quotient, factor * z)
    bound = np.where(size < 3, inside, outside) + off
    exact = taken.real - z.imag
    return exact, 2 * bound + 2 * u * np.abs(exact)


@pytest.mark.parametrize("count", [0, 1, 7, 130])
def test_a_chain_is_one_kernel(count: int, rng: np.random.Generator) -> None:
    """With numbers, truth values, real factors, and what rows and columns share."""

    def chain(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
        z = a[:, None] * b[None, :] + (2 - 1j)
        inside = jnp.abs(z) < 3
        return jnp.where(inside, z * z.conj() / (z + 2j), x * z).real - z.imag

    a, b = numbers(rng, 1, count), numbers(rng, 1, 9)
    while (np.abs(np.abs(_chain_z(a, b)) - 3) < 1e-5).any():  # rounding decides which side these are on
        a, b = numbers(rng, 1, count), numbers(rng, 1, 9)
    x = rng.standard_normal((count, 9)).astype(np.float32)
    computation, hlo = program(chain, a, b, x)
    assert count == 0 or len(regions_of(computation)) == 1
    (ours,), _ = run_generated(computation, [a, b, x])
    (theirs,) = run_on_xla(hlo, [a, b, x])
    exact, bound = _chain_exactly(a, b, x)
    assert (np.abs(ours - exact) <= bound).all()
    assert (np.abs(theirs - exact) <= bound).all()
