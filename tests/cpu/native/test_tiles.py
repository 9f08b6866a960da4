"""Native tiles: every operation and element type that a fused loop may hold, against float64 or stock XLA."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import pytest
import torch
from jaxlib import _hlo

from cpu.native.harness import compile
from flagos_backend.importer.export import export_module
from flagos_backend.ir.attributes import NONE, CompareAttributes, DimensionsAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.elementwise import COMBINES, ELEMENTWISE
from flagos_backend.ir.functions import FUNCTIONS_OF_TWO
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape
from plugin_abi.host import Context
from programs import run_on_xla
from support.native_modules import E, assert_same_bits, compile_module, make, run

_INTEGERS = [t for t in E if t.is_integer and t.bits >= 8]
_FLOATS = [E.F16, E.BF16, E.F32, E.F64]


def apply(
    context: Context,
    opcode: Opcode,
    types: Sequence[E],
    arguments: Sequence[np.ndarray],
    attributes: object = NONE,
    result: E | None = None,
) -> tuple[np.ndarray, bytes]:
    """``opcode`` on arrays through the device, and its HLO."""
    builder = Builder("entry")
    operands = [builder.parameter(ArrayShape(t, a.shape)) for t, a in zip(types, arguments, strict=True)]
    shape = None if result is None else ArrayShape(result, arguments[0].shape)
    executable, hlo = compile_module(context, builder, builder.add(opcode, operands, attributes, shape=shape))
    return run(context, executable, arguments), hlo


def units(ours: np.ndarray, exact: np.ndarray) -> float:
    """The largest error in units of the last place of ``exact`` rounded to the type of ``ours``."""
    with np.errstate(all="ignore"):
        rounded = exact.astype(ours.dtype)
    a, b = ours.astype(np.float64), rounded.astype(np.float64)
    finite = np.isfinite(b)
    assert np.array_equal(np.isnan(a), np.isnan(b))
    assert np.array_equal(a[~finite & ~np.isnan(b)], b[~finite & ~np.isnan(b)])
    info = ml_dtypes.finfo(ours.dtype)
    with np.errstate(all="ignore"):
        spacing = np.maximum(np.abs(b) * float(info.eps), float(info.smallest_subnormal))
    return float(np.max(np.abs(a - exact)[finite] / spacing[finite], initial=0.0))


_FUNCTIONS: dict[Opcode, Callable[[torch.Tensor], torch.Tensor]] = {
    Opcode.CBRT: lambda x: torch.sign(x) * torch.abs(x) ** (1 / 3),
    Opcode.EXP: torch.exp,
    Opcode.EXPM1: torch.expm1,
    Opcode.LOG: torch.log,
    Opcode.LOG1P: torch.log1p,
    Opcode.LOGISTIC: torch.sigmoid,
    Opcode.TANH: torch.tanh,
    Opcode.SIN: torch.sin,
    Opcode.COS: torch.cos,
    Opcode.TAN: torch.tan,
    Opcode.ASIN: torch.asin,
    Opcode.ACOS: torch.acos,
    Opcode.ASINH: torch.asinh,
    Opcode.ACOSH: torch.acosh,
    Opcode.ATANH: torch.atanh,
    Opcode.SINH: torch.sinh,
    Opcode.COSH: torch.cosh,
    Opcode.ERF: torch.erf,
    Opcode.ERFC: torch.erfc,
    Opcode.SQRT: torch.sqrt,
    Opcode.RSQRT: torch.rsqrt,
    Opcode.CEIL: torch.ceil,
    Opcode.FLOOR: torch.floor,
    Opcode.ROUND_EVEN: torch.round,
    Opcode.ROUND_AFZ: lambda x: torch.sign(x) * torch.floor(torch.abs(x) + 0.5),
    Opcode.SIGN: lambda x: torch.where(torch.isnan(x) | (x == 0), x, torch.sign(x)),
    Opcode.ABS: torch.abs,
    Opcode.NEGATE: torch.neg,
}


@pytest.mark.parametrize("element_type", [E.F16, E.BF16, E.F32], ids=lambda t: t.name)
@pytest.mark.parametrize("opcode", _FUNCTIONS, ids=str)
def test_function_of_one_float(opcode: Opcode, element_type: E, context: Context, rng: np.random.Generator) -> None:
    x = make(element_type, rng)
    ours, _ = apply(context, opcode, [element_type], [x])
    exact = _FUNCTIONS[opcode](torch.from_numpy(x.astype(np.float64))).numpy()
    # Half a unit is perfect rounding; libm's functions of a float are allowed one and a half.
    assert units(ours, exact) <= 1.5


@pytest.mark.parametrize("opcode", _FUNCTIONS, ids=str)
def test_function_of_one_double(opcode: Opcode, context: Context, rng: np.random.Generator) -> None:
    x = make(E.F64, rng)
    x = np.where(np.abs(x) > 700, x / 1e4, x)  # torch's cosh overflows before the result does
    ours, _ = apply(context, opcode, [E.F64], [x])
    exact = _FUNCTIONS[opcode](torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(ours, exact, rtol=1e-14, atol=1e-300)


_EXACT_FLOAT = [Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY, Opcode.DIVIDE, Opcode.REMAINDER]


@pytest.mark.parametrize("element_type", _FLOATS, ids=lambda t: t.name)
@pytest.mark.parametrize("opcode", _EXACT_FLOAT, ids=str)
def test_float_arithmetic_rounds_once(
    opcode: Opcode, element_type: E, context: Context, rng: np.random.Generator
) -> None:
    x, y = make(element_type, rng), np.roll(make(element_type, rng), 5)
    ours, _ = apply(context, opcode, [element_type] * 2, [x, y])
    wide = np.float64 if element_type is E.F64 else np.float32
    functions = {
        Opcode.ADD: np.add,
        Opcode.SUBTRACT: np.subtract,
        Opcode.MULTIPLY: np.multiply,
        Opcode.DIVIDE: np.divide,
        Opcode.REMAINDER: np.fmod,
    }
    with np.errstate(all="ignore"):
        expected = functions[opcode](x.astype(wide), y.astype(wide)).astype(x.dtype)
    assert_same_bits(ours, expected)


def _integer_operations() -> list[tuple[Opcode, E]]:
    skipped = {Opcode.CONVERT, Opcode.BITCAST_CONVERT, Opcode.COMPARE, Opcode.SELECT, Opcode.CLAMP, Opcode.POWER}
    signed_only = {Opcode.ABS, Opcode.SIGN}  # as StableHLO has it
    pairs = [
        (o, t)
        for o, types in ELEMENTWISE.items()
        for t in sorted(types)
        if not t.is_float and o not in skipped and not (o in signed_only and t.is_unsigned)
    ]
    return [*pairs, *((Opcode.CLAMP, t) for t in _INTEGERS)]


@pytest.mark.parametrize(("opcode", "element_type"), _integer_operations(), ids=lambda p: getattr(p, "name", str(p)))
def test_integer_operation_equals_xla(
    opcode: Opcode, element_type: E, context: Context, rng: np.random.Generator
) -> None:
    unary = {Opcode.ABS, Opcode.NEGATE, Opcode.SIGN, Opcode.NOT, Opcode.POPCNT, Opcode.CLZ}
    count = 1 if opcode in unary else 3 if opcode is Opcode.CLAMP else 2
    arguments = [np.roll(make(element_type, rng), 7 * i) for i in range(count)]
    if opcode is Opcode.CLAMP:
        arguments[0], arguments[2] = np.minimum(arguments[0], arguments[2]), np.maximum(arguments[0], arguments[2])
    if str(opcode).startswith("shift"):
        arguments[1] = (arguments[1].astype(np.uint64) % (element_type.bits + 3)).astype(arguments[1].dtype)
    ours, hlo = apply(context, opcode, [element_type] * count, arguments)
    np.testing.assert_array_equal(ours, run_on_xla(hlo, arguments)[0])


@pytest.mark.parametrize("element_type", _INTEGERS, ids=lambda t: t.name)
def test_integer_power_wraps(element_type: E, context: Context, rng: np.random.Generator) -> None:
    x = make(element_type, rng)
    y = rng.integers(0, 20, x.size).astype(x.dtype)
    ours, _ = apply(context, Opcode.POWER, [element_type] * 2, [x, y])
    expected = [pow(int(a), int(b)) % 2**element_type.bits for a, b in zip(x, y, strict=True)]
    np.testing.assert_array_equal(ours.astype(object) % 2**element_type.bits, np.array(expected, object))


_FUNCTIONS_OF_TWO: dict[Opcode, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Opcode.POWER: torch.pow,
    Opcode.ATAN2: torch.atan2,
    Opcode.COPYSIGN: torch.copysign,
}


@pytest.mark.parametrize("element_type", [E.F16, E.BF16, E.F32, E.F64], ids=lambda t: t.name)
@pytest.mark.parametrize("opcode", [f for f in FUNCTIONS_OF_TWO if f not in _EXACT_FLOAT], ids=str)
def test_function_of_two_floats(opcode: Opcode, element_type: E, context: Context, rng: np.random.Generator) -> None:
    x, y = make(element_type, rng), np.roll(make(element_type, rng), 5)
    ours, _ = apply(context, opcode, [element_type] * 2, [x, y])
    exact = _FUNCTIONS_OF_TWO[opcode](*(torch.from_numpy(a.astype(np.float64)) for a in (x, y))).numpy()
    assert units(ours, exact) <= 1.5
    real = ~np.isnan(exact)
    np.testing.assert_array_equal(np.signbit(ours.astype(np.float64)[real]), np.signbit(exact[real]))


@pytest.mark.parametrize("element_type", [E.PRED, *_INTEGERS, *_FLOATS], ids=lambda t: t.name)
@pytest.mark.parametrize("direction", Comparison)
def test_compare(direction: Comparison, element_type: E, context: Context, rng: np.random.Generator) -> None:
    x, y = make(element_type, rng), np.roll(make(element_type, rng), 1)
    y[::4] = x[::4]
    ours, _ = apply(context, Opcode.COMPARE, [element_type] * 2, [x, y], CompareAttributes(direction))
    function = getattr(
        np,
        {"EQ": "equal", "NE": "not_equal", "GE": "greater_equal", "GT": "greater", "LE": "less_equal", "LT": "less"}[
            direction
        ],
    )
    np.testing.assert_array_equal(ours, function(x, y))


@pytest.mark.parametrize("element_type", _FLOATS, ids=lambda t: t.name)
def test_total_order(element_type: E, context: Context, rng: np.random.Generator) -> None:
    x = make(element_type, rng)
    y = np.roll(x, 1)
    attributes = CompareAttributes(Comparison.LT, ComparisonOrder.TOTAL)
    ours, _ = apply(context, Opcode.COMPARE, [element_type] * 2, [x, y], attributes)

    def key(value: np.floating) -> tuple[int, float, int]:
        sign = -1 if np.signbit(value) else 1
        return (sign * 2 if np.isnan(value) else 0, 0.0 if np.isnan(value) else float(value), sign)

    np.testing.assert_array_equal(ours, [key(a) < key(b) for a, b in zip(x, y, strict=True)])


@pytest.mark.parametrize("element_type", [E.PRED, *_INTEGERS, *_FLOATS], ids=lambda t: t.name)
def test_select(element_type: E, context: Context, rng: np.random.Generator) -> None:
    predicate, x, y = make(E.PRED, rng), make(element_type, rng), np.roll(make(element_type, rng), 3)
    ours, _ = apply(context, Opcode.SELECT, [E.PRED, element_type, element_type], [predicate, x, y])
    assert_same_bits(ours, np.where(predicate, x, y))


@pytest.mark.parametrize("element_type", [E.PRED, *_INTEGERS, *_FLOATS], ids=lambda t: t.name)
@pytest.mark.parametrize("n", [1, 64, 197])
def test_select_of_numbers(element_type: E, n: int, context: Context, rng: np.random.Generator) -> None:
    predicate, values = rng.integers(0, 2, n).astype(bool), make(element_type, rng)
    x, y = (np.asarray(value) for value in rng.choice(values, 2))
    name = element_type.name.lower()
    executable = compile(
        context,
        f"""ENTRY e {{ p = pred[{n}] parameter(0)
          x = {name}[] parameter(1)
          y = {name}[] parameter(2)
          r = {name}[{n}] broadcast(x), dimensions={{}}
          s = {name}[{n}] broadcast(y), dimensions={{}}
          ROOT z = {name}[{n}] select(p, r, s) }}""",
    )
    assert_same_bits(run(context, executable, [predicate, x, y]), np.where(predicate, x, y))


def _conversions() -> list[tuple[E, E]]:
    types = [E.PRED, *_INTEGERS, *_FLOATS]
    halves = (E.F16, E.BF16)
    exact = (E.F32, E.PRED, *halves)
    return [
        (a, b)
        for a in types
        for b in types
        if a != b and (b not in halves or a in exact or (a.bits <= 16 and not a.is_float))
    ]


@pytest.mark.parametrize(("source", "result"), _conversions(), ids=lambda t: t.name)
def test_convert_equals_xla(source: E, result: E, context: Context, rng: np.random.Generator) -> None:
    x = make(source, rng)
    ours, hlo = apply(context, Opcode.CONVERT, [source], [x], result=result)
    assert_same_bits(ours, run_on_xla(hlo, [x])[0])


@pytest.mark.parametrize(("source", "result"), [(E.F32, E.U32), (E.U64, E.F64), (E.BF16, E.S16), (E.S8, E.U8)])
def test_bitcast(source: E, result: E, context: Context, rng: np.random.Generator) -> None:
    x = make(source, rng)
    ours, _ = apply(context, Opcode.BITCAST_CONVERT, [source], [x], result=result)
    np.testing.assert_array_equal(ours.view(np.uint8), x.view(np.uint8))


_DIMENSIONS = [(0,), (1,), (2,), (0, 2), (0, 1, 2)]
_NUMPY = {
    Opcode.ADD: np.add,
    Opcode.MULTIPLY: np.multiply,
    Opcode.MAXIMUM: np.maximum,
    Opcode.MINIMUM: np.minimum,
    Opcode.AND: np.bitwise_and,
    Opcode.OR: np.bitwise_or,
    Opcode.XOR: np.bitwise_xor,
}


def _reductions() -> list[tuple[Opcode, E]]:
    bitwise = (Opcode.AND, Opcode.OR, Opcode.XOR)
    wide = (Opcode.ADD, Opcode.MULTIPLY)
    types = [*_INTEGERS, *_FLOATS]
    return [
        (o, t)
        for o in sorted(COMBINES)
        for t in types
        if not (t.is_float and o in bitwise) and not (t in (E.F16, E.BF16) and o in wide)
    ]


@pytest.mark.parametrize("dimensions", _DIMENSIONS, ids=str)
@pytest.mark.parametrize(("combine", "element_type"), _reductions(), ids=lambda p: getattr(p, "name", str(p)))
def test_reduction(
    combine: Opcode, element_type: E, dimensions: tuple[int, ...], context: Context, rng: np.random.Generator
) -> None:
    x = make(element_type, rng, 7 * 33 * 65).reshape(7, 33, 65)
    if element_type.is_float:
        x = np.where(np.isfinite(x.astype(np.float64)), x, 1).astype(x.dtype)
        if combine is Opcode.MULTIPLY:
            x = (1 + x.astype(np.float64) / (np.abs(x.astype(np.float64)) + 1) * 1e-2).astype(x.dtype)
    reducer = Builder("reducer")
    scalar = ArrayShape(element_type)
    body = reducer.build(reducer.add(combine, [reducer.parameter(scalar), reducer.parameter(scalar)]))
    builder = Builder("entry")
    array = builder.parameter(ArrayShape(element_type, x.shape))
    initial = np.asarray(3 if not element_type.is_float else 1.5, x.dtype)
    start = builder.parameter(scalar)
    root = builder.add(Opcode.REDUCE, [array, start], DimensionsAttributes(dimensions), called=[body])
    executable, _ = compile_module(context, builder, root)
    ours = run(context, executable, [x, initial])
    with np.errstate(all="ignore"):
        if element_type.is_float and combine in (Opcode.ADD, Opcode.MULTIPLY):
            exact = _NUMPY[combine](_NUMPY[combine].reduce(x.astype(np.float64), axis=dimensions), float(initial))
            # A sum's error is relative to the sum of magnitudes, a product's grows with the length of a chain.
            magnitude = np.add.reduce(np.abs(x.astype(np.float64)), axis=dimensions) if combine is Opcode.ADD else exact
            steps = 1 if combine is Opcode.ADD else x.size / 16
            bound = (np.abs(magnitude) + 1) * steps * (1e-15 if element_type is E.F64 else 5e-7)
            assert np.all(np.abs(ours - exact) <= bound)
        else:
            expected = _NUMPY[combine](_NUMPY[combine].reduce(x, axis=dimensions, dtype=x.dtype), initial)
            assert_same_bits(ours, np.asarray(expected, x.dtype))


@pytest.mark.parametrize("element_type", _FLOATS, ids=lambda t: t.name)
def test_reduction_of_maximum_propagates_nan(element_type: E, context: Context, rng: np.random.Generator) -> None:
    x = make(element_type, rng, 40).reshape(4, 10)
    x[0, 3] = np.nan
    reducer = Builder("reducer")
    scalar = ArrayShape(element_type)
    body = reducer.build(reducer.add(Opcode.MAXIMUM, [reducer.parameter(scalar), reducer.parameter(scalar)]))
    for dimension in (0, 1):
        builder = Builder("entry")
        array, start = builder.parameter(ArrayShape(element_type, x.shape)), builder.parameter(scalar)
        root = builder.add(Opcode.REDUCE, [array, start], DimensionsAttributes((dimension,)), called=[body])
        executable, _ = compile_module(context, builder, root)
        ours = run(context, executable, [x, np.asarray(-np.inf, x.dtype)])
        assert_same_bits(ours, np.maximum.reduce(x, axis=dimension))


def test_trigonometric_functions_of_huge_arguments(context: Context) -> None:
    x = np.array([1e5, -1e6, 3e7, 1e20, 3.4e38, 99999.0], np.float32)
    for opcode in (Opcode.SIN, Opcode.COS, Opcode.TAN):
        ours, _ = apply(context, opcode, [E.F32], [x])
        function = {Opcode.SIN: math.sin, Opcode.COS: math.cos, Opcode.TAN: math.tan}[opcode]
        assert units(ours, np.array([function(float(v)) for v in x])) <= 1.5


def test_stock_xla_reads_what_these_tests_build() -> None:
    builder = Builder("entry")
    x = builder.parameter(ArrayShape(E.F32, (2,)))
    module = Module("tiles", builder.build(builder.add(Opcode.ADD, [x, x])))
    assert "add" in _hlo.HloModule.from_serialized_hlo_module_proto(export_module(module)).to_string()
