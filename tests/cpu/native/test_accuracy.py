"""Native tiles where one rounding too many once showed: against wider arithmetic, in units in the last place."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Context


def test_reciprocal_square_root_of_doubles_rounds_once(context: Context, rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(1, 4, 4000), 2.0 ** rng.uniform(-1000, 1000, 1000)])
    text = "ENTRY main {\n  x = f64[5000] parameter(0)\n  ROOT y = f64[5000] rsqrt(x)\n}"
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    exact = 1 / np.sqrt(x.astype(np.longdouble))
    assert np.max(np.abs(ours - exact) / np.spacing(ours)) < 0.505


def test_special_values_of_the_reciprocal_square_root(context: Context) -> None:
    x = np.array([0.0, -0.0, np.inf, -1.0, np.nan, 5e-324, 1.7e308])
    text = "ENTRY main {\n  x = f64[7] parameter(0)\n  ROOT y = f64[7] rsqrt(x)\n}"
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    np.testing.assert_array_equal(ours[:5], [np.inf, -np.inf, 0.0, np.nan, np.nan])
    np.testing.assert_allclose(ours[5:], [1 / math.sqrt(5e-324), 1 / math.sqrt(1.7e308)], rtol=1e-15)


_EXPM1 = 1.8


def _bound_of_tanh(x: np.ndarray) -> np.ndarray:
    """Of e / (e + 2), e = expm1(2 |x|), whose error is carried over; the sum and the quotient are rounded."""
    e = np.expm1(2 * np.minimum(np.abs(x), 22))
    y = e / (e + 2)
    carried = _EXPM1 * np.spacing(e) * 2 / (e + 2) ** 2
    rounded = 0.5 * np.spacing(e + 2) * y / (e + 2)
    # Where y is a power of two, what is exact may lie below it, and have the smaller unit.
    return (carried + rounded) / np.spacing(np.nextafter(y, 0)) + 0.5


_DOUBLES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], float | Callable[[np.ndarray], np.ndarray]]] = {
    # By name: the opcode, the function in a wider type, and what it may be off by in units in the last place.
    "exp": ("exponential", np.exp, 0.9),
    "expm1": ("exponential-minus-one", np.expm1, _EXPM1),
    "log": ("log", np.log, 0.9),
    "log1p": ("log-plus-one", np.log1p, 0.9),
    "logistic": ("logistic", lambda x: 1 / (1 + np.exp(-x)), 2.0),
    "tanh": ("tanh", np.tanh, _bound_of_tanh),
}
_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, -5e-324, 1e-310, -1e-310, 1e308, -1e308, 1.0, -1.0, 0.5, -0.5]
_SPECIAL += [700.0, -700.0, 709.7, 709.8, -745.1, -745.2, -746.0, 2.2250738585072014e-308, 40.0, -40.0, 22.0, -22.0]


@pytest.mark.parametrize("name", _DOUBLES)
def test_functions_of_doubles(name: str, context: Context, rng: np.random.Generator) -> None:
    opcode, function, bound = _DOUBLES[name]
    x = np.concatenate(
        [
            _SPECIAL,
            rng.standard_normal(20000),
            rng.standard_normal(5000) * 1e-9,
            rng.uniform(-740, 709, 20000),
            rng.uniform(0.4, 2.1, 20000),
            np.exp(rng.uniform(-700, 700, 5000)),
        ]
    )
    text = f"ENTRY main {{\n  x = f64[{x.size}] parameter(0)\n  ROOT y = f64[{x.size}] {opcode}(x)\n}}"
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    with np.errstate(all="ignore"):
        exact = function(x.astype(np.longdouble))
        expected = exact.astype(np.float64)
        error = np.abs(ours - exact) / np.spacing(np.abs(expected))
        bounds = np.broadcast_to(bound(x) if callable(bound) else bound, x.shape)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(ours[~finite], expected[~finite])
    # A quotient by more than doubles hold is zero.
    finite &= (name != "logistic") | (x > -709)
    np.testing.assert_array_less(error[finite], bounds[finite])
    np.testing.assert_array_equal(np.signbit(ours[expected == 0]), np.signbit(expected[expected == 0]))


_SUM = """
add {
  a = f64[] parameter(0)
  b = f64[] parameter(1)
  ROOT c = f64[] add(a, b)
}
ENTRY main {
  x = f64[4,100001] parameter(0)
  zero = f64[] constant(0)
  ROOT y = f64[4] reduce(x, zero), dimensions={1}, to_apply=add
}"""


def test_a_long_sum_of_doubles_loses_next_to_nothing(context: Context, rng: np.random.Generator) -> None:
    x = rng.uniform(0.5, 1.5, (4, 100001))
    x[1] *= rng.choice([-1.0, 1.0], 100001)
    x[2, 50000] = np.inf
    x[3, 7] = np.nan
    with compile(context, _SUM) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    for row in (0, 1):
        assert abs(ours[row] - math.fsum(x[row])) <= np.spacing(math.fsum(np.abs(x[row])))
    assert ours[2] == np.inf
    assert np.isnan(ours[3])


def test_what_is_left_beside_the_lanes_of_a_sum_rounds_it_once(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((200, 1015)) + 0.5
    text = _SUM.replace("4,100001", "200,1015").replace("f64[4]", "f64[200]")
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    errors = [abs(math.fsum([*row, -y])) / np.spacing(math.fsum(np.abs(row))) for row, y in zip(x, ours, strict=True)]
    assert np.mean(errors) < 0.45


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 300, 30011])
def test_dot_products(context: Context, rng: np.random.Generator, dtype: type, count: int) -> None:
    """Of two vectors, in units in the last place of the sum of magnitudes; infinities and NaN as they are."""
    x, y = ((rng.standard_normal((40, count)) + 0.5).astype(dtype) for _ in range(2))
    x[0, 0], x[1, -1] = np.inf, np.nan
    name = {np.float32: "f32", np.float64: "f64"}[dtype]
    text = f"""ENTRY main {{
      x = {name}[40,{count}] parameter(0)
      y = {name}[40,{count}] parameter(1)
      ROOT z = {name}[40] dot(x, y), lhs_batch_dims={{0}}, rhs_batch_dims={{0}},
        lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
    }}"""
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        ours = get(run(executable, put(memory, x), put(memory, y))[0])
    assert ours[0] == np.copysign(np.inf, y[0, 0])
    assert np.isnan(ours[1])
    products = x[2:].astype(np.longdouble) * y[2:].astype(np.longdouble)
    spacing = np.spacing(np.abs(products).sum(1).astype(dtype))
    errors = np.abs(ours[2:] - products.sum(1)) / spacing
    # Half a unit for each addition of the longest chain: along a lane of sixteen, of the lanes, of what is left beside
    # them; the products' own are one together. Blocks of a long sum are added up with what rounding takes from them.
    additions = min(count // 16, 16) + 4 + count % 16
    assert errors.max() <= 1 + additions / 2
    assert errors.mean() <= 0.45


_FUNCTIONS = {
    "exponential": np.exp,
    "logistic": lambda x: np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x))),
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "erfc": np.vectorize(math.erfc, otypes=[np.float64]),
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_elementary_functions_of_floats(name: str, context: Context, rng: np.random.Generator) -> None:
    """Of any bits, of ordinary numbers and where results are subnormal, in units in the last place of the result."""
    bits = rng.integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    ordinary = rng.uniform(-20, 20, 200_000).astype(np.float32)
    small = rng.uniform(-104, -86, 20_000).astype(np.float32)
    near = rng.uniform(-4.5, 4.5, 200_000).astype(np.float32)
    positive = (2.0 ** rng.uniform(-149, 128, 200_000)).astype(np.float32)
    x = np.concatenate(
        [bits, ordinary, near, positive, small, np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 88.72284, 88.7229])]
    )
    operation = 'custom-call(x), custom_call_target="flagos.erfc"' if name == "erfc" else f"{name}(x)"
    text = f"ENTRY main {{\n  x = f32[{x.size}] parameter(0)\n  ROOT y = f32[{x.size}] {operation}\n}}"
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    with np.errstate(all="ignore"):
        exact = _FUNCTIONS[name](x.astype(np.float64))
        rounded = exact.astype(np.float32)
    finite = np.isfinite(rounded)
    np.testing.assert_array_equal(ours[~finite], rounded[~finite])
    np.testing.assert_array_equal(np.signbit(ours[exact == 0]), np.signbit(rounded[exact == 0]))
    errors = np.abs(ours[finite] - exact[finite]) / np.spacing(np.abs(rounded[finite])).astype(np.float64)
    assert errors.max() <= 1.05


def test_a_quotient_that_is_the_logistic_function(context: Context, rng: np.random.Generator) -> None:
    """As frameworks write it, also where exp(-x) overflows."""
    x = np.concatenate([rng.uniform(-110, 110, 50_000), rng.standard_normal(50_000), [np.inf, -np.inf]]).astype("f4")
    text = f"""ENTRY main {{
  x = f32[{x.size}] parameter(0)
  one = f32[] constant(1)
  ones = f32[{x.size}] broadcast(one), dimensions={{}}
  minus = f32[{x.size}] negate(x)
  e = f32[{x.size}] exponential(minus)
  sum = f32[{x.size}] add(ones, e)
  ROOT y = f32[{x.size}] divide(ones, sum)
}}"""
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    exact = _FUNCTIONS["logistic"](x.astype(np.float64))
    errors = np.abs(ours - exact) / np.spacing(np.abs(exact.astype(np.float32))).astype(np.float64)
    assert errors.max() <= 1.05


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1037])
def test_elementary_functions_of_any_number_of_elements(count: int, context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal(count).astype(np.float32)
    text = f"ENTRY main {{\n  x = f32[{count}] parameter(0)\n  ROOT y = f32[{count}] tanh(x)\n}}"
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    np.testing.assert_allclose(ours, np.tanh(x.astype(np.float64)), rtol=1.3e-7)


def test_clamp_with_nan_anywhere(context: Context) -> None:
    """The bound below, then the one above, as maximum and minimum have them."""
    values = np.float32([-np.inf, -2, 0, 1, np.inf, np.nan])
    low, x, high = (a.reshape(-1).copy() for a in np.meshgrid(values, values, values))
    text = """ENTRY main {
  low = f32[216] parameter(0)
  x = f32[216] parameter(1)
  high = f32[216] parameter(2)
  ROOT y = f32[216] clamp(low, x, high)
}"""
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        ours = get(run(executable, put(memory, low), put(memory, x), put(memory, high))[0])
    np.testing.assert_array_equal(ours, np.minimum(np.maximum(low, x), high))
