"""Reductions over the last dimension and others further out, which become a reduction of rows and one of the row:
against sums in wider arithmetic and reductions of NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plugin_abi.host import Context
from support.rows import explained

_DTYPES = {"f32": np.float32, "f64": np.float64, "s32": np.int32, "u8": np.uint8}
# Of shape and axes: whether the reduction is split. Rows of 128 and fewer are reduced whole, runs of 256 and more one
# by one.
_CASES = [
    ((40, 30, 8), (0, 2), True),
    ((512, 5, 3), (0, 2), True),
    ((64, 20, 100), (0, 2), True),
    ((3, 100, 8, 8), (1, 3), True),
    ((30, 4, 20, 6), (0, 3), True),
    ((9, 7, 8, 5, 6), (0, 2, 4), True),
    ((5, 200, 1, 16), (0, 3), False),
    ((12, 300, 10), (0, 2), False),
    ((20, 30, 300), (0, 2), False),
    ((50, 1, 60), (0, 2), False),
]


def _reduction(shape: tuple[int, ...], axes: tuple[int, ...], element: str, opcode: str, initial: str) -> str:
    """A reduction of (x - row)^2, where a row has an element for each place that is kept."""
    dims = ",".join(map(str, shape))
    places = [d for d in range(len(shape)) if d not in axes]
    kept = ",".join(str(shape[d]) for d in places)
    return f"""
combine {{
  a = {element}[] parameter(0)
  b = {element}[] parameter(1)
  ROOT c = {element}[] {opcode}(a, b)
}}
ENTRY main {{
  x = {element}[{dims}] parameter(0)
  row = {element}[{kept}] parameter(1)
  rows = {element}[{dims}] broadcast(row), dimensions={{{",".join(map(str, places))}}}
  centred = {element}[{dims}] subtract(x, rows)
  squares = {element}[{dims}] multiply(centred, centred)
  first = {element}[] constant({initial})
  ROOT y = {element}[{kept}] reduce(squares, first), dimensions={{{",".join(map(str, axes))}}}, to_apply=combine
}}"""


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for d, size in enumerate(shape) if d not in axes)


@pytest.mark.parametrize("element", _DTYPES)
@pytest.mark.parametrize(("shape", "axes", "is_split"), _CASES, ids=str)
def test_sums_of_squares(
    shape: tuple[int, ...],
    axes: tuple[int, ...],
    is_split: bool,
    element: str,
    context: Context,
    rng: np.random.Generator,
) -> None:
    x, row = ((rng.standard_normal(s) * 9).astype(_DTYPES[element]) for s in (shape, _kept(shape, axes)))
    (ours,), explanation = explained(context, _reduction(shape, axes, element, "add", "0"), x, row)
    assert ("partial" in explanation) == is_split, explanation
    centred = x - np.expand_dims(row, axes)
    squares = np.moveaxis(centred * centred, axes, range(-len(axes), 0)).reshape(*row.shape, -1)
    if element in ("s32", "u8"):
        np.testing.assert_array_equal(ours, squares.sum(-1, dtype=x.dtype))
        return
    exact = np.array([math.fsum(values) for values in squares.reshape(-1, squares.shape[-1])]).reshape(row.shape)
    # What is summed may round with the product, at most once for each step of a sum that stands in its own type.
    steps = 4 if element == "f32" else 64
    assert np.all(np.abs(ours - exact) <= steps * np.spacing(exact.astype(x.dtype)))


@pytest.mark.parametrize(
    ("opcode", "initial"), [("maximum", "-inf"), ("minimum", "inf"), ("maximum", "4"), ("add", "3")]
)
def test_special_values_and_how_reductions_begin(
    opcode: str, initial: str, context: Context, rng: np.random.Generator
) -> None:
    """A NaN stays, in its place only; what a reduction begins with counts once."""
    x = np.round(rng.standard_normal((60, 9, 12))).astype(np.float32)
    x[7, 2, 11], x[59, 4, 0], x[0, 5, 5] = np.nan, np.inf, -np.inf
    (ours,), _ = explained(context, _reduction(x.shape, (0, 2), "f32", opcode, initial), x, np.zeros(9, np.float32))
    function = {"maximum": np.maximum, "minimum": np.minimum, "add": np.add}[opcode]
    np.testing.assert_array_equal(ours, function(function.reduce(x * x, (0, 2)), np.float32(initial)))


def test_two_reductions_of_one_array(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((70, 11, 20)).astype(np.float32)
    text = """
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
greatest {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] maximum(a, b)
}
ENTRY main {
  x = f32[70,11,20] parameter(0)
  zero = f32[] constant(0)
  least = f32[] constant(-inf)
  total = f32[11] reduce(x, zero), dimensions={0,2}, to_apply=sum
  top = f32[11] reduce(x, least), dimensions={0,2}, to_apply=greatest
  ROOT both = (f32[11], f32[11]) tuple(total, top)
}"""
    (total, top), _ = explained(context, text, x)
    np.testing.assert_allclose(total, x.sum((0, 2), dtype=np.float64), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(top, x.max((0, 2)))
