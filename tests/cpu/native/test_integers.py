"""Quotients and remainders of integers, by one number and by many, against Python's integers with XLA's edge cases."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.native.harness import get, put
from flagos_backend.ir.attributes import CompareAttributes, DimensionsAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from plugin_abi.host import Context
from support.native_modules import compile_module, dtype_of, make, run

E = ElementType
_TYPES = [t for t in E if t.is_integer and t.bits >= 8]
_OPCODES = [Opcode.DIVIDE, Opcode.REMAINDER]


def _expected(opcode: Opcode, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Truncated; x / 0 is all ones, x % 0 is x, the least number over -1 wraps."""
    info = np.iinfo(x.dtype)
    if x.dtype.itemsize == 8:
        pairs = zip(x.tolist(), y.tolist(), strict=True)
        quotients = [-1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) for a, b in pairs]
        wide_x, wide_y, quotient = x.astype(object), y.astype(object), np.array(quotients, object)
    else:
        wide_x, wide_y = x.astype(np.int64), y.astype(np.int64)
        size = np.abs(wide_x) // np.maximum(np.abs(wide_y), 1)
        quotient = np.where(wide_y == 0, -1, size * np.where((wide_x < 0) == (wide_y < 0), 1, -1))
    result = quotient if opcode is Opcode.DIVIDE else np.where(wide_y == 0, wide_x, wide_x - quotient * wide_y)
    return ((result - int(info.min)) % (1 << info.bits) + int(info.min)).astype(x.dtype)


def _by_one(context: Context, opcode: Opcode, element_type: E, x: np.ndarray, divisors: np.ndarray) -> None:
    builder = Builder("entry")
    value = builder.parameter(ArrayShape(element_type, x.shape))
    number = builder.parameter(ArrayShape(element_type, ()))
    repeated = builder.add(
        Opcode.BROADCAST, [number], DimensionsAttributes(()), shape=ArrayShape(element_type, x.shape)
    )
    executable, _ = compile_module(context, builder, builder.add(opcode, [value, repeated]))
    memory = context.devices[0].default_memory
    values = put(memory, x)
    for divisor in divisors:
        outputs, done = executable.execute([[values, put(memory, np.array(divisor, x.dtype))]])
        done[0].close()
        expected = _expected(opcode, x, np.full_like(x, divisor))
        np.testing.assert_array_equal(get(outputs[0][0]), expected, err_msg=f"by {divisor}")


def _edges(element_type: E) -> np.ndarray:
    info = np.iinfo(dtype_of(element_type))
    powers = [sign * (1 << k) + d for k in range(info.bits) for d in (-1, 0, 1) for sign in (1, -1)]
    numbers = {0, 1, 3, 5, 7, 10, 641, 1000, info.min, info.min + 1, info.max, info.max - 1, *powers}
    return np.array(sorted(n for n in numbers if info.min <= n <= info.max), dtype_of(element_type))


@pytest.mark.parametrize("opcode", _OPCODES, ids=str)
@pytest.mark.parametrize("element_type", [E.S8, E.U8], ids=lambda t: t.name)
def test_every_byte_by_every_byte(element_type: E, opcode: Opcode, context: Context) -> None:
    info = np.iinfo(dtype_of(element_type))
    everything = np.arange(info.min, info.max + 1).astype(dtype_of(element_type))
    _by_one(context, opcode, element_type, everything, everything)
    x, y = (a.reshape(-1) for a in np.meshgrid(everything, everything))
    _by_many(context, opcode, element_type, x, y)


@pytest.mark.parametrize("opcode", _OPCODES, ids=str)
@pytest.mark.parametrize("element_type", [E.S16, E.U16], ids=lambda t: t.name)
def test_every_number_of_16_bits(element_type: E, opcode: Opcode, context: Context, rng: np.random.Generator) -> None:
    info = np.iinfo(dtype_of(element_type))
    everything = np.arange(info.min, info.max + 1).astype(dtype_of(element_type))
    divisors = np.concatenate([_edges(element_type), rng.choice(everything, 100)])
    _by_one(context, opcode, element_type, everything, divisors)
    for divisor in divisors:
        _by_many(context, opcode, element_type, everything, np.full_like(everything, divisor))


@pytest.mark.parametrize("opcode", _OPCODES, ids=str)
@pytest.mark.parametrize("element_type", _TYPES, ids=lambda t: t.name)
def test_edges_and_random_numbers(element_type: E, opcode: Opcode, context: Context, rng: np.random.Generator) -> None:
    edges = _edges(element_type)
    # Multiples of the divisors and their neighbours: where a quotient that is off by a little shows.
    drawn = make(element_type, rng)
    divisors = np.concatenate([edges, drawn[:50], drawn[:50] >> np.asarray(element_type.bits // 2, drawn.dtype)])
    with np.errstate(all="ignore"):
        multiples = (divisors[:, None] * drawn[None, :50]).reshape(-1)
    x = np.concatenate(
        [edges, drawn, multiples, multiples + multiples.dtype.type(1), multiples - multiples.dtype.type(1)]
    )
    _by_one(context, opcode, element_type, x[:4001], divisors)
    y = np.concatenate([np.tile(divisors, -(-x.size // divisors.size))[: x.size]])
    _by_many(context, opcode, element_type, x, y)


def _by_many(context: Context, opcode: Opcode, element_type: E, x: np.ndarray, y: np.ndarray) -> None:
    builder = Builder("entry")
    operands = [builder.parameter(ArrayShape(element_type, a.shape)) for a in (x, y)]
    executable, _ = compile_module(context, builder, builder.add(opcode, operands))
    np.testing.assert_array_equal(run(context, executable, [x, y]), _expected(opcode, x, y))


@pytest.mark.parametrize("element_type", _TYPES, ids=lambda t: t.name)
def test_counts_of_ones(element_type: E, context: Context, rng: np.random.Generator) -> None:
    x = np.concatenate([_edges(element_type), make(element_type, rng)])
    builder = Builder("entry")
    value = builder.parameter(ArrayShape(element_type, x.shape))
    executable, _ = compile_module(context, builder, builder.add(Opcode.POPCNT, [value]))
    expected = [bin(int(n) % (1 << element_type.bits)).count("1") for n in x]
    np.testing.assert_array_equal(run(context, executable, [x]), expected)


@pytest.mark.parametrize("element_type", [E.S8, E.S16, E.S32, E.S64], ids=lambda t: t.name)
def test_rounded_down_by_constants(element_type: E, context: Context, rng: np.random.Generator) -> None:
    """As frameworks write Python's operators, which native code computes in one step each."""
    x = np.concatenate([_edges(element_type), make(element_type, rng)])
    info = np.iinfo(x.dtype)
    for divisor in {1, -1, 2, -2, 3, 7, -10, 100, int(info.max), int(info.min), int(rng.integers(3, info.max))}:
        for opcode in _OPCODES:
            ours = _rounded_down(context, opcode, x, divisor)
            wide = [int(n) // divisor if opcode is Opcode.DIVIDE else int(n) % divisor for n in x]
            expected = [(n - int(info.min)) % (1 << info.bits) + int(info.min) for n in wide]
            np.testing.assert_array_equal(ours, np.array(expected, x.dtype), err_msg=f"{opcode} by {divisor}")


def _rounded_down(context: Context, opcode: Opcode, x: np.ndarray, divisor: int) -> np.ndarray:
    builder = Builder("entry")
    shape = ArrayShape(ElementType[f"S{x.dtype.itemsize * 8}"], x.shape)

    def number(n: int) -> Instruction:
        return builder.add(Opcode.BROADCAST, [builder.constant(x.dtype.type(n))], DimensionsAttributes(()), shape=shape)

    value, by = builder.parameter(shape), number(divisor)
    remainder = builder.add(Opcode.REMAINDER, [value, by])
    inexact = builder.add(Opcode.COMPARE, [remainder, number(0)], CompareAttributes(Comparison.NE))
    if opcode is Opcode.DIVIDE:
        truncated = builder.add(Opcode.DIVIDE, [value, by])
        signs = [builder.add(Opcode.SIGN, [value]), number(1 if divisor > 0 else -1)]
        differs = builder.add(Opcode.COMPARE, signs, CompareAttributes(Comparison.NE))
        corrected = builder.add(Opcode.SUBTRACT, [truncated, number(1)])
    else:
        truncated = remainder
        zero = number(0)
        operands = [remainder, zero] if divisor > 0 else [zero, remainder]
        differs = builder.add(Opcode.COMPARE, operands, CompareAttributes(Comparison.LT))
        corrected = builder.add(Opcode.ADD, [truncated, by])
    both = builder.add(Opcode.AND, [differs, inexact])
    executable, _ = compile_module(context, builder, builder.add(Opcode.SELECT, [both, corrected, truncated]))
    return run(context, executable, [x])
