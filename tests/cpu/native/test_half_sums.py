"""Sums of 16-bit floats, of products, windows and rows: added up in F32 and rounded once, without a library call."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context

_TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
_SUM = "{e}_{name} {{\n  x = {e}[] parameter(0)\n  y = {e}[] parameter(1)\n  ROOT r = {e}[] {name}(x, y)\n}}\n"


def _run(context: Context, text: str, *arguments: np.ndarray) -> tuple[np.ndarray, str]:
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        (result,) = run(executable, *(put(memory, argument) for argument in arguments))
        return get(result), executable.artifact(Artifact.EXPLANATION).decode()


def _assert_rounded_once(ours: np.ndarray, exact: np.ndarray, magnitude: np.ndarray) -> None:
    """Half a unit of the type, and what a sum in F32 of terms of ``magnitude`` in all may be off."""
    eps = float(ml_dtypes.finfo(ours.dtype).eps)
    np.testing.assert_array_less(
        np.abs(ours.astype(np.float64) - exact), eps / 2 * np.abs(exact) * 1.001 + 1e-6 * magnitude + 1e-30
    )


@pytest.mark.parametrize("element", _TYPES)
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (0, 2), (2,)], ids=str)
def test_reductions(element: str, dims: tuple[int, ...], context: Context, rng: np.random.Generator) -> None:
    """Ones of a number past the type's digits: sums that are rounded at each step stop growing."""
    shape = (70, 60, 33)
    x = (1 + rng.random(shape)).astype(_TYPES[element])
    start = np.asarray(3.0, _TYPES[element])
    kept = ",".join(str(size) for d, size in enumerate(shape) if d not in dims)
    text = f"""{_SUM.format(e=element, name="add")}
ENTRY main {{
  x = {element}[70,60,33] parameter(0)
  s = {element}[] parameter(1)
  ROOT r = {element}[{kept}] reduce(x, s), dimensions={{{",".join(map(str, dims))}}}, to_apply={element}_add
}}"""
    ours, explanation = _run(context, text, x, start)
    assert "0 library calls" in explanation
    exact = x.astype(np.float64).sum(dims) + 3.0
    _assert_rounded_once(ours, exact, exact)


@pytest.mark.parametrize("element", _TYPES)
@pytest.mark.parametrize("name", ["add", "multiply"])
@pytest.mark.parametrize("columns", [1, 5])
def test_scatters(element: str, name: str, columns: int, context: Context, rng: np.random.Generator) -> None:
    """Hundreds of updates of a row: a sum that is rounded at each of them stops growing. Rows outside are left out."""
    x = rng.uniform(0.9, 1.1, (6, columns)).astype(_TYPES[element])
    rows = rng.integers(-1, 8, (2000, 1)).astype(np.int32)
    updates = (1 + rng.random((2000, columns)) if name == "add" else rng.uniform(0.99, 1.01, (2000, columns))).astype(
        _TYPES[element]
    )
    text = f"""{_SUM.format(e=element, name=name)}
ENTRY main {{
  x = {element}[6,{columns}] parameter(0)
  i = s32[2000,1] parameter(1)
  u = {element}[2000,{columns}] parameter(2)
  ROOT r = {element}[6,{columns}] scatter(x, i, u), update_window_dims={{1}}, inserted_window_dims={{0}},
      scatter_dims_to_operand_dims={{0}}, index_vector_dim=1, to_apply={element}_{name}
}}"""
    ours, explanation = _run(context, text, x, rows, updates)
    assert "0 library calls" in explanation
    exact = x.astype(np.float64)
    for row, update in zip(rows[:, 0], updates.astype(np.float64), strict=True):
        if 0 <= row < 6:
            exact[row] = exact[row] + update if name == "add" else exact[row] * update
    # As many roundings of F32 as there are updates of a row, each of what it is by then.
    _assert_rounded_once(ours, exact, exact * 30)


@pytest.mark.parametrize("element", _TYPES)
@pytest.mark.parametrize("name", ["multiply", "maximum", "minimum"])
def test_other_reductions(element: str, name: str, context: Context, rng: np.random.Generator) -> None:
    x = rng.uniform(0.8, 1.2, (9, 40)).astype(_TYPES[element])
    text = f"""{_SUM.format(e=element, name=name)}
ENTRY main {{
  x = {element}[9,40] parameter(0)
  s = {element}[] constant(1)
  ROOT r = {element}[9] reduce(x, s), dimensions={{1}}, to_apply={element}_{name}
}}"""
    ours, explanation = _run(context, text, x)
    assert "0 library calls" in explanation
    combine = {"multiply": np.prod, "maximum": np.max, "minimum": np.min}[name]
    exact = combine(x.astype(np.float64), axis=1, initial=1.0)
    _assert_rounded_once(ours, exact, np.abs(exact))


@pytest.mark.parametrize("element", _TYPES)
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions(element: str, stride: int, context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 13, 5)).astype(_TYPES[element])
    kernel = rng.standard_normal((3, 5, 7)).astype(_TYPES[element])
    count = (13 + 2 - 3) // stride + 1
    text = f"""ENTRY main {{
  x = {element}[2,13,5] parameter(0)
  k = {element}[3,5,7] parameter(1)
  ROOT r = {element}[2,{count},7] convolution(x, k), window={{size=3 stride={stride} pad=1_1}}, dim_labels=b0f_0io->b0f
}}"""
    ours, explanation = _run(context, text, x, kernel)
    assert "0 library calls" in explanation
    padded = np.pad(x.astype(np.float64), ((0, 0), (1, 1), (0, 0)))
    windows = np.stack([padded[:, i * stride : i * stride + 3] for i in range(count)], axis=1)
    exact = np.einsum("bnkf,kfo->bno", windows, kernel.astype(np.float64))
    magnitude = np.einsum("bnkf,kfo->bno", np.abs(windows), np.abs(kernel.astype(np.float64)))
    _assert_rounded_once(ours, exact, magnitude)


@pytest.mark.parametrize("element", _TYPES)
def test_weights_of_a_loop_are_converted_before_it(element: str, context: Context, rng: np.random.Generator) -> None:
    w = (rng.standard_normal((40, 40)) / 8).astype(_TYPES[element])
    x = rng.standard_normal((9, 40)).astype(_TYPES[element])
    text = f"""body {{
  s = (s32[], {element}[9,40], {element}[40,40]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  x = {element}[9,40] get-tuple-element(s), index=1
  w = {element}[40,40] get-tuple-element(s), index=2
  t = {element}[40,40] transpose(w), dimensions={{1,0}}
  d = {element}[9,40] dot(x, t), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  one = s32[] constant(1)
  n = s32[] add(i, one)
  ROOT r = (s32[], {element}[9,40], {element}[40,40]) tuple(n, d, w)
}}
condition {{
  s = (s32[], {element}[9,40], {element}[40,40]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  four = s32[] constant(4)
  ROOT r = pred[] compare(i, four), direction=LT
}}
ENTRY main {{
  x = {element}[9,40] parameter(0)
  w = {element}[40,40] parameter(1)
  zero = s32[] constant(0)
  s = (s32[], {element}[9,40], {element}[40,40]) tuple(zero, x, w)
  l = (s32[], {element}[9,40], {element}[40,40]) while(s), condition=condition, body=body
  ROOT r = {element}[9,40] get-tuple-element(l), index=1
}}"""
    ours, explanation = _run(context, text, x, w)
    assert "library call" not in explanation.partition("steps")[2].partition("memory")[0]
    exact = x.astype(np.float64)
    for _ in range(4):
        exact = (exact @ w.astype(np.float64).T).astype(_TYPES[element]).astype(np.float64)
    eps = float(ml_dtypes.finfo(ours.dtype).eps)
    np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=4 * eps, atol=4 * eps * np.abs(exact).max())
