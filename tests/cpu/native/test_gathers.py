"""Gathers in native code against stock XLA: which windows, where they stand in the result, and starts out of range."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context
from programs import run_on_xla
from support.against_xla import hlo_of_text

_GATHERS = {
    "one element of each row": (
        "[64,1000] [64,1,1] [64,1]",
        "offset_dims={}, collapsed_slice_dims={1}, start_index_map={1}, index_vector_dim=2, slice_sizes={1,1}, "
        "operand_batching_dims={0}, start_indices_batching_dims={0}",
    ),
    "rows of a table": (
        "[50,33] [7,9] [7,9,33]",
        "offset_dims={2}, collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=2, slice_sizes={1,33}",
    ),
    "columns, in front of the batch": (
        "[12,40] [9] [12,9]",
        "offset_dims={0}, collapsed_slice_dims={1}, start_index_map={1}, index_vector_dim=1, slice_sizes={12,1}",
    ),
    "columns of many rows, for all threads": (
        "[200,40] [700] [200,700]",
        "offset_dims={0}, collapsed_slice_dims={1}, start_index_map={1}, index_vector_dim=1, slice_sizes={200,1}",
    ),
    "columns of boxes": (
        "[33,6,40] [2,300] [33,6,2,300]",
        "offset_dims={0,1}, collapsed_slice_dims={2}, start_index_map={2}, index_vector_dim=2, slice_sizes={33,6,1}",
    ),
    "windows of two starts, given the other way round": (
        "[20,30,5] [2,11] [3,11,4,5]",
        "offset_dims={0,2,3}, collapsed_slice_dims={}, start_index_map={1,0}, index_vector_dim=0, slice_sizes={3,4,5}",
    ),
    "batches that stand apart": (
        "[6,31,4] [4,5,6] [4,5,6,3]",
        "offset_dims={3}, collapsed_slice_dims={}, start_index_map={1}, index_vector_dim=3, slice_sizes={1,3,1}, "
        "operand_batching_dims={0,2}, start_indices_batching_dims={2,0}",
    ),
    "a single window": (
        "[9,8] [2] [4,3]",
        "offset_dims={0,1}, collapsed_slice_dims={}, start_index_map={0,1}, index_vector_dim=0, slice_sizes={4,3}",
    ),
    "many windows, for all threads": (
        "[300,40] [200000,1] [200000]",
        "offset_dims={}, collapsed_slice_dims={0,1}, start_index_map={0}, index_vector_dim=1, slice_sizes={1,1}",
    ),
}
_DTYPES = {
    "pred": np.bool_,
    "s8": np.int8,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "s64": np.int64,
    "c64": np.complex64,
    "c128": np.complex128,
}
_INDICES = {"s8": np.int8, "u16": np.uint16, "s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64}


def _text(kind: str, element: str, index: str) -> tuple[str, Sequence[Sequence[int]]]:
    shapes, attributes = _GATHERS[kind]
    array, indices, result = shapes.split()
    text = f"""ENTRY main {{
  x = {element}{array} parameter(0)
  i = {index}{indices} parameter(1)
  ROOT y = {element}{result} gather(x, i), {attributes}
}}"""
    return text, [tuple(map(int, dims.strip("[]").split(","))) for dims in (array, indices)]


def _check(context: Context, text: str, x: np.ndarray, indices: np.ndarray) -> None:
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        assert "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        ours = get(run(executable, put(memory, x), put(memory, indices))[0])
    (theirs,) = run_on_xla(hlo_of_text(text), (x, indices))
    assert ours.tobytes() == np.asarray(theirs).tobytes()


def _indices(rng: np.random.Generator, dtype: type, dims: Sequence[int]) -> np.ndarray:
    """Mostly in range; some beyond either end, as far as the type goes."""
    info = np.iinfo(dtype)
    indices = rng.integers(max(info.min, -3), min(info.max, 45), dims).astype(dtype)
    indices.reshape(-1)[:2] = info.min, info.max
    return indices


def _array(rng: np.random.Generator, dtype: type, dims: Sequence[int]) -> np.ndarray:
    x = rng.standard_normal(dims) * 30
    return (x > 0) if dtype is np.bool_ else x.astype(dtype)


@pytest.mark.parametrize("kind", _GATHERS)
def test_gather(kind: str, context: Context, rng: np.random.Generator) -> None:
    text, (array, indices) = _text(kind, "f32", "s32")
    _check(context, text, _array(rng, np.float32, array), _indices(rng, np.int32, indices))


@pytest.mark.parametrize("index", _INDICES)
@pytest.mark.parametrize("element", _DTYPES)
@pytest.mark.parametrize(
    "kind", ["windows of two starts, given the other way round", "one element of each row", "columns of boxes"]
)
def test_types(kind: str, element: str, index: str, context: Context, rng: np.random.Generator) -> None:
    text, (array, indices) = _text(kind, element, index)
    x = _array(rng, _DTYPES[element], array)
    with jax.enable_x64(True):
        _check(context, text, x, _indices(rng, _INDICES[index], indices))


def test_nan_and_signed_zeros_come_as_they_are(context: Context) -> None:
    text, (array, indices) = _text("one element of each row", "f32", "s32")
    x = np.zeros(array, np.float32)
    x[:, 0], x[:, 999] = -0.0, np.float32(np.nan)
    x[5, 999] = -np.inf
    _check(context, text, x, np.tile(np.array([-1, 5000], np.int32), 32).reshape(indices))


@pytest.mark.parametrize(("array", "batch"), [((4, 0), 0), ((4, 3), 0), ((0, 3), 0)])
def test_gathers_of_nothing(array: tuple[int, int], batch: int, context: Context) -> None:
    text = f"""ENTRY main {{
  x = f32[{array[0]},{array[1]}] parameter(0)
  i = s32[{batch},1] parameter(1)
  ROOT y = f32[{batch},{array[1]}] gather(x, i), offset_dims={{1}}, collapsed_slice_dims={{0}}, start_index_map={{0}},
    index_vector_dim=1, slice_sizes={{{min(array[0], 1)},{array[1]}}}
}}"""
    memory = context.devices[0].default_memory
    x, indices = np.zeros(array, np.float32), np.zeros((batch, 1), np.int32)
    with compile(context, text) as executable:
        assert get(run(executable, put(memory, x), put(memory, indices))[0]).shape == (batch, array[1])
