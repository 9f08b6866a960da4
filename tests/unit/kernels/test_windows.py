"""Reduce-window and select-and-scatter against stock XLA: random windows, any reducer, cumulative patterns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from flagos_backend.ir.attributes import WindowDimension
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.windows import window_count
from programs import hlo_bytes
from support.against_xla import check, check_function, check_hlo, hlo_of_text, run_on_backend
from support.numbers import random_values
from support.windows import window_text

E = ElementType
TYPES = (E.PRED, E.S8, E.U8, E.S16, E.U16, E.S32, E.U32, E.S64, E.U64, E.F16, E.BF16, E.F32, E.F64, E.C64, E.C128)
TOLERANCE = {E.F16: 2e-2, E.BF16: 1e-1, E.F32: 1e-5, E.C64: 1e-5}


def random_window(size: int, rng: np.random.Generator, dilated_base: bool) -> WindowDimension:
    return WindowDimension(
        size=int(rng.choice([1, 2, 3, 4, 9, 11, 17])),
        stride=int(rng.integers(1, 4)),
        padding_low=int(rng.integers(0, 12)),
        padding_high=int(rng.integers(0, 12)),
        window_dilation=int(rng.integers(1, 3)),
        base_dilation=int(rng.integers(1, 3)) if dilated_base else 1,
    )


REDUCERS = {
    "add": "ROOT r = s32[] add(a, b)",
    "maximum": "ROOT r = s32[] maximum(b, a)",
    "minimum": "ROOT r = s32[] minimum(a, b)",
    "multiply": "ROOT r = s32[] multiply(a, b)",
    # Associative, and not one operation: addition of what lies above a constant.
    "shifted add": "c = s32[] constant(5)\n d = s32[] subtract(b, c)\n ROOT r = s32[] add(a, d)",
}


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("number", range(10))
def test_random_windows(reducer: str, number: int, rng: np.random.Generator) -> None:
    rank = int(rng.integers(1, 4))
    dims = tuple(int(d) for d in rng.integers(1, 12, rank))
    window = tuple(random_window(size, rng, dilated_base=number % 2 == 0) for size in dims)
    result = tuple(window_count(size, w) for size, w in zip(dims, window, strict=True))
    shape, result_shape = (f"s32[{','.join(map(str, d))}]" for d in (dims, result))
    text = f"""
reduce {{
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  {REDUCERS[reducer]}
}}
ENTRY e {{
  x = {shape} parameter(0)
  i = s32[] parameter(1)
  ROOT r = {result_shape} reduce-window(x, i), {window_text(window)}, to_apply=reduce
}}"""
    check(text, rng.integers(-9, 9, dims).astype(np.int32), np.array(rng.integers(-9, 9), np.int32))


FAR = 10**9
# No work is proportional to any of these values.
GREAT = {
    "base dilation": (5, WindowDimension(2, FAR, 0, 1, base_dilation=FAR)),
    "size": (20, WindowDimension(FAR + 1, 1, FAR // 2, FAR // 2)),
    "many of one dilation": (40, WindowDimension(12, 10**12, base_dilation=10**12, window_dilation=2 * 10**12)),
    "window dilation": (4, WindowDimension(2, 1, FAR // 2, FAR // 2 + 1, window_dilation=FAR)),
    "both dilations": (9, WindowDimension(3, FAR, window_dilation=999_999_937, base_dilation=FAR + 7)),
    "common divisor": (40, WindowDimension(60, 6 * FAR, 9 * FAR, 9 * FAR, 4 * FAR, 6 * FAR)),
    "padding": (4, WindowDimension(1, FAR, FAR, FAR)),
    "negative padding": (6, WindowDimension(2, FAR, -FAR, -FAR, base_dilation=FAR, window_dilation=FAR)),
    "least common multiple": (3, WindowDimension(2**31, 2**40, 2**40, 2**40, 2**31 - 1, 2**31 + 11)),
}


def elements_of_windows(size: int, w: WindowDimension) -> list[list[int]]:
    """By asking each element in which place it lies."""
    found = []
    for number in range(window_count(size, w)):
        places = [e * w.base_dilation + w.padding_low - number * w.stride for e in range(size)]
        inside = [p % w.window_dilation == 0 and 0 <= p // w.window_dilation < w.size for p in places]
        found.append([e for e in range(size) if inside[e]])
    return found


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("name", GREAT)
def test_great_values(name: str, reducer: str, rng: np.random.Generator) -> None:
    size, w = GREAT[name]
    windows = elements_of_windows(size, w)
    x = rng.integers(-3, 9, size).astype(np.int32)
    text = f"""
reduce {{
  a = s32[] parameter(0)
  b = s32[] parameter(1)
  {REDUCERS[reducer]}
}}
ENTRY e {{
  x = s32[{size}] parameter(0)
  i = s32[] parameter(1)
  ROOT r = s32[{len(windows)}] reduce-window(x, i), {window_text((w,))}, to_apply=reduce
}}"""
    function = {
        "add": lambda a, b: a + b,
        "maximum": max,
        "minimum": min,
        "multiply": lambda a, b: a * b,
        "shifted add": lambda a, b: a + b - 5,
    }[reducer]
    expected = [functools.reduce(function, [int(x[e]) for e in window], 2) for window in windows]
    (ours,) = run_on_backend(hlo_of_text(text), [x, np.int32(2)])
    np.testing.assert_array_equal(ours, np.array(expected).astype(np.int32))


@pytest.mark.parametrize("name", ["size", "padding", "base dilation"])
def test_selections_of_great_values(name: str, rng: np.random.Generator) -> None:
    size, w = GREAT[name]
    windows = elements_of_windows(size, w)
    x, source = rng.permutation(size).astype(np.int32), rng.integers(1, 9, len(windows)).astype(np.int32)
    text = f"""
ge {{ a = s32[] parameter(0) b = s32[] parameter(1) ROOT c = pred[] compare(a, b), direction=GE }}
add {{ a = s32[] parameter(0) b = s32[] parameter(1) ROOT c = s32[] add(a, b) }}
ENTRY e {{
  x = s32[{size}] parameter(0)
  s = s32[{len(windows)}] parameter(1)
  i = s32[] constant(0)
  ROOT r = s32[{size}] select-and-scatter(x, s, i), {window_text((w,))}, select=ge, scatter=add
}}"""
    expected = np.zeros(size, np.int32)
    for window, value in zip(windows, source, strict=True):
        if window:
            expected[max(window, key=lambda e: x[e])] += value
    (ours,) = run_on_backend(hlo_of_text(text), [x, source])
    np.testing.assert_array_equal(ours, expected)


CUMULATIVE = [
    (operation, element_type)
    for operation in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin)
    for element_type in TYPES
    if element_type is not E.PRED and not (element_type.is_complex and operation in (lax.cummax, lax.cummin))
]


@pytest.mark.parametrize(
    ("operation", "element_type"), CUMULATIVE, ids=lambda v: getattr(v, "__name__", None) or v.name
)
@pytest.mark.parametrize("reverse", [False, True])
def test_cumulative_operations(
    element_type: ElementType, operation: Callable[..., Any], reverse: bool, rng: np.random.Generator
) -> None:
    x = random_values(element_type, 3 * 21, rng).reshape(3, 21)
    if element_type.is_float or element_type.is_complex:
        x = (x / np.abs(x).max()).astype(x.dtype)
    with jax.enable_x64(True):
        hlo = hlo_bytes(lambda x: operation(x, axis=1, reverse=reverse), x)
    check_hlo(hlo, (x,), TOLERANCE.get(element_type, 1e-12))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_cumulative_logsumexp_of_infinities(dtype: type, reverse: bool, rng: np.random.Generator) -> None:
    """Against sums of exponentials, in double."""
    x = (rng.standard_normal((4, 70)) * 3).astype(dtype)
    x[0, :3], x[1, 30], x[2, 5], x[2, 60], x[3, 40] = -np.inf, np.inf, -np.inf, np.nan, -np.inf
    with jax.enable_x64(True):
        hlo = hlo_bytes(lambda x: lax.cumlogsumexp(x, axis=1, reverse=reverse), x)
    (ours,) = run_on_backend(hlo, [x])
    order = slice(None, None, -1 if reverse else 1)
    with np.errstate(all="ignore"):
        exact = np.log(np.cumsum(np.exp(x[:, order].astype(np.float64)), axis=1))[:, order]
    precision = 4 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=precision, atol=precision * 70)


def test_cumulative_logsumexp_and_nan(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 50)).astype(np.float32)
    check_function(lambda x: lax.cumlogsumexp(x, axis=1), x, tolerance=1e-5)
    x[0, 20] = np.nan
    check_function(lambda x: (lax.cummax(x, axis=1), lax.cummin(x, axis=0), lax.cumsum(x, axis=1)), x, tolerance=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_running_sums_of_many_elements(dtype: type, reverse: bool, rng: np.random.Generator) -> None:
    """As many that a table of the places of all windows has no room in memory, within a few units of the exact sums."""
    count = 200_001
    x = (rng.standard_normal((2, count)) + 0.5).astype(dtype)
    if dtype is np.complex128:
        x += 1j * rng.standard_normal((2, count))
    with jax.enable_x64(True):
        hlo = hlo_bytes(lambda x: lax.cumsum(x, axis=1, reverse=reverse), x)
    (ours,) = run_on_backend(hlo, [x])
    wide = np.clongdouble if dtype is np.complex128 else np.longdouble
    order = slice(None, None, -1 if reverse else 1)
    exact = np.cumsum(x[:, order].astype(wide), axis=1)[:, order]
    size = np.cumsum(np.abs(x[:, order]), axis=1)[:, order]
    assert float((np.abs(ours - exact) / size).max()) <= 3 * np.finfo(np.float64).eps


def test_running_sums_of_infinities() -> None:
    x = np.ones(40)
    x[[5, 30]] = np.inf, -np.inf
    with jax.enable_x64(True):
        check_hlo(hlo_bytes(lax.cumsum, x), (x,), 1e-12)


def test_windows_of_predicates(rng: np.random.Generator) -> None:
    x = rng.integers(0, 2, (4, 30)).astype(bool)
    text = """
either {
  a = pred[] parameter(0)
  b = pred[] parameter(1)
  ROOT r = pred[] or(a, b)
}
both {
  a = pred[] parameter(0)
  b = pred[] parameter(1)
  ROOT r = pred[] and(a, b)
}
ENTRY e {
  x = pred[4,30] parameter(0)
  no = pred[] constant(false)
  yes = pred[] constant(true)
  first = pred[4,30] reduce-window(x, no), window={size=1x30 pad=0_0x29_0}, to_apply=either
  second = pred[4,28] reduce-window(x, yes), window={size=1x3}, to_apply=both
  ROOT r = (pred[4,30], pred[4,28]) tuple(first, second)
}"""
    check(text, x)


def test_two_arrays_reduced_together(rng: np.random.Generator) -> None:
    """The value and the place of each window's maximum, the first one of equals."""
    text = """
best {
  a = s32[] parameter(0)
  i = s32[] parameter(1)
  b = s32[] parameter(2)
  j = s32[] parameter(3)
  greater = pred[] compare(b, a), direction=GT
  value = s32[] select(greater, b, a)
  place = s32[] select(greater, j, i)
  ROOT r = (s32[], s32[]) tuple(value, place)
}
ENTRY e {
  x = s32[6,40] parameter(0)
  p = s32[6,40] iota(), iota_dimension=1
  least = s32[] constant(-2147483648)
  none = s32[] constant(-1)
  ROOT r = (s32[5,18], s32[5,18]) reduce-window(x, p, least, none),
    window={size=2x12 stride=1x2 pad=0_0x3_3}, to_apply=best
}"""
    check(text, rng.integers(0, 6, (6, 40)).astype(np.int32))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 3, 1), (1, 1, 2, 1), "VALID"),
        lambda x: jax.grad(lambda y: lax.reduce_window(y, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME").sum())(
            x
        ),
        lambda x: jax.grad(lambda y: lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum())(x),
    ],
    ids=["maximum", "mean", "gradient of maximum", "gradient of mean"],
)
def test_pooling(function: Callable[..., Any], rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 9, 8, 3)).astype(np.float32)
    check_function(function, x, tolerance=1e-5)


def test_select_and_scatter_takes_the_first_of_equals_in_row_major_order() -> None:
    """HLO's definition; XLA's CPU reduces column by column where that is faster, and then takes another."""
    x = np.array([[1, 4], [4, 0]], np.float32)
    (ours,) = run_on_backend(
        hlo_bytes(jax.grad(lambda y: lax.reduce_window(y, -np.inf, lax.max, (2, 2), (1, 1), "VALID").sum()), x), [x]
    )
    np.testing.assert_array_equal(ours, [[0, 1], [0, 0]])


@pytest.mark.parametrize("select", ["GE", "GT", "LE", "LT"])
def test_select_and_scatter_with_ties_and_nan_in_one_dimension(select: str, rng: np.random.Generator) -> None:
    text = f"""
choose {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = pred[] compare(a, b), direction={select}
}}
combine {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b)
}}
ENTRY e {{
  x = f32[40] parameter(0)
  s = f32[40] parameter(1)
  i = f32[] constant(0)
  ROOT r = f32[40] select-and-scatter(x, s, i), window={{size=3 pad=1_1}}, select=choose, scatter=combine
}}"""
    values = rng.choice(np.array([0.0, 1.0, 2.0, np.nan], np.float32), 40)
    check(text, values, np.arange(40, dtype=np.float32))


def test_pooling_with_nan(rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 9, 8, 3)).astype(np.float32)
    x[0, 2, 3, 1] = np.nan
    check_function(lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), x)


@pytest.mark.parametrize("element_type", [E.S32, E.U32, E.U8, E.F32, E.BF16, E.F64], ids=lambda t: t.name)
@pytest.mark.parametrize("select", ["GE", "LE", "GT"])
@pytest.mark.parametrize("number", range(3))
def test_select_and_scatter(element_type: ElementType, select: str, number: int, rng: np.random.Generator) -> None:
    dims = tuple(int(d) for d in rng.integers(2, 8, 2))
    window = tuple(
        WindowDimension(int(s), int(rng.integers(1, 3)), int(rng.integers(0, s)), int(rng.integers(0, s)))
        for s in (rng.integers(1, d + 1) for d in dims)
    )
    source = tuple(window_count(size, w) for size, w in zip(dims, window, strict=True))
    t = element_type.name.lower()
    shape, source_shape = (f"{t}[{d[0]},{d[1]}]" for d in (dims, source))
    text = f"""
choose {{
  a = {t}[] parameter(0)
  b = {t}[] parameter(1)
  ROOT r = pred[] compare(a, b), direction={select}
}}
combine {{
  a = {t}[] parameter(0)
  b = {t}[] parameter(1)
  ROOT r = {t}[] add(a, b)
}}
ENTRY e {{
  x = {shape} parameter(0)
  s = {source_shape} parameter(1)
  i = {t}[] constant(3)
  ROOT r = {shape} select-and-scatter(x, s, i), {window_text(window)}, select=choose, scatter=combine
}}"""
    dtype = random_values(element_type, 1, rng).dtype
    values = rng.permutation(int(np.prod(dims))).reshape(dims).astype(dtype)  # of equals XLA takes any, we the first
    check(text, values, rng.integers(0, 9, source).astype(dtype), tolerance=TOLERANCE.get(element_type, 1e-12))


@pytest.mark.parametrize("dims", [(0, 3), (3, 0)])
def test_windows_without_elements_give_the_initial_value(dims: tuple[int, int]) -> None:
    check_function(
        lambda x: lax.reduce_window(x, 2.0, lax.add, (2, 2), (1, 1), ((2, 2), (2, 2))), np.ones(dims, np.float32)
    )


def test_select_and_scatter_of_no_windows() -> None:
    text = """
choose {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = pred[] compare(a, b), direction=GE
}
combine {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b)
}
ENTRY e {
  x = f32[2] parameter(0)
  s = f32[0] parameter(1)
  i = f32[] constant(5)
  ROOT r = f32[2] select-and-scatter(x, s, i), window={size=3}, select=choose, scatter=combine
}"""
    check(text, np.ones(2, np.float32), np.ones(0, np.float32))
