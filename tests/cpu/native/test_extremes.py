"""Positions of extremes in native code against NumPy, which like XLA takes a NaN first and the first of equals."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_DTYPES = {
    "pred": np.bool_,
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "u8": np.uint8,
    "u32": np.uint32,
    "u64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}
# Shape, dimension: rows and columns, few and many, short and long; those of which a row is cut into segments.
_SHAPES = [
    ((5, 700), 1),
    ((700, 5), 0),
    ((3, 40, 300), 1),
    ((9, 16), 1),
    ((4, 1), 1),
    ((7, 1, 3), 1),
    ((100003,), 0),
    ((2, 30000), 1),
    ((1500, 130), 0),
    ((2, 20000, 3), 1),
    ((64, 64, 64), 0),
    ((0, 4), 1),
]


def _begin(dtype: np.dtype, largest: bool) -> str:
    if dtype == np.bool_:
        return "false" if largest else "true"
    if dtype.kind in "iu":
        return str(np.iinfo(dtype).min if largest else np.iinfo(dtype).max)
    return "-inf" if largest else "inf"


def _text(element: str, dtype: np.dtype, index: str, shape: tuple[int, ...], dimension: int, largest: bool) -> str:
    dims = ",".join(map(str, shape))
    kept = ",".join(str(size) for d, size in enumerate(shape) if d != dimension)
    return f"""HloModule extremes
better {{
  a = {element}[] parameter(0)
  i = {index}[] parameter(1)
  b = {element}[] parameter(2)
  j = {index}[] parameter(3)
  beats = pred[] compare(a, b), direction={"GT" if largest else "LT"}
  isnan = pred[] compare(a, a), direction=NE
  first = pred[] or(beats, isnan)
  value = {element}[] select(first, a, b)
  equal = pred[] compare(a, b), direction=EQ
  before = pred[] compare(i, j), direction=LT
  tie = pred[] and(equal, before)
  either = pred[] or(first, tie)
  position = {index}[] select(either, i, j)
  ROOT both = ({element}[], {index}[]) tuple(value, position)
}}
ENTRY main {{
  x = {element}[{dims}] parameter(0)
  number = {index}[{shape[dimension]}] iota(), iota_dimension=0
  numbers = {index}[{dims}] broadcast(number), dimensions={{{dimension}}}
  begin = {element}[] constant({_begin(dtype, largest)})
  zero = {index}[] constant(0)
  ROOT found = ({element}[{kept}], {index}[{kept}]) reduce(x, numbers, begin, zero),
    dimensions={{{dimension}}}, to_apply=better
}}"""


def _array(dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Few different numbers, so that there are ties, zeros of both signs, infinities, and in some rows NaNs."""
    x = rng.integers(0, 40, shape) - (0 if dtype.kind in "ub" else 20)
    if dtype == np.bool_:
        return x > 35
    if dtype.kind in "iu":
        return x.astype(dtype)
    x = np.where(rng.random(shape) < 0.1, -0.0, x.astype(np.float64))
    x = np.where(rng.random(shape) < 0.01, rng.choice([np.inf, -np.inf], shape), x)
    x = np.where(rng.random(shape) < 3 / max(x.size, 1), np.nan, x)
    return x.astype(dtype)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("shape", "dimension"), _SHAPES)
@pytest.mark.parametrize("element", _DTYPES)
def test_extremes(
    element: str,
    shape: tuple[int, ...],
    dimension: int,
    largest: bool,
    context: Context,
    rng: np.random.Generator,
) -> None:
    dtype = np.dtype(_DTYPES[element])
    x = _array(dtype, shape, rng)
    index = "s64" if element.endswith("64") else "s32"
    with compile(context, _text(element, dtype, index, shape, dimension, largest)) as executable:
        assert "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        values, positions = map(get, run(executable, put(context.devices[0].default_memory, x)))
    wide = x.astype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else x
    expected = (np.argmax if largest else np.argmin)(wide, dimension)
    np.testing.assert_array_equal(positions, expected)
    best = np.take_along_axis(x, np.expand_dims(expected, dimension), dimension).squeeze(dimension)
    assert values.dtype == dtype
    exact = np.float32 if element == "bf16" else dtype  # NumPy does not know that a bf16 may be NaN
    np.testing.assert_array_equal(values.astype(exact), best.astype(exact))


@pytest.mark.parametrize("largest", [True, False])
def test_all_elements_the_least_there_is(largest: bool, context: Context) -> None:
    dtype = np.dtype(np.float32)
    x = np.full((3, 600), -np.inf if largest else np.inf, dtype)
    with compile(context, _text("f32", dtype, "s32", x.shape, 1, largest)) as executable:
        _, positions = map(get, run(executable, put(context.devices[0].default_memory, x)))
    np.testing.assert_array_equal(positions, [0, 0, 0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a, a), direction=NE", "a, b), direction=NE"),
        ("direction=EQ", "direction=NE"),
        ("select(either, i, j)", "select(either, j, i)"),
        ("zero = s32[] constant(0)", "zero = s32[] constant(5)"),
        ("compare(i, j), direction=LT", "compare(i, j), direction=GT"),
    ],
)
def test_another_computation_is_left_to_the_library(
    old: str, new: str, context: Context, rng: np.random.Generator
) -> None:
    text = _text("f32", np.dtype(np.float32), "s32", (4, 50), 1, largest=True)
    assert old in text
    with compile(context, text.replace(old, new)) as executable:
        assert "native extremes" not in executable.artifact(Artifact.EXPLANATION).decode()


def test_positions_of_another_dimension_are_left_to_the_library(context: Context) -> None:
    text = _text("f32", np.dtype(np.float32), "s32", (50, 50), 1, largest=True)
    text = text.replace("broadcast(number), dimensions={1}", "broadcast(number), dimensions={0}")
    with compile(context, text) as executable:
        assert "native extremes" not in executable.artifact(Artifact.EXPLANATION).decode()
