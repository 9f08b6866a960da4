"""Loops whose last dimension is short and whose arrays are laid out otherwise, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Context

_DTYPES = {"f32": np.float32, "f64": np.float64, "s32": np.int32, "u8": np.uint8, "s16": np.int16}
# The long dimension: of tiles, of one tile, a prime, short as well, one and none.
_SIZES = [5000, 640, 1031, 7, 1, 0]


def _drawn(rng: np.random.Generator, element: str, *dims: int) -> np.ndarray:
    return rng.integers(0, 100, dims).astype(_DTYPES[element])


@pytest.mark.parametrize("element", _DTYPES)
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("columns", [2, 3, 17])
def test_transposed_and_repeated(
    size: int, columns: int, element: str, context: Context, rng: np.random.Generator
) -> None:
    """A transposed array, one that repeats along each dimension, positions and a slice in reverse."""
    shape, wide = f"{element}[{size},{columns}]", f"{element}[{size},{2 * columns}]"
    text = f"""ENTRY main {{
  x = {element}[{columns},{size}] parameter(0)
  column = {element}[{size}] parameter(1)
  row = {element}[{columns}] parameter(2)
  y = {wide} parameter(3)
  a = {shape} transpose(x), dimensions={{1,0}}
  b = {shape} broadcast(column), dimensions={{0}}
  c = {shape} broadcast(row), dimensions={{1}}
  s = {shape} slice(y), slice={{[0:{size}], [1:{2 * columns}:2]}}
  d = {shape} reverse(s), dimensions={{0}}
  e = {shape} iota(), iota_dimension=0
  f = {shape} iota(), iota_dimension=1
  g = {shape} multiply(a, b)
  h = {shape} add(g, c)
  i = {shape} add(h, d)
  j = {shape} multiply(e, f)
  ROOT k = {shape} add(i, j)
}}"""
    x, column = _drawn(rng, element, columns, size), _drawn(rng, element, size)
    row, y = _drawn(rng, element, columns), _drawn(rng, element, size, 2 * columns)
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        ours = get(run(executable, *(put(memory, a) for a in (x, column, row, y)))[0])
    counts = np.arange(size).astype(x.dtype)[:, None] * np.arange(columns).astype(x.dtype)
    np.testing.assert_array_equal(ours, x.T * column[:, None] + row + y[::-1, 1::2] + counts)


@pytest.mark.parametrize(
    "dims", [(3, 5000), (5000, 3), (40, 50, 3), (3, 40, 50), (4, 700, 2, 5), (1000, 1, 2)], ids=str
)
def test_every_order_of_dimensions(dims: tuple[int, ...], context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal(dims).astype(np.float32)
    memory = context.devices[0].default_memory
    for _ in range(4):
        order = rng.permutation(len(dims))
        source = ",".join(map(str, dims))
        target = ",".join(str(dims[d]) for d in order)
        text = f"""ENTRY main {{
  x = f32[{source}] parameter(0)
  ROOT y = f32[{target}] transpose(x), dimensions={{{",".join(map(str, order))}}}
}}"""
        with compile(context, text) as executable:
            ours = get(run(executable, put(memory, x))[0])
        np.testing.assert_array_equal(ours, x.transpose(order))


@pytest.mark.parametrize("element", _DTYPES)
def test_downwards_by_steps_and_in_rows_of_few(element: str, context: Context, rng: np.random.Generator) -> None:
    """Elements of a row from the last to the first, each, every second to every fifth; rows of few from the last on."""
    memory = context.devices[0].default_memory
    for step in (1, 2, 3, 4, 5):
        x = _drawn(rng, element, 3, 250 * step)
        text = f"""ENTRY main {{
  x = {element}[3,{250 * step}] parameter(0)
  r = {element}[3,{250 * step}] reverse(x), dimensions={{1}}
  s = {element}[3,250] slice(r), slice={{[0:3], [0:{250 * step}:{step}]}}
  ROOT y = {element}[3,250] add(s, s)
}}"""
        with compile(context, text) as executable:
            ours = get(run(executable, put(memory, x))[0])
        np.testing.assert_array_equal(ours, x[:, ::-1][:, ::step] * np.array(2, x.dtype))
    for columns in (2, 3, 4, 5):
        x, y = _drawn(rng, element, 5, 70, columns), _drawn(rng, element, 5, 70, columns)
        shape = f"{element}[5,70,{columns}]"
        text = f"""ENTRY main {{
  x = {shape} parameter(0)
  y = {shape} parameter(1)
  r = {shape} reverse(x), dimensions={{1}}
  ROOT z = {shape} add(r, y)
}}"""
        with compile(context, text) as executable:
            ours = get(run(executable, put(memory, x), put(memory, y))[0])
        np.testing.assert_array_equal(ours, x[:, ::-1] + y)
