"""Arrays that are written around the caches, 8 MiB and more: every element is there, and what reads them sees it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Context
from support.rows import softmax

_DTYPES = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "s16": np.int16, "u8": np.uint8}


def results_of(context: Context, text: str, *arguments: np.ndarray) -> list[np.ndarray]:
    with compile(context, text) as executable:
        return [get(b) for b in run(executable, *(put(context.devices[0].default_memory, a) for a in arguments))]


def shape_of(element: str, columns: int) -> tuple[int, int]:
    """Just more than 8 MiB. Odd numbers of columns: rows begin anywhere in a line."""
    return (8 << 20) // (columns * np.dtype(_DTYPES[element]).itemsize) + 3, columns


@pytest.mark.parametrize("columns", [513, 1031, 4096, 100_003])
@pytest.mark.parametrize("element", _DTYPES)
def test_every_element(element: str, columns: int, context: Context, rng: np.random.Generator) -> None:
    rows, _ = shape_of(element, columns)
    array = f"{element}[{rows},{columns}]"
    text = f"""
ENTRY e {{
  x = {array} parameter(0)
  one = {element}[] constant(1)
  ones = {array} broadcast(one), dimensions={{}}
  twice = {array} add(x, x)
  ROOT y = {array} add(twice, ones)
}}"""
    x = rng.integers(0, 60, (rows, columns)).astype(_DTYPES[element])
    (ours,) = results_of(context, text, x)
    np.testing.assert_array_equal(ours, x + x + np.ones((), x.dtype))


def test_parts_of_one_array(context: Context, rng: np.random.Generator) -> None:
    """Pieces of a concatenation end and begin within a line."""
    widths = (1029, 515, 777)
    a, b, c = (rng.standard_normal((1100, width)).astype(np.float32) for width in widths)
    text = f"""
ENTRY e {{
  a = f32[1100,{widths[0]}] parameter(0)
  b = f32[1100,{widths[1]}] parameter(1)
  c = f32[1100,{widths[2]}] parameter(2)
  n = f32[1100,{widths[0]}] negate(a)
  s = f32[1100,{widths[1]}] multiply(b, b)
  ROOT y = f32[1100,{sum(widths)}] concatenate(n, s, c), dimensions={{1}}
}}"""
    (ours,) = results_of(context, text, a, b, c)
    np.testing.assert_array_equal(ours, np.concatenate([-a, b * b, c], 1))


def test_rows(context: Context, rng: np.random.Generator) -> None:
    rows, columns = shape_of("f32", 1031)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    (ours,) = results_of(context, softmax(rows, columns, "f32"), x)
    exact = torch.softmax(torch.from_numpy(x.astype(np.float64)), -1).numpy()
    np.testing.assert_allclose(ours, exact, rtol=1e-6, atol=1e-6)


def test_later_loops_see_what_others_wrote(context: Context, rng: np.random.Generator) -> None:
    """Through another order of the elements, so that other threads wrote most of what each reads."""
    x = rng.standard_normal((1024, 2304)).astype(np.float32)
    text = """
ENTRY e {
  x = f32[1024,2304] parameter(0)
  y = f32[1024,2304] multiply(x, x)
  t = f32[2304,1024] transpose(y), dimensions={1,0}
  r = f32[1024,2304] reverse(y), dimensions={0}
  z = f32[1024,2304] subtract(r, x)
  ROOT all = (f32[1024,2304], f32[2304,1024], f32[1024,2304]) tuple(y, t, z)
}"""
    for _ in range(5):
        y, t, z = results_of(context, text, x)
        np.testing.assert_array_equal(y, x * x)
        np.testing.assert_array_equal(t, (x * x).T)
        np.testing.assert_array_equal(z, (x * x)[::-1] - x)


def test_iterations_of_a_loop(context: Context, rng: np.random.Generator) -> None:
    x = rng.integers(0, 1000, (2100, 1031)).astype(np.float32)
    text = """
body {
  s = (s32[], f32[2100,1031]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = f32[2100,1031] get-tuple-element(s), index=1
  one = s32[] constant(1)
  j = s32[] add(i, one)
  r = f32[2100,1031] reverse(x), dimensions={0}
  y = f32[2100,1031] add(x, r)
  ROOT t = (s32[], f32[2100,1031]) tuple(j, y)
}
more {
  s = (s32[], f32[2100,1031]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] constant(4)
  ROOT p = pred[] compare(i, n), direction=LT
}
ENTRY e {
  x = f32[2100,1031] parameter(0)
  zero = s32[] constant(0)
  start = (s32[], f32[2100,1031]) tuple(zero, x)
  end = (s32[], f32[2100,1031]) while(start), condition=more, body=body
  ROOT y = f32[2100,1031] get-tuple-element(end), index=1
}"""
    (ours,) = results_of(context, text, x)
    expected = x
    for _ in range(4):
        expected = expected + expected[::-1]
    np.testing.assert_array_equal(ours, expected)
