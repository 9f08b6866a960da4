"""The greatest of each row in native code: total order, ties by lower index, against NumPy's stable sort."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_DTYPES = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "s8": np.int8,
    "s32": np.int32,
    "s64": np.int64,
    "u8": np.uint8,
    "u32": np.uint32,
}


def _total_order(x: np.ndarray) -> np.ndarray:
    """Integers in the order of ``x``: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN."""
    if x.dtype.kind in "iu":
        return x.astype(object)
    bits = x.view(f"i{x.dtype.itemsize}")
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits).astype(object)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("shape", "k"), [((7, 1000), 16), ((2, 3, 130), 128), ((5, 9), 9), ((300, 1), 1), ((0, 8), 3)])
@pytest.mark.parametrize("element", _DTYPES)
def test_top_k(
    element: str, shape: tuple[int, ...], k: int, largest: bool, context: Context, rng: np.random.Generator
) -> None:
    x = np.abs(rng.standard_normal(shape) * 30) if element.startswith("u") else rng.standard_normal(shape) * 30
    x = x.astype(_DTYPES[element])
    if x.dtype.kind not in "iu" and shape[-1] > 8 and x.size:
        x[..., :8] = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, 1.0]).astype(x.dtype)
    dims, kept = ",".join(map(str, shape)), ",".join(map(str, (*shape[:-1], k)))
    order = "largest=true" if largest else "largest=false"
    text = f"""ENTRY main {{
  x = {element}[{dims}] parameter(0)
  ROOT best = ({element}[{kept}], s32[{kept}]) topk(x), k={k}, {order}
}}"""
    with compile(context, text) as executable:
        assert "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        values, indices = map(get, run(executable, put(context.devices[0].default_memory, x)))
    keys = _total_order(x)
    expected = np.argsort(-keys if largest else keys, axis=-1, kind="stable")[..., :k]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(
        values.view(f"u{x.dtype.itemsize}"), np.take_along_axis(x, expected, -1).view(f"u{x.dtype.itemsize}")
    )


def test_a_large_k_is_left_to_the_library(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 500)).astype(np.float32)
    text = """ENTRY main {
  x = f32[2,500] parameter(0)
  ROOT best = (f32[2,200], s32[2,200]) topk(x), k=200, largest=true
}"""
    with compile(context, text) as executable:
        values, _ = map(get, run(executable, put(context.devices[0].default_memory, x)))
    np.testing.assert_array_equal(values, -np.sort(-x, axis=-1)[:, :200])
