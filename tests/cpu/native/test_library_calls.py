"""Library calls within native programs: results stay where the library puts them, for as long as they are read."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

# By keys that are computed, which a library sorts.
_COMPARE = """less { a = f32[] parameter(0)
  b = f32[] parameter(1)
  k = f32[] exponential(a)
  l = f32[] exponential(b)
  ROOT r = pred[] compare(k, l), direction=LT }
"""


def chain(length: int, rows: int, columns: int, *, every: bool = False) -> str:
    """``length`` times: rows sorted, then bent. The result is the last array, or with ``every`` all sorted ones too."""
    shape = f"f32[{rows},{columns}]"
    lines = [f"x0 = {shape} parameter(0)"]
    for n in range(length):
        lines += [
            f"y{n} = {shape} sort(x{n}), dimensions={{1}}, to_apply=less",
            f"c{n} = {shape} cosine(y{n})",
            f"t{n} = {shape} multiply(c{n}, c{n})",
            f"x{n + 1} = {shape} subtract(t{n}, y{n})",
        ]
    results = [f"x{length}", *(f"y{n}" for n in range(length) if every)]
    types = ", ".join([shape] * len(results))
    lines.append(f"ROOT r = ({types}) tuple({', '.join(results)})")
    return f"{_COMPARE}ENTRY e {{\n" + "\n".join(lines) + "\n}"


def expected(x: np.ndarray, length: int) -> list[np.ndarray]:
    sorted_ones = []
    for _ in range(length):
        sorted_ones.append(np.sort(x, 1))
        cosine = np.cos(sorted_ones[-1])
        x = cosine * cosine - sorted_ones[-1]
    return [x, *sorted_ones]


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (0, 4), (70, 300)], ids=str)
def test_results_of_calls_are_read_and_returned(context: Context, shape: tuple[int, int], every: bool) -> None:
    rng = np.random.default_rng(0)
    executable = compile(context, chain(3, *shape, every=every))
    if np.prod(shape):
        assert "runs as native tiles with 3 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
    memory = context.devices[0].default_memory
    inputs = [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]
    # All results live at once: no run may write over those of another one.
    runs = [run(executable, put(memory, x)) for x in inputs]
    for x, results in zip(inputs, runs, strict=True):
        for ours, exact in zip(map(get, results), expected(x, 3), strict=False):
            np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)
        assert len(results) == (4 if every else 1)


def test_the_same_result_twice_and_a_result_that_a_call_reads(context: Context) -> None:
    text = f"""{_COMPARE}ENTRY e {{ x = f32[4,64] parameter(0)
      y = f32[4,64] sort(x), dimensions={{1}}, to_apply=less
      t = f32[4,64] tanh(y)
      n = f32[4,64] negate(t)
      z = f32[4,64] sort(n), dimensions={{1}}, to_apply=less
      c = f32[4,64] cosine(z)
      d = f32[4,64] multiply(c, c)
      ROOT r = (f32[4,64], f32[4,64], f32[4,64], f32[4,64]) tuple(y, z, y, d) }}"""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    y, z, again, _ = map(get, run(compile(context, text), put(context.devices[0].default_memory, x)))
    np.testing.assert_array_equal(y, np.sort(x, 1))
    np.testing.assert_array_equal(again, y)
    np.testing.assert_allclose(z, np.sort(-np.tanh(y), 1), rtol=1e-6)


def test_memory_that_calls_bring_is_counted_and_given_back(context: Context) -> None:
    length, size = 24, 4 * 64 * 4096
    executable = compile(context, chain(length, 64, 4096))
    device = context.devices[0]
    x = put(device.default_memory, np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32))
    before = device.memory_stats(clear_peaks=True).bytes_in_use
    (result,) = run(executable, x)
    device.synchronize()
    stats = device.memory_stats()
    assert stats.bytes_in_use == before + size
    # The argument, the result, the arena, and what of the calls' is still to be read.
    assert stats.peak_bytes_in_use <= before + 6 * size
    result.close()
    assert device.memory_stats().bytes_in_use == before


def test_a_call_in_a_loop_fills_the_memory_of_the_loop(context: Context) -> None:
    text = f"""{_COMPARE}
    body {{ state = (s32[], f32[4,50]) parameter(0)
      count = s32[] get-tuple-element(state), index=0
      x = f32[4,50] get-tuple-element(state), index=1
      one = s32[] constant(1)
      next = s32[] add(count, one)
      n = f32[4,50] negate(x)
      y = f32[4,50] sort(n), dimensions={{1}}, to_apply=less
      c = f32[4,50] cosine(y)
      d = f32[4,50] multiply(c, y)
      ROOT r = (s32[], f32[4,50]) tuple(next, d) }}
    condition {{ state = (s32[], f32[4,50]) parameter(0)
      count = s32[] get-tuple-element(state), index=0
      limit = s32[] constant(7)
      ROOT more = pred[] compare(count, limit), direction=LT }}
    ENTRY e {{ x = f32[4,50] parameter(0)
      zero = s32[] constant(0)
      initial = (s32[], f32[4,50]) tuple(zero, x)
      final = (s32[], f32[4,50]) while(initial), condition=condition, body=body
      ROOT y = f32[4,50] get-tuple-element(final), index=1 }}"""
    x = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)
    (result,) = run(compile(context, text), put(context.devices[0].default_memory, x))
    for _ in range(7):
        y = np.sort(-x, 1)
        x = np.cos(y) * y
    np.testing.assert_allclose(get(result), x, rtol=1e-5, atol=1e-6)
