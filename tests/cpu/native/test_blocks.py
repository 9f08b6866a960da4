"""Blocks at run-time starts, sliced and written, and loops whose values change places, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Context

# The array, and the block: whole, rows, columns, inside, an element, empty.
_BLOCKS = [
    ((7,), (1,)),
    ((7,), (7,)),
    ((5, 6), (1, 6)),
    ((5, 6), (5, 2)),
    ((5, 6), (2, 3)),
    ((4, 5, 6), (2, 1, 6)),
    ((4, 5, 6), (3, 5, 6)),
    ((4, 5, 6), (2, 3, 1)),
    ((2, 3, 4, 5), (1, 2, 4, 5)),
    ((2, 3, 4, 5), (2, 2, 3, 4)),
    ((4, 5), (0, 5)),
    ((4, 0), (2, 0)),
]
_STARTS = {"s32": np.int32, "s64": np.int64, "u8": np.uint8}


def _shape(element: str, dims: tuple[int, ...]) -> str:
    return f"{element}[{','.join(map(str, dims))}]"


@pytest.mark.parametrize("element", ["f32", "u8", "f64", "c128"])
@pytest.mark.parametrize(("dims", "block"), _BLOCKS, ids=str)
def test_slice_and_update(
    dims: tuple[int, ...], block: tuple[int, ...], element: str, context: Context, rng: np.random.Generator
) -> None:
    starts = list(_STARTS)[: len(dims)] + ["s32"] * (len(dims) - len(_STARTS))
    names = [f"start{d}" for d in range(len(dims))]
    parameters = "\n".join(
        f"  {n} = {t}[] parameter({d + 2})" for d, (n, t) in enumerate(zip(names, starts, strict=True))
    )
    whole, part = _shape(element, dims), _shape(element, block)
    text = f"""ENTRY main {{
  x = {whole} parameter(0)
  y = {part} parameter(1)
{parameters}
  a = {part} dynamic-slice(x, {", ".join(names)}), dynamic_slice_sizes={{{",".join(map(str, block))}}}
  b = {whole} dynamic-update-slice(x, y, {", ".join(names)})
  ROOT both = ({part}, {whole}) tuple(a, b)
}}"""
    dtype = {"f32": np.float32, "u8": np.uint8, "f64": np.float64, "c128": np.complex128}[element]
    x, y = (rng.integers(0, 200, d).astype(dtype) for d in (dims, block))
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        for _ in range(5):
            drawn = [rng.integers(0 if t == "u8" else -2, size + 3) for t, size in zip(starts, dims, strict=True)]
            numbers = [np.asarray(n, _STARTS[t]) for n, t in zip(drawn, starts, strict=True)]
            ours = [get(b) for b in run(executable, *(put(memory, a) for a in (x, y, *numbers)))]
            # Starts are clamped so that the block lies inside.
            clamped = [min(max(int(n), 0), size - b) for n, size, b in zip(drawn, dims, block, strict=True)]
            where = tuple(slice(s, s + b) for s, b in zip(clamped, block, strict=True))
            updated = x.copy()
            updated[where] = y
            np.testing.assert_array_equal(ours[0], x[where])
            np.testing.assert_array_equal(ours[1], updated)


@pytest.mark.parametrize("iterations", [0, 1, 2, 3, 10, 11])
@pytest.mark.parametrize("known", [True, False], ids=["counted", "while"])
def test_values_that_change_places(known: bool, iterations: int, context: Context) -> None:
    """Fibonacci's numbers: each value is the other one of the iteration before."""
    limit = f"n = s32[] constant({iterations})" if known else "n = s32[] get-tuple-element(s), index=3"
    text = f"""HloModule places
body {{
  s = (s32[], s32[3], s32[3], s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  a = s32[3] get-tuple-element(s), index=1
  b = s32[3] get-tuple-element(s), index=2
  n = s32[] get-tuple-element(s), index=3
  one = s32[] constant(1)
  j = s32[] add(i, one)
  c = s32[3] add(a, b)
  ROOT r = (s32[], s32[3], s32[3], s32[]) tuple(j, b, c, n)
}}
condition {{
  s = (s32[], s32[3], s32[3], s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  {limit}
  ROOT more = pred[] compare(i, n), direction=LT
}}
ENTRY main {{
  a = s32[3] parameter(0)
  b = s32[3] parameter(1)
  n = s32[] parameter(2)
  zero = s32[] constant(0)
  s = (s32[], s32[3], s32[3], s32[]) tuple(zero, a, b, n)
  ROOT r = (s32[], s32[3], s32[3], s32[]) while(s), condition=condition, body=body
}}"""
    a, b = np.array([0, 1, 2], np.int32), np.array([1, 3, -5], np.int32)
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        ours = [get(r) for r in run(executable, *(put(memory, v) for v in (a, b, np.asarray(iterations, np.int32))))]
    for _ in range(iterations):
        a, b = b, a + b
    np.testing.assert_array_equal(ours[1], a)
    np.testing.assert_array_equal(ours[2], b)
    assert ours[0] == iterations
