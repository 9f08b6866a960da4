"""Chains of reductions over rows, each in one loop: against float64 in torch and NumPy, at the ends of what rows can
be."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from plugin_abi.host import Context
from support.rows import assert_close, explained, reducer, softmax

_DTYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
# Of the result, beyond one rounding into its type.
_TOLERANCE = {"f32": 1e-6, "f64": 1e-14, "f16": 2e-3, "bf16": 1.6e-2}


@pytest.mark.parametrize("shape", [(1, 64), (5, 65), (37, 1000), (16, 5000), (3, 1), (4, 7), (0, 100)], ids=str)
@pytest.mark.parametrize("element", _DTYPES)
def test_softmax(element: str, shape: tuple[int, int], context: Context, rng: np.random.Generator) -> None:
    x = (rng.standard_normal(shape) * 5).astype(_DTYPES[element])
    (ours,), _ = explained(context, softmax(*shape, element), x)
    exact = torch.softmax(torch.from_numpy(x.astype(np.float64)), -1).numpy()
    assert_close(ours, exact, _TOLERANCE[element])


@pytest.mark.parametrize("element", ["f32", "f64", "bf16"])
def test_softmax_of_special_rows(element: str, context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 300))
    x[0, 17] = np.nan
    x[1] = -np.inf
    x[2, 250] = np.inf
    x[3, :299] = -np.inf
    x[4] = np.nan
    x[5] = 3e38 if element == "f32" else 1.0
    x = x.astype(_DTYPES[element])
    (ours,), _ = explained(context, softmax(8, 300, element), x)
    with np.errstate(all="ignore"):
        exact = torch.softmax(torch.from_numpy(x.astype(np.float64)), -1).numpy()
    assert np.isnan(ours[[0, 1, 2, 4]].astype(np.float64)).all()
    assert_close(ours, exact, _TOLERANCE[element])


def test_a_softmax_is_one_loop(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 512)).astype(np.float32)
    _, explanation = explained(context, softmax(64, 512, "f32"), x)
    assert explanation.count("\nnative ") == 1, explanation


def test_rows_too_long_for_the_cache_stay_apart(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 300_000)).astype(np.float32)
    (ours,), explanation = explained(context, softmax(16, 300_000, "f32"), x)
    assert explanation.count("\nnative ") > 1, explanation
    assert_close(ours, torch.softmax(torch.from_numpy(x.astype(np.float64)), -1).numpy(), 1e-6)


def _moments(dims: str, reduced: str, kept: str, places: str, count: int) -> str:
    """Mean, variance, what is normalised with them, and two results of the rows themselves."""
    return f"""{reducer("sum", "f32", "add")}
ENTRY main {{
  x = f32[{dims}] parameter(0)
  weight = f32[{dims}] parameter(1)
  zero = f32[] constant(0)
  part = f32[] constant({1 / count!r})
  parts = f32[{kept}] broadcast(part), dimensions={{}}
  small = f32[] constant(1e-5)
  smalls = f32[{kept}] broadcast(small), dimensions={{}}
  total = f32[{kept}] reduce(x, zero), dimensions={{{reduced}}}, to_apply=sum
  mean = f32[{kept}] multiply(total, parts)
  means = f32[{dims}] broadcast(mean), dimensions={{{places}}}
  centred = f32[{dims}] subtract(x, means)
  squares = f32[{dims}] multiply(centred, centred)
  squared = f32[{kept}] reduce(squares, zero), dimensions={{{reduced}}}, to_apply=sum
  variance = f32[{kept}] multiply(squared, parts)
  safe = f32[{kept}] add(variance, smalls)
  scale = f32[{kept}] rsqrt(safe)
  scales = f32[{dims}] broadcast(scale), dimensions={{{places}}}
  normal = f32[{dims}] multiply(centred, scales)
  weighted = f32[{dims}] multiply(normal, weight)
  ROOT result = (f32[{dims}], f32[{kept}], f32[{kept}]) tuple(weighted, mean, variance)
}}"""


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((33, 200), (1,)),
        ((8, 5, 130), (2,)),
        ((20, 3, 100), (1, 2)),
        ((70, 90), (0,)),
        ((2, 30, 80), (1,)),
        ((64, 1), (1,)),
        ((40, 30, 16), (2,)),
        ((70, 6, 5, 4), (2, 3)),
        ((50, 20, 6, 4), (1, 3)),
        ((9, 3, 20), (0, 2)),
    ],
    ids=str,
)
def test_moments(shape: tuple[int, ...], axes: tuple[int, ...], context: Context, rng: np.random.Generator) -> None:
    x, weight = ((rng.standard_normal(shape) * 3 + 1).astype(np.float32) for _ in range(2))
    kept = [d for d in range(len(shape)) if d not in axes]
    text = _moments(
        ",".join(map(str, shape)),
        ",".join(map(str, axes)),
        ",".join(str(shape[d]) for d in kept),
        ",".join(map(str, kept)),
        int(np.prod([shape[d] for d in axes])),
    )
    (ours, mean, variance), _ = explained(context, text, x, weight)
    wide = x.astype(np.float64)
    exact_mean, exact_variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
    exact = (wide - exact_mean) / np.sqrt(exact_variance + 1e-5) * weight
    assert_close(mean, exact_mean.reshape(mean.shape), 1e-6)
    np.testing.assert_allclose(variance, exact_variance.reshape(variance.shape), rtol=2e-6, atol=1e-12)
    np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)


def test_results_of_one_loop_over_donated_arguments(context: Context, rng: np.random.Generator) -> None:
    """Each result is written over an argument that the other one still needs."""
    text = """HloModule swap, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }
ENTRY main {
  x = f32[5000] parameter(0)
  y = f32[5000] parameter(1)
  sum = f32[5000] add(x, y)
  product = f32[5000] multiply(x, y)
  ROOT result = (f32[5000], f32[5000]) tuple(sum, product)
}"""
    x, y = (rng.standard_normal(5000).astype(np.float32) for _ in range(2))
    (total, product), _ = explained(context, text, x.copy(), y.copy())
    np.testing.assert_array_equal(total, x + y)
    np.testing.assert_array_equal(product, x * y)


@pytest.mark.parametrize("element", _DTYPES)
def test_cross_entropy_by_a_mask(element: str, context: Context, rng: np.random.Generator) -> None:
    """An index along the row, a predicate, three reductions and a store of one number a row."""
    text = f"""{reducer("greatest", "f32", "maximum")}{reducer("sum", "f32", "add")}
ENTRY main {{
  x = {element}[40,777] parameter(0)
  label = s32[40] parameter(1)
  wide = f32[40,777] convert(x)
  least = f32[] constant(-inf)
  zero = f32[] constant(0)
  zeros = f32[40,777] broadcast(zero), dimensions={{}}
  top = f32[40] reduce(wide, least), dimensions={{1}}, to_apply=greatest
  tops = f32[40,777] broadcast(top), dimensions={{0}}
  shifted = f32[40,777] subtract(wide, tops)
  e = f32[40,777] exponential(shifted)
  total = f32[40] reduce(e, zero), dimensions={{1}}, to_apply=sum
  logarithm = f32[40] log(total)
  column = s32[40,777] iota(), iota_dimension=1
  labels = s32[40,777] broadcast(label), dimensions={{0}}
  here = pred[40,777] compare(column, labels), direction=EQ
  picked = f32[40,777] select(here, shifted, zeros)
  pick = f32[40] reduce(picked, zero), dimensions={{1}}, to_apply=sum
  ROOT loss = f32[40] subtract(logarithm, pick)
}}"""
    x = rng.standard_normal((40, 777)).astype(_DTYPES[element])
    labels = rng.integers(777, size=40, dtype=np.int32)
    (ours,), _ = explained(context, text, x, labels)
    wide = torch.from_numpy(x.astype(np.float64))
    exact = torch.nn.functional.cross_entropy(wide, torch.from_numpy(labels).long(), reduction="none").numpy()
    np.testing.assert_allclose(ours, exact, rtol=1e-6)
