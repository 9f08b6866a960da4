"""Running sums and the like of short rows, in both directions, without a library call; long ones are the library's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_TYPES = {
    "f32": np.float32,
    "f64": np.float64,
    "bf16": ml_dtypes.bfloat16,
    "s32": np.int32,
    "u8": np.uint8,
    "s64": np.int64,
}
_EXACT = {"add": np.cumsum, "multiply": np.cumprod, "maximum": np.maximum.accumulate, "minimum": np.minimum.accumulate}


def _run(
    context: Context, element: str, name: str, x: np.ndarray, start: int, axis: int, *, reverse: bool
) -> tuple[np.ndarray, str]:
    size = x.shape[axis]
    sizes = "x".join(str(size if d == axis else 1) for d in range(x.ndim))
    side = f"0_{size - 1}" if reverse else f"{size - 1}_0"
    pads = "x".join(side if d == axis else "0_0" for d in range(x.ndim))
    shape = f"{element}[{','.join(map(str, x.shape))}]"
    text = f"""combine {{
  x = {element}[] parameter(0)
  y = {element}[] parameter(1)
  ROOT r = {element}[] {name}(x, y)
}}
ENTRY main {{
  x = {shape} parameter(0)
  s = {element}[] constant({start})
  ROOT r = {shape} reduce-window(x, s), window={{size={sizes} pad={pads}}}, to_apply=combine
}}"""
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        (result,) = run(executable, put(memory, x))
        return get(result), executable.artifact(Artifact.EXPLANATION).decode()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", _EXACT)
@pytest.mark.parametrize("element", _TYPES)
def test_scans(element: str, name: str, axis: int, reverse: bool, context: Context, rng: np.random.Generator) -> None:
    dtype = _TYPES[element]
    x = rng.integers(0, 4, (3, 17, 5)).astype(dtype)
    if element in ("f32", "f64", "bf16"):
        x = (x / 2 - 0.5).astype(dtype)
    start = {"add": 0, "multiply": 1, "maximum": 0, "minimum": 1}[name]
    ours, explanation = _run(context, element, name, x, start, axis, reverse=reverse)
    assert "library call" not in explanation.replace("0 library calls", "")
    wide = x.astype(np.float64 if element in ("f32", "f64", "bf16") else np.int64)
    turned = np.flip(wide, axis) if reverse else wide
    exact = _EXACT[name](turned, axis=axis)
    # What lies outside of the array is the start, too.
    exact = {"maximum": np.maximum, "minimum": np.minimum}.get(name, lambda a, _: a)(exact, start)
    exact = np.flip(exact, axis) if reverse else exact
    if element in ("f32", "f64", "bf16"):
        eps = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=eps * 2, atol=eps)
    else:
        np.testing.assert_array_equal(ours, exact.astype(dtype))


def test_a_nan_stays_behind_it(context: Context, rng: np.random.Generator) -> None:
    """What is not summed up is not multiplied by zero either."""
    x = rng.standard_normal((2, 9)).astype(np.float32)
    x[0, 4], x[1, 6] = np.nan, np.inf
    ours, _ = _run(context, "f32", "add", x, 0, 1, reverse=False)
    assert np.isfinite(ours[0, :4]).all() and np.isnan(ours[0, 4:]).all()
    assert np.isfinite(ours[1, :6]).all() and np.isposinf(ours[1, 6:]).all()


def test_long_rows_are_the_librarys(context: Context, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 9, (2, 5000)).astype(np.int32)
    ours, explanation = _run(context, "s32", "add", x, 0, 1, reverse=False)
    assert "1 library call" in explanation
    np.testing.assert_array_equal(ours, np.cumsum(x, 1))
