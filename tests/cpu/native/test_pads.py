"""Pads that add, crop and spread elements in any combination, without a library call."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_TYPES = {"f32": np.float32, "f16": np.float16, "s32": np.int32, "f64": np.float64}


def _padded(x: np.ndarray, filler: np.ndarray, low: list[int], high: list[int], interior: list[int]) -> np.ndarray:
    """By the definition: spread in an array large enough, then a window of it."""
    for d, (before, after, between) in enumerate(zip(low, high, interior, strict=True)):
        x = np.moveaxis(x, d, 0)
        size = x.shape[0] + max(x.shape[0] - 1, 0) * between
        wide = np.full((abs(before) + size + abs(after), *x.shape[1:]), filler, x.dtype)
        wide[abs(before) : abs(before) + size][:: between + 1] = x
        stop = abs(before) + size + after
        x = np.moveaxis(wide[abs(before) - before : max(stop, abs(before) - before)], 0, d)
    return x


@pytest.mark.parametrize("element", _TYPES)
@pytest.mark.parametrize("seed", range(12))
def test_any_pad(element: str, seed: int, context: Context) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 7, 3).tolist())
    interior = rng.integers(0, 3, 3).tolist()
    spread = [size + (size - 1) * between for size, between in zip(shape, interior, strict=True)]
    low = [int(rng.integers(-size, 4)) for size in spread]
    high = [int(rng.integers(-min(size, size + before), 4)) for size, before in zip(spread, low, strict=True)]
    x = rng.integers(-99, 99, shape).astype(_TYPES[element])
    filler = np.asarray(7, _TYPES[element])
    exact = _padded(x, filler, low, high, interior)
    padding = "x".join(f"{a}_{b}_{c}" for a, b, c in zip(low, high, interior, strict=True))
    text = f"""ENTRY main {{
  x = {element}[{",".join(map(str, shape))}] parameter(0)
  f = {element}[] parameter(1)
  ROOT r = {element}[{",".join(map(str, exact.shape))}] pad(x, f), padding={padding}
}}"""
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        (result,) = run(executable, put(memory, x), put(memory, filler))
        np.testing.assert_array_equal(get(result), exact)
        assert " library call" not in executable.artifact(Artifact.EXPLANATION).decode().replace(" 0 library call", "")


def test_sums_of_complex_numbers(context: Context, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((40, 33, 5)) + 1j * rng.standard_normal((40, 33, 5))).astype(np.complex64)
    text = """add {
  x = c64[] parameter(0)
  y = c64[] parameter(1)
  ROOT r = c64[] add(x, y)
}
ENTRY main {
  x = c64[40,33,5] parameter(0)
  s = c64[] constant((1, -2))
  ROOT r = c64[33,5] reduce(x, s), dimensions={0}, to_apply=add
}"""
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        (result,) = run(executable, put(memory, x))
        np.testing.assert_allclose(get(result), x.astype(np.complex128).sum(0) + (1 - 2j), rtol=1e-5, atol=1e-5)
        assert "0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
