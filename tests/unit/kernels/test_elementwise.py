"""Elementwise kernels against stock XLA: every operation on every element type, special values always included."""

from __future__ import annotations

import functools
import itertools
import os

import ml_dtypes
import numpy as np
import pytest

from flagos_backend.ir.opcode import Opcode as O
from flagos_backend.ir.types import ElementType
from programs import run_on_xla
from support.against_xla import check, hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE, distance, random_values, special_values
from support.seeds import SEED_VARIABLE

E = ElementType
INTEGERS = tuple(e for e in E if e.is_integer and e.bits > 1)
FLOATS = (E.F16, E.BF16, E.F32, E.F64)
SMALL_FLOATS = (E.F8E5M2, E.F8E4M3FN, E.F8E4M3, E.F8E3M4, E.F8E4M3B11FNUZ, E.F8E4M3FNUZ, E.F8E5M2FNUZ)
COMPLEX = (E.C64, E.C128)

EXACT_FLOAT_UNARY = (O.ABS, O.CEIL, O.FLOOR, O.IS_FINITE, O.NEGATE, O.ROUND_AFZ, O.ROUND_EVEN, O.SIGN)
# XLA's own float32 and float64 functions are off by a few units; these are the furthest apart that both may be.
INEXACT_FLOAT_UNARY = {
    O.CBRT: 4,
    O.COS: 4,
    O.ERF: 8,
    O.EXP: 4,
    O.EXPM1: 8,
    O.LOG: 4,
    O.LOG1P: 128,
    O.LOGISTIC: 8,
    O.RSQRT: 4,
    O.SIN: 4,
    O.SQRT: 1,
    O.TAN: 8,
    O.TANH: 12,
}
FLOAT_BINARY = {
    O.ADD: 0,
    O.SUBTRACT: 0,
    O.MULTIPLY: 0,
    O.DIVIDE: 0,
    O.REMAINDER: 0,
    O.MAXIMUM: 0,
    O.MINIMUM: 0,
    O.ATAN2: 8,
    O.POWER: 8,
}
INTEGER_UNARY = (O.ABS, O.CLZ, O.NEGATE, O.NOT, O.POPCNT, O.SIGN)
INTEGER_BINARY = (
    *(O.ADD, O.SUBTRACT, O.MULTIPLY, O.DIVIDE, O.REMAINDER, O.MAXIMUM, O.MINIMUM, O.AND, O.OR, O.XOR),
    *(O.SHIFT_LEFT, O.SHIFT_RIGHT_ARITHMETIC, O.SHIFT_RIGHT_LOGICAL),
)


def operations(element_type: ElementType, arity: int) -> dict[O, int]:
    """The operations of a type and how many units in the last place they may be off."""
    if element_type is E.PRED:
        names = (O.NOT,) if arity == 1 else (O.AND, O.OR, O.XOR, O.ADD, O.MULTIPLY, O.MAXIMUM, O.MINIMUM)
        return dict.fromkeys(names, 0)
    if element_type.is_integer:
        unary = [o for o in INTEGER_UNARY if element_type.is_signed or o not in (O.ABS, O.SIGN)]
        if element_type.bits < 8 and element_type.is_signed:
            unary.remove(O.POPCNT)  # XLA counts the bits of the sign-extended byte
        return dict.fromkeys(unary if arity == 1 else INTEGER_BINARY, 0)
    if arity == 2:
        return FLOAT_BINARY
    return dict.fromkeys(EXACT_FLOAT_UNARY, 0) | INEXACT_FLOAT_UNARY


def inputs(element_type: ElementType, arity: int) -> list[np.ndarray]:
    rng = np.random.default_rng([int(os.environ[SEED_VARIABLE]), element_type, arity])
    special = special_values(element_type)
    if arity == 1:
        return [np.concatenate([special, random_values(element_type, 300, rng)])]
    if len(special) ** 2 > 5_000:
        pairs = [rng.choice(special, 5_000), rng.choice(special, 5_000)]
    else:
        pairs = [grid.ravel() for grid in np.meshgrid(special, special)]
    return [np.concatenate([p, random_values(element_type, 300, rng)]) for p in pairs]


@functools.cache
def outcomes(element_type: ElementType, arity: int) -> tuple[list[np.ndarray], dict[O, tuple[np.ndarray, np.ndarray]]]:
    """One program computes all operations of a type: its inputs, and ours and XLA's result of each."""
    arguments = inputs(element_type, arity)
    array = f"{element_type.name.lower()}[{len(arguments[0])}]"
    names = list(operations(element_type, arity))
    shapes = [array.replace(element_type.name.lower(), "pred") if name is O.IS_FINITE else array for name in names]
    lines = [f"a{i} = {array} parameter({i})" for i in range(arity)]
    operands = ", ".join(f"a{i}" for i in range(arity))
    lines += [f"r{i} = {shape} {name}({operands})" for i, (name, shape) in enumerate(zip(names, shapes, strict=True))]
    lines.append(f"ROOT t = ({', '.join(shapes)}) tuple({', '.join(f'r{i}' for i in range(len(names)))})")
    hlo = hlo_of_text("ENTRY e {\n" + "\n".join(lines) + "\n}")
    results = zip(run_on_backend(hlo, arguments), run_on_xla(hlo, arguments), strict=True)
    return arguments, dict(zip(names, results, strict=True))


CASES = [
    pytest.param(element_type, arity, name, id=f"{element_type.name}-{name}")
    for element_type in (E.PRED, *INTEGERS, *FLOATS, *SMALL_FLOATS)
    for arity in (1, 2)
    for name in operations(element_type, arity)
]


@pytest.mark.parametrize(("element_type", "arity", "name"), CASES)
def test_operation(element_type: ElementType, arity: int, name: O) -> None:
    arguments, results = outcomes(element_type, arity)
    ours, theirs = results[name]
    # XLA computes some functions of float16 in float16, step by step.
    allowed = operations(element_type, arity)[name]
    allowed = min(allowed, 2) if element_type.bits <= 16 else allowed
    off = distance(ours, theirs)
    if name in (O.MAXIMUM, O.MINIMUM):
        off = np.where(ours == theirs, 0, off)  # of two zeros either may come
    if element_type is E.BF16 and name is O.POWER:
        # XLA makes zero of a subnormal F32, also where it rounds to the least normal BF16: the exact power decides.
        least = float(ml_dtypes.finfo(ours.dtype).smallest_normal)
        with np.errstate(all="ignore"):
            exact = np.power(*(a.astype(np.float64) for a in arguments))
        is_subnormal = (np.abs(exact) < least) & (theirs == 0)
        off = np.where(is_subnormal & (ours == exact.astype(ours.dtype)), 0, off)
    worst = int(np.argmax(off))
    assert off[worst] <= allowed, f"{name}({[a[worst] for a in arguments]}) = {ours[worst]}, XLA {theirs[worst]}"


@pytest.mark.parametrize("element_type", INTEGERS, ids=lambda t: t.name)
def test_integer_power(element_type: ElementType, rng: np.random.Generator) -> None:
    """XLA looks at the low six bits of the exponent only: larger ones are compared with Python below."""
    base = np.concatenate([special_values(element_type), random_values(element_type, 100, rng)])
    low = -3 if element_type.is_signed else 0
    high = min(7, (1 << (element_type.bits - 1)) - 1) if element_type.bits < 8 else 64
    exponent = rng.integers(max(low, -(1 << (element_type.bits - 1))), high, len(base)).astype(base.dtype)
    array = f"{element_type.name.lower()}[{len(base)}]"
    text = f"ENTRY e {{ a = {array} parameter(0)\n b = {array} parameter(1)\n ROOT r = {array} power(a, b) }}"
    check(text, base, exponent)


def test_integer_power_of_a_large_exponent_wraps_around() -> None:
    base, exponent = np.array([3, -7, 2, 1, -1, 0], np.int32), np.array([1000, 12345, 64, 2**31 - 1, 2**31 - 1, 70])
    hlo = hlo_of_text("ENTRY e { a = s32[6] parameter(0)\n b = s32[6] parameter(1)\n ROOT r = s32[6] power(a, b) }")
    (ours,) = run_on_backend(hlo, [base, exponent.astype(np.int32)])
    expected = [pow(int(b), int(e), 2**32) for b, e in zip(base, exponent, strict=True)]
    np.testing.assert_array_equal(ours.astype(np.int64) % 2**32, expected)


@pytest.mark.parametrize("element_type", [e for e in INTEGERS if e.bits >= 8], ids=lambda t: t.name)
@pytest.mark.parametrize("name", [O.DIVIDE, O.REMAINDER, O.SHIFT_LEFT, O.SHIFT_RIGHT_LOGICAL, O.SHIFT_RIGHT_ARITHMETIC])
def test_constant_second_operand(element_type: ElementType, name: O, rng: np.random.Generator) -> None:
    x = np.concatenate([special_values(element_type), random_values(element_type, 60, rng)])
    array, scalar = f"{element_type.name.lower()}[{len(x)}]", f"{element_type.name.lower()}[]"
    bits = element_type.bits
    constants = {0, 1, 2, 3, 7, bits - 1, bits, bits + 1} | ({-1, -2} if element_type.is_signed else {255})
    lines = [f"x = {array} parameter(0)"]
    for i, constant in enumerate(sorted(constants)):
        lines += [
            f"c{i} = {scalar} constant({constant})",
            f"b{i} = {array} broadcast(c{i}), dimensions={{}}",
            f"r{i} = {array} {name}(x, b{i})",
        ]
    count = len(constants)
    lines.append(f"ROOT t = ({', '.join([array] * count)}) tuple({', '.join(f'r{i}' for i in range(count))})")
    check("ENTRY e {\n" + "\n".join(lines) + "\n}", x)


@pytest.mark.parametrize("element_type", INTEGERS, ids=lambda t: t.name)
def test_upper_half_of_a_product(element_type: ElementType, rng: np.random.Generator) -> None:
    """Against Python's integers: XLA does not read the opcode back from HLO."""
    special = special_values(element_type)
    a, b = (
        np.concatenate([grid.ravel(), random_values(element_type, 500, rng)]) for grid in np.meshgrid(special, special)
    )
    array = f"{element_type.name.lower()}[{len(a)}]"
    text = f"ENTRY e {{\n a = {array} parameter(0)\n b = {array} parameter(1)\n ROOT r = {array} mulhi(a, b) }}"
    (ours,) = run_on_backend(hlo_of_text(text), [a, b])
    exact = [(int(x) * int(y)) >> element_type.bits for x, y in zip(a, b, strict=True)]
    assert [int(x) for x in ours] == exact


COMPARED = (E.PRED, *INTEGERS, *FLOATS, E.F8E5M2, E.F8E4M3FN, *COMPLEX)


@pytest.mark.parametrize("element_type", FLOATS, ids=lambda t: t.name)
@pytest.mark.parametrize("opcode", [O.COSH, O.SINH], ids=lambda o: o.name)
def test_hyperbolic_functions_up_to_the_end_of_their_range(
    element_type: ElementType, opcode: O, rng: np.random.Generator
) -> None:
    """e**x overflows before its half does. Wider floats are the oracle: XLA has no such instruction."""
    dtype = NUMPY_DTYPE[element_type]
    end = float(np.arccosh(np.longdouble(ml_dtypes.finfo(dtype).max)))
    around = np.concatenate([end - np.geomspace(1e-3, 1, 40), rng.uniform(-end, end, 400), rng.uniform(-1, 1, 100)])
    x = np.concatenate([around, -around]).astype(dtype)
    array = f"{element_type.name.lower()}[{len(x)}]"
    (ours,) = run_on_backend(hlo_of_text(f"ENTRY e {{ a = {array} parameter(0)\n ROOT r = {array} {opcode}(a) }}"), [x])
    with np.errstate(over="ignore"):
        exact = {O.COSH: np.cosh, O.SINH: np.sinh}[opcode](x.astype(np.longdouble)).astype(float).astype(dtype)
    assert distance(ours, exact).max() <= 4


@pytest.mark.parametrize("element_type", COMPARED, ids=lambda t: t.name)
def test_compare(element_type: ElementType) -> None:
    special = special_values(element_type)
    a, b = (grid.ravel() for grid in np.meshgrid(special, special))
    a, b = a[:4000], b[:4000]
    name, count = element_type.name.lower(), len(a)
    directions = ("EQ", "NE") if element_type.is_complex else ("EQ", "NE", "LT", "LE", "GT", "GE")
    kinds = [""]
    if element_type in FLOATS:
        kinds.append(", type=TOTALORDER")
    lines = [f"a = {name}[{count}] parameter(0)", f"b = {name}[{count}] parameter(1)"]
    results = list(itertools.product(directions, kinds))
    lines += [f"r{i} = pred[{count}] compare(a, b), direction={d}{k}" for i, (d, k) in enumerate(results)]
    lines.append(
        f"ROOT t = ({', '.join([f'pred[{count}]'] * len(results))}) "
        f"tuple({', '.join(f'r{i}' for i in range(len(results)))})"
    )
    check("ENTRY e {\n" + "\n".join(lines) + "\n}", a, b)


def test_total_order_puts_nan_at_both_ends() -> None:
    # A sign of NaN that XLA's own constant folding does not touch: built from bits.
    bits = np.array([0xFFC00000, 0xFF800000, 0x80000000, 0x00000000, 0x7F800000, 0x7FC00000], np.uint32)
    text = """ENTRY e {
      b = u32[6] parameter(0)
      x = f32[6] bitcast-convert(b)
      i = f32[6,6] broadcast(x), dimensions={0}
      j = f32[6,6] broadcast(x), dimensions={1}
      ROOT r = pred[6,6] compare(i, j), direction=LT, type=TOTALORDER }"""
    (less,) = check(text, bits)
    np.testing.assert_array_equal(less, np.triu(np.ones((6, 6), bool), 1))


SELECTED = (E.PRED, E.S4, E.S8, E.U16, E.S32, E.U64, E.F16, E.BF16, E.F32, E.F64, E.F8E4M3FN, E.C64, E.C128)


@pytest.mark.parametrize("element_type", SELECTED, ids=lambda t: t.name)
def test_select_by_array_and_by_scalar(element_type: ElementType, rng: np.random.Generator) -> None:
    name = element_type.name.lower()
    text = f"""ENTRY e {{
      p = pred[3,4] parameter(0)
      s = pred[] parameter(1)
      x = {name}[3,4] parameter(2)
      y = {name}[3,4] parameter(3)
      a = {name}[3,4] select(p, x, y)
      sb = pred[3,4] broadcast(s), dimensions={{}}
      b = {name}[3,4] select(sb, x, y)
      ROOT t = ({name}[3,4], {name}[3,4]) tuple(a, b) }}"""
    x, y = (random_values(element_type, 12, rng).reshape(3, 4) for _ in range(2))
    check(text, rng.integers(0, 2, (3, 4)).astype(bool), np.array(rng.integers(0, 2), bool), x, y)


@pytest.mark.parametrize("element_type", (*INTEGERS, *FLOATS, E.F8E5M2, *COMPLEX), ids=lambda t: t.name)
@pytest.mark.parametrize("scalar_bounds", [True, False])
def test_clamp(element_type: ElementType, scalar_bounds: bool, rng: np.random.Generator) -> None:
    special = special_values(element_type)
    x = np.concatenate([special, random_values(element_type, 50, rng)])
    name, count = element_type.name.lower(), len(x)
    bound = f"{name}[]" if scalar_bounds else f"{name}[{count}]"
    text = f"""ENTRY e {{
      low = {bound} parameter(0)
      x = {name}[{count}] parameter(1)
      high = {bound} parameter(2)
      ROOT r = {name}[{count}] clamp(low, x, high) }}"""
    for _ in range(3):
        low, high = (rng.choice(special, () if scalar_bounds else count) for _ in range(2))
        check(text, np.asarray(low), x, np.asarray(high))


@pytest.mark.parametrize(("real", "pair"), [("f32", "c64"), ("f64", "c128")])
def test_complex_parts(real: str, pair: str) -> None:
    special = special_values(E[real.upper()])
    a, b = (grid.ravel() for grid in np.meshgrid(special, special))
    text = f"""ENTRY e {{
      a = {real}[{len(a)}] parameter(0)
      b = {real}[{len(a)}] parameter(1)
      z = {pair}[{len(a)}] complex(a, b)
      r = {real}[{len(a)}] real(z)
      i = {real}[{len(a)}] imag(z)
      ROOT t = ({real}[{len(a)}], {real}[{len(a)}]) tuple(r, i) }}"""
    check(text, a, b)
