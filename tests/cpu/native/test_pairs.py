"""Operations that tiles compute in pairs, rotations, quotients by one number: the bits of each operation by itself."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.attributes import DimensionsAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from plugin_abi.host import Context
from support.native_modules import assert_same_bits, compile_module, dtype_of, make, run
from support.paired_functions import BITS, FUNCTIONS, SHIFTS

E = ElementType
_SIZE = 2600  # several tiles, and no multiple of a vector
_ARITHMETIC = (Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY)
_PAIRS = [
    *((t, first, second) for t in (E.F32, E.F64) for first in _ARITHMETIC for second in _ARITHMETIC),
    *((t, first, second) for t in (E.U32, E.U64) for first in (*BITS, *SHIFTS) for second in BITS),
]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("element_type", "first", "second"), _PAIRS, ids=lambda p: getattr(p, "name", str(p)))
def test_pair(
    element_type: E, first: Opcode, second: Opcode, swapped: bool, context: Context, rng: np.random.Generator
) -> None:
    arrays = [np.roll(make(element_type, rng, _SIZE), 5 * i) for i in range(3)]
    builder = Builder("entry")
    a, b, c = (builder.parameter(ArrayShape(element_type, x.shape)) for x in arrays)
    inner = builder.add(first, [a, b])
    executable, _ = compile_module(context, builder, builder.add(second, [c, inner] if swapped else [inner, c]))
    with np.errstate(all="ignore"):
        between = FUNCTIONS[first](arrays[0], arrays[1]).astype(dtype_of(element_type))
        operands = (arrays[2], between) if swapped else (between, arrays[2])
        expected = FUNCTIONS[second](*operands)
    assert_same_bits(run(context, executable, arrays), expected)


@pytest.mark.parametrize("followed", [None, Opcode.ADD, Opcode.XOR])
@pytest.mark.parametrize("amount", [1, 13, 31])
@pytest.mark.parametrize("element_type", [E.U32, E.U64], ids=lambda t: t.name)
def test_rotation(
    element_type: E, amount: int, followed: Opcode | None, context: Context, rng: np.random.Generator
) -> None:
    x, y = make(element_type, rng, _SIZE), make(element_type, rng, _SIZE)[::-1].copy()
    bits = element_type.bits
    builder = Builder("entry")
    shape = ArrayShape(element_type, x.shape)
    value, other = builder.parameter(shape), builder.parameter(shape)

    def number(n: int) -> Instruction:
        constant = builder.constant(x.dtype.type(n))
        return builder.add(Opcode.BROADCAST, [constant], DimensionsAttributes(()), shape=shape)

    left = builder.add(Opcode.SHIFT_LEFT, [value, number(amount)])
    right = builder.add(Opcode.SHIFT_RIGHT_LOGICAL, [value, number(bits - amount)])
    root = builder.add(Opcode.OR, [left, right])
    expected = (x << x.dtype.type(amount)) | (x >> x.dtype.type(bits - amount))
    if followed is not None:
        root = builder.add(followed, [other, root])
        expected = FUNCTIONS[followed](expected, y)
    executable, _ = compile_module(context, builder, root)
    np.testing.assert_array_equal(run(context, executable, [x, y]), expected)


def _divided(context: Context, x: np.ndarray, divisor: np.float32) -> np.ndarray:
    builder = Builder("entry")
    shape = ArrayShape(E.F32, x.shape)
    value, number = builder.parameter(shape), builder.parameter(ArrayShape(E.F32, ()))
    repeated = builder.add(Opcode.BROADCAST, [number], DimensionsAttributes(()), shape=shape)
    executable, _ = compile_module(context, builder, builder.add(Opcode.DIVIDE, [value, repeated]))
    return run(context, executable, [x, np.array(divisor, np.float32)])


@pytest.mark.parametrize(
    "divisor", [3.0, -7.0, 1024.0, 0.1, 1.9999999, 1e-30, 1e30, 2.0**-126, 1e-40, 0.0, -0.0, np.inf, -np.inf, np.nan]
)
def test_quotient_by_one_number_rounds_once(divisor: float, context: Context, rng: np.random.Generator) -> None:
    bits = rng.integers(0, 1 << 32, _SIZE, dtype=np.uint32)
    ordinary = rng.standard_normal(_SIZE).astype(np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-126, 1e-45, 3.4e38], np.float32)
    x = np.concatenate([special, bits.view(np.float32), ordinary])
    with np.errstate(all="ignore"):
        expected = x / np.float32(divisor)
    assert_same_bits(_divided(context, x, np.float32(divisor)), expected)


def test_quotients_by_random_numbers_round_once(context: Context, rng: np.random.Generator) -> None:
    def drawn(size: int, exponents: int) -> np.ndarray:
        return np.ldexp(rng.uniform(1, 2, size).astype(np.float32), rng.integers(-exponents, exponents, size))

    for divisor in drawn(40, 30):
        x = drawn(100_000, 50)
        assert_same_bits(_divided(context, x, divisor), x / divisor)


@pytest.mark.parametrize("digits", [1, 2, 8, 19, 20, 21, 22])
def test_quotients_by_numbers_of_few_digits_round_once(digits: int, context: Context, rng: np.random.Generator) -> None:
    """Of both signs, all exponents, and dividends whose quotients are as near as any to the middle of two floats."""
    for _ in range(6):
        whole = rng.integers(1 << digits - 1, 1 << digits) | 1
        divisor = np.ldexp(np.float32(whole * rng.choice([-1, 1])), rng.integers(-39 - digits, 40 - digits))
        middles = rng.integers(1 << 23, 1 << 24, 20_000) * 2.0 + 1
        scale = np.exp2(rng.integers(-130, 100, middles.size))
        with np.errstate(over="ignore"):
            nearest = (middles * abs(float(divisor)) * scale).astype(np.float32)
        x = np.concatenate([nearest, np.nextafter(nearest, np.float32(0)), np.zeros(64, np.float32), -nearest])
        x[rng.integers(x.size, size=64)] = rng.choice(np.array([np.inf, -np.inf, np.nan, -0.0], np.float32), 64)
        with np.errstate(all="ignore"):
            expected = x / divisor
        assert_same_bits(_divided(context, x, divisor), expected)


def test_reciprocals_round_once(context: Context, rng: np.random.Generator) -> None:
    exponents = np.arange(0, 1 << 32, 1 << 23, dtype=np.uint64).astype(np.uint32)  # both signs, with subnormals and NaN
    mantissas = np.concatenate([[0, 1, 0x7FFFFF, 0x7FFFFE], rng.integers(0, 1 << 23, 300)]).astype(np.uint32)
    x = (exponents[:, None] | mantissas).view(np.float32).reshape(-1)
    builder = Builder("entry")
    shape = ArrayShape(E.F32, x.shape)
    value = builder.parameter(shape)
    one = builder.add(Opcode.BROADCAST, [builder.constant(np.float32(1))], DimensionsAttributes(()), shape=shape)
    executable, _ = compile_module(context, builder, builder.add(Opcode.DIVIDE, [one, value]))
    with np.errstate(all="ignore"):
        expected = np.float32(1) / x
    assert_same_bits(run(context, executable, [x]), expected)
