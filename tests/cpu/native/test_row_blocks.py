"""Loops over short rows, of which a tile holds several: against wider arithmetic, at sizes that fit a tile or not."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from plugin_abi.host import Context
from support.rows import assert_close, explained, softmax

_DTYPES = {
    "pred": np.bool_,
    "s8": np.int8,
    "u16": np.uint16,
    "s32": np.int32,
    "u32": np.uint32,
    "s64": np.int64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}
_FLOATS = ("f16", "bf16", "f32", "f64")
_REDUCTIONS = {
    "add": np.add,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_COLUMNS = [2, 5, 12, 15, 16, 17, 31, 32, 64, 100, 127, 128]


def _reduction(rows: int, columns: int, element: str, opcode: str, initial: str) -> str:
    """A reduction of each row, and beside it what is left of the row once that is taken away."""
    return f"""
combine {{
  a = {element}[] parameter(0)
  b = {element}[] parameter(1)
  ROOT c = {element}[] {opcode}(a, b)
}}
ENTRY main {{
  x = {element}[{rows},{columns}] parameter(0)
  first = {element}[] constant({initial})
  y = {element}[{rows}] reduce(x, first), dimensions={{1}}, to_apply=combine
  ys = {element}[{rows},{columns}] broadcast(y), dimensions={{0}}
  z = {element}[{rows},{columns}] maximum(x, ys)
  ROOT both = ({element}[{rows}], {element}[{rows},{columns}]) tuple(y, z)
}}"""


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> np.ndarray:
    dtype = _DTYPES[element]
    if element in _FLOATS:
        return (rng.standard_normal(shape) + 0.5).astype(dtype)
    if element == "pred":
        return rng.random(shape) < 0.5
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def _is_reduced(element: str, opcode: str) -> bool:
    """Sums and products of 16-bit floats round at each step, as XLA's do: no loop reduces them."""
    if opcode in ("and", "or", "xor"):
        return element not in _FLOATS
    return element not in ("f16", "bf16") or opcode in ("maximum", "minimum")


@pytest.mark.parametrize(("element", "opcode"), [(e, o) for e in _DTYPES for o in _REDUCTIONS if _is_reduced(e, o)])
def test_reductions(element: str, opcode: str, context: Context, rng: np.random.Generator) -> None:
    neutral = int(opcode in ("multiply", "and"))
    for columns in rng.permutation(_COLUMNS)[:5].tolist():
        x = _numbers(rng, (int(rng.integers(2, 90)), columns), element)
        if opcode == "multiply" and element in _FLOATS:
            x = (1 + (x.astype(np.float64) - 0.5) / 16).astype(x.dtype)
        text = _reduction(*x.shape, element, opcode, {"pred": ("false", "true")[neutral]}.get(element, str(neutral)))
        (ours, beside), explanation = explained(context, text, x)
        assert explanation.count("\nnative ") == 1, explanation
        if element in _FLOATS:
            wide = x.astype(np.longdouble)
            exact = _REDUCTIONS[opcode].reduce(wide, 1, initial=neutral)
            scale = np.abs(wide).sum(1) if opcode == "add" else np.abs(exact)
            steps = {"add": 8, "multiply": columns}.get(opcode, 0)
            assert np.all(np.abs(ours.astype(np.longdouble) - exact) <= steps * ml_dtypes.finfo(x.dtype).eps * scale)
        else:
            # Predicates add as or, and multiply as and.
            function = {"add": np.bitwise_or, "multiply": np.bitwise_and}.get(opcode) if element == "pred" else None
            exact = (function or _REDUCTIONS[opcode]).reduce(x, 1, initial=x.dtype.type(neutral), dtype=x.dtype)
            if opcode == "and" and element != "pred":
                exact = np.bitwise_and.reduce(x, 1) & 1
            np.testing.assert_array_equal(ours, exact)
        np.testing.assert_array_equal(beside, np.maximum(x, ours[:, None]))


@pytest.mark.parametrize("columns", _COLUMNS)
def test_sums_of_floats_round_as_those_of_long_rows_do(
    columns: int, context: Context, rng: np.random.Generator
) -> None:
    x = _numbers(rng, (200, columns), "f32")
    (ours, _), _ = explained(context, _reduction(200, columns, "f32", "add", "0"), x)
    for row, y in zip(x, ours, strict=True):
        assert abs(float(y) - math.fsum(row)) <= 2 * np.spacing(np.abs(row).sum())


@pytest.mark.parametrize("opcode", ["add", "maximum", "minimum"])
@pytest.mark.parametrize("columns", [7, 16, 40, 128])
@pytest.mark.parametrize("element", ["f32", "f64"])
def test_special_values(element: str, columns: int, opcode: str, context: Context, rng: np.random.Generator) -> None:
    """A NaN stays wherever in its row it is, and in no other row; so do infinities in sums."""
    x = _numbers(rng, (50, columns), element)
    places = rng.integers(columns, size=6)
    for row, value in enumerate((np.nan, -np.nan, np.inf, -np.inf)):
        x[5 * row, places[row]] = value
    x[30, places[4]], x[30, places[5]] = np.inf, -np.inf
    x[31], x[32], x[33] = np.nan, -np.inf, np.inf
    initial = {"add": "0", "maximum": "-inf", "minimum": "inf"}[opcode]
    (ours, _), _ = explained(context, _reduction(50, columns, element, opcode, initial), x)
    with np.errstate(all="ignore"):
        exact = _REDUCTIONS[opcode].reduce(x.astype(np.float64), 1)
    assert_close(ours, exact, {"f32": 1e-5, "f64": 1e-13}[element] if opcode == "add" else 0.0)


@pytest.mark.parametrize("initial", ["0", "-0.0", "2.5", "nan", "inf"])
@pytest.mark.parametrize("columns", [3, 16, 33, 300])
def test_what_a_sum_begins_with(columns: int, initial: str, context: Context) -> None:
    x = np.full((30, columns), -0.0, np.float32)
    (ours, _), _ = explained(context, _reduction(30, columns, "f32", "add", initial), x)
    expected = np.full(30, float(initial), np.float32)
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(np.signbit(ours), np.signbit(expected))


@pytest.mark.parametrize("shape", [(2, 9), (200, 3), (1000, 16), (77, 17), (129, 48), (50, 100), (9, 128), (40, 129)])
@pytest.mark.parametrize("element", _FLOATS)
def test_softmax_is_one_loop(element: str, shape: tuple[int, int], context: Context, rng: np.random.Generator) -> None:
    x = (rng.standard_normal(shape) * 5).astype(_DTYPES[element])
    (ours,), explanation = explained(context, softmax(*shape, element), x)
    assert explanation.count("\nnative ") == 1, explanation
    exact = torch.softmax(torch.from_numpy(x.astype(np.float64)), -1).numpy()
    assert_close(ours, exact, {"f32": 1e-6, "f64": 1e-14, "f16": 2e-3, "bf16": 1.6e-2}[element])


def test_what_is_written_around_the_caches(context: Context, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((70_001, 31)) * 5).astype(np.float32)
    (ours,), _ = explained(context, softmax(*x.shape, "f32"), x)
    assert_close(ours, torch.softmax(torch.from_numpy(x.astype(np.float64)), -1).numpy(), 1e-6)


def _positions(dims: tuple[int, int, int]) -> str:
    """Sums of what lies below a diagonal in rows that stand transposed, scaled by a number for each row and one for
    each column, after one of all was added; to the sums come their positions, which what was summed is then reduced
    by."""
    a, b, c = dims
    array = f"f32[{a},{b},{c}]"
    return f"""
sum {{
  p = f32[] parameter(0)
  q = f32[] parameter(1)
  ROOT r = f32[] add(p, q)
}}
ENTRY main {{
  transposed = f32[{c},{a},{b}] parameter(0)
  row = f32[{b},{a}] parameter(1)
  column = f32[{c}] parameter(2)
  one = f32[] parameter(3)
  x = {array} transpose(transposed), dimensions={{1,2,0}}
  rows = {array} broadcast(row), dimensions={{1,0}}
  columns = {array} broadcast(column), dimensions={{2}}
  ones = {array} broadcast(one), dimensions={{}}
  second = s32[{a},{b},{c}] iota(), iota_dimension=1
  third = s32[{a},{b},{c}] iota(), iota_dimension=2
  below = pred[{a},{b},{c}] compare(third, second), direction=LE
  zero = f32[] constant(0)
  zeros = {array} broadcast(zero), dimensions={{}}
  scaled = {array} multiply(x, rows)
  more = {array} multiply(scaled, columns)
  all = {array} add(more, ones)
  kept = {array} select(below, all, zeros)
  total = f32[{a},{b}] reduce(kept, zero), dimensions={{2}}, to_apply=sum
  place = f32[{a},{b}] iota(), iota_dimension=0
  moved = f32[{a},{b}] add(total, place)
  moveds = {array} broadcast(moved), dimensions={{0,1}}
  rest = {array} subtract(kept, moveds)
  back = f32[{c},{a},{b}] transpose(rest), dimensions={{2,0,1}}
  ROOT both = (f32[{a},{b}], f32[{c},{a},{b}]) tuple(moved, back)
}}"""


@pytest.mark.parametrize("dims", [(5, 7, 9), (40, 3, 32), (3, 64, 64), (2, 130, 20), (300, 2, 17)], ids=str)
def test_positions_and_what_is_the_same_in_rows(
    dims: tuple[int, int, int], context: Context, rng: np.random.Generator
) -> None:
    a, b, c = dims
    transposed, row, column, one = (rng.standard_normal(s).astype(np.float32) for s in ((c, a, b), (b, a), (c,), ()))
    (total, rest), _ = explained(context, _positions(dims), transposed, row, column, one)
    x = transposed.transpose(1, 2, 0).astype(np.float64) * row.T[:, :, None] * column + one
    kept = np.where(np.arange(c) <= np.arange(b)[:, None], x, 0.0)
    exact = kept.sum(2) + np.arange(a)[:, None]
    np.testing.assert_allclose(total, exact, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(rest, (kept - exact[:, :, None]).transpose(2, 0, 1), rtol=1e-5, atol=1e-4)
