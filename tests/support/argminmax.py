"""Programs that find argmin and argmax as argmax is written, arrays that are hard for them, and NumPy's answer."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {
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


def _begin(dtype: np.dtype, largest: bool) -> str:
    if dtype == np.bool_:
        return "false" if largest else "true"
    if dtype.kind in "iu":
        return str(np.iinfo(dtype).min if largest else np.iinfo(dtype).max)
    return "-inf" if largest else "inf"


def text_of(element: str, dtype: np.dtype, index: str, shape: tuple[int, ...], dimension: int, largest: bool) -> str:
    dims = ",".join(map(str, shape))
    kept = ",".join(str(size) for d, size in enumerate(shape) if d != dimension)
    return f"""better {{
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


def array_of(dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
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


def answer(x: np.ndarray, dimension: int, largest: bool) -> tuple[np.ndarray, np.ndarray]:
    """Values and positions. Like XLA NumPy takes a NaN first and the first of equals, but of a bf16 it does not know
    that it may be NaN."""
    exact = x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x
    positions = (np.argmax if largest else np.argmin)(exact, dimension)
    return np.take_along_axis(exact, np.expand_dims(positions, dimension), dimension).squeeze(dimension), positions
