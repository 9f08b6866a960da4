"""Reductions of columns: blocks of rows, segments of blocks, short rows that become columns; against NumPy's wide
sums."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_DTYPES = {
    "f32": np.float32,
    "f64": np.float64,
    "s32": np.int32,
    "u8": np.uint8,
    "s64": np.int64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "pred": np.bool_,
}
# Of float sums, in units of the result's precision; sums of 16-bit floats are not native.
_SUMMED = ("f32", "f64", "s32", "u8", "s64")
# Shape and reduced dimensions: few and many columns, rows that do and do not fill blocks, several dimensions.
_SHAPES = [
    ((1024, 1024), (0,)),
    ((5, 256, 64), (1,)),
    ((7, 33, 9, 5), (1, 2)),
    ((7, 33, 9, 5), (0, 2)),
    ((4000, 3), (0,)),
    ((3, 1001, 7), (1,)),
    ((100, 1500), (0,)),
    ((1, 50), (0,)),
    ((2, 300, 1), (1,)),
    ((300, 80, 3), (2,)),
    ((90, 70, 32), (2,)),
    ((2000, 2), (1,)),
    ((40, 0, 30), (1,)),
]


def _reduction(
    context: Context, element: str, shape: tuple[int, ...], dims: tuple[int, ...], opcode: str, x: np.ndarray
) -> np.ndarray:
    begin = {"add": "0", "maximum": "-inf"}[opcode]
    if x.dtype.kind in "iub":
        begin = "0" if opcode == "add" else str(np.iinfo(x.dtype).min)
    kept = ",".join(str(size) for d, size in enumerate(shape) if d not in dims)
    text = f"""HloModule reduction
combine {{
  a = {element}[] parameter(0)
  b = {element}[] parameter(1)
  ROOT c = {element}[] {opcode}(a, b)
}}
ENTRY main {{
  x = {element}[{",".join(map(str, shape))}] parameter(0)
  begin = {element}[] constant({begin})
  ROOT y = {element}[{kept}] reduce(x, begin), dimensions={{{",".join(map(str, dims))}}}, to_apply=combine
}}"""
    with compile(context, text) as executable:
        assert "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        (result,) = map(get, run(executable, put(context.devices[0].default_memory, x)))
    return result


@pytest.mark.parametrize(("shape", "dims"), _SHAPES)
@pytest.mark.parametrize("element", _SUMMED)
def test_sums(
    element: str, shape: tuple[int, ...], dims: tuple[int, ...], context: Context, rng: np.random.Generator
) -> None:
    dtype = np.dtype(_DTYPES[element])
    x = (rng.standard_normal(shape) * 30).astype(dtype) if dtype.kind == "f" else rng.integers(0, 99, shape, dtype)
    result = _reduction(context, element, shape, dims, "add", x)
    if dtype.kind != "f":
        np.testing.assert_array_equal(result, x.sum(dims, dtype=dtype))
        return
    expected, size = x.astype(np.longdouble).sum(dims), np.abs(x).astype(np.longdouble).sum(dims)
    # f32 is added up in double (short rows in the end of f32), f64 in itself.
    bound = size * np.finfo(dtype).eps * (8 if element == "f32" else 64) + np.finfo(dtype).tiny
    assert (np.abs(result - expected) <= bound).all()


@pytest.mark.parametrize(("shape", "dims"), [case for case in _SHAPES if 0 not in case[0]])
@pytest.mark.parametrize("element", [e for e in _DTYPES if e != "pred"])
def test_greatest(
    element: str, shape: tuple[int, ...], dims: tuple[int, ...], context: Context, rng: np.random.Generator
) -> None:
    dtype = np.dtype(_DTYPES[element])
    x = rng.integers(0, 120, shape).astype(dtype)
    if dtype.kind not in "iu":
        x = np.where(rng.random(shape) < 0.001, np.nan, x.astype(np.float64)).astype(dtype)
    exact = np.float32 if dtype.itemsize == 2 else dtype
    result = _reduction(context, element, shape, dims, "maximum", x)
    np.testing.assert_array_equal(result.astype(exact), np.max(x.astype(exact), dims))


def test_what_is_the_same_in_all_rows(context: Context, rng: np.random.Generator) -> None:
    """Sums of (x / column - column) * row: operations of columns, of rows and of points."""
    x = rng.standard_normal((6, 130, 70)).astype(np.float32)
    column = (1 + rng.random(70)).astype(np.float32)
    row = rng.standard_normal(130).astype(np.float32)
    text = """HloModule reduction
combine {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY main {
  x = f32[6,130,70] parameter(0)
  column = f32[70] parameter(1)
  row = f32[130] parameter(2)
  root = f32[70] sqrt(column)
  columns = f32[6,130,70] broadcast(root), dimensions={2}
  rows = f32[6,130,70] broadcast(row), dimensions={1}
  quotient = f32[6,130,70] divide(x, columns)
  difference = f32[6,130,70] subtract(quotient, columns)
  product = f32[6,130,70] multiply(difference, rows)
  zero = f32[] constant(0)
  ROOT y = f32[70] reduce(product, zero), dimensions={0,1}, to_apply=combine
}"""
    with compile(context, text) as executable:
        (result,) = map(get, run(executable, *(put(context.devices[0].default_memory, a) for a in (x, column, row))))
    root = np.sqrt(column.astype(np.float64))
    terms = (x / root - root) * row.astype(np.float64)[:, None]
    size = (np.abs(x / root) + root) * np.abs(row)[:, None]
    assert (np.abs(result - terms.sum((0, 1))) <= size.sum((0, 1)) * 1e-6).all()


@pytest.mark.parametrize(
    ("n", "m", "k"),
    [(256, 256, 32), (100, 65, 3), (64, 70, 2), (5, 5000, 16), (70, 64, 63), (7, 129, 9), (30, 1000, 40)],
)
def test_distances(n: int, m: int, k: int, context: Context, rng: np.random.Generator) -> None:
    """Rows of differences are reduced as columns, of arrays that are transposed first."""
    x, y = rng.standard_normal((n, k)).astype(np.float32), rng.standard_normal((m, k)).astype(np.float32)
    text = f"""HloModule reduction
combine {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
ENTRY main {{
  x = f32[{n},{k}] parameter(0)
  y = f32[{m},{k}] parameter(1)
  xs = f32[{n},{m},{k}] broadcast(x), dimensions={{0,2}}
  ys = f32[{n},{m},{k}] broadcast(y), dimensions={{1,2}}
  d = f32[{n},{m},{k}] subtract(xs, ys)
  square = f32[{n},{m},{k}] multiply(d, d)
  zero = f32[] constant(0)
  ROOT s = f32[{n},{m}] reduce(square, zero), dimensions={{2}}, to_apply=combine
}}"""
    with compile(context, text) as executable:
        assert "transposed" in executable.artifact(Artifact.EXPLANATION).decode()
        (result,) = map(get, run(executable, *(put(context.devices[0].default_memory, a) for a in (x, y))))
    difference = (x[:, None] - y[None]).astype(np.float64)
    np.testing.assert_allclose(result, (difference**2).sum(-1), rtol=1e-6)
