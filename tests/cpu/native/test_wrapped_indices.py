"""Gathers and scatters whose negative indices count from the end, against stock XLA: no loop raises them for another
step. Single elements are read in a loop, which raises their indices itself."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context
from programs import run_on_xla
from support.against_xla import hlo_of_text

_TYPES = {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64}


def _wrapped(name: str, index: str, dims: str, wrap: int, direction: str = "LT") -> str:
    """HLO of ``name``w: ``name``, whose negative numbers are raised by ``wrap``."""
    return f"""
  {name}0 = {index}[] constant(0)
  {name}n = {index}[] constant({wrap})
  {name}z = {index}[{dims}] broadcast({name}0), dimensions={{}}
  {name}m = {index}[{dims}] broadcast({name}n), dimensions={{}}
  {name}l = pred[{dims}] compare({name}, {name}z), direction={direction}
  {name}r = {index}[{dims}] add({name}, {name}m)
  {name}w = {index}[{dims}] select({name}l, {name}r, {name})"""


def _elements(index: str, wrap: int = 40, direction: str = "LT") -> str:
    return f"""ENTRY main {{
  x = f32[40] parameter(0)
  i = {index}[700] parameter(1){_wrapped("i", index, "700", wrap, direction)}
  s = {index}[700,1] reshape(iw)
  ROOT y = f32[700] gather(x, s), offset_dims={{}}, collapsed_slice_dims={{0}}, start_index_map={{0}},
    index_vector_dim=1, slice_sizes={{1}}
}}"""


def _rows(index: str, wrap: int = 40, direction: str = "LT") -> str:
    return f"""ENTRY main {{
  x = f32[40,5] parameter(0)
  i = {index}[700] parameter(1){_wrapped("i", index, "700", wrap, direction)}
  s = {index}[700,1] reshape(iw)
  ROOT y = f32[700,5] gather(x, s), offset_dims={{1}}, collapsed_slice_dims={{0}}, start_index_map={{0}},
    index_vector_dim=1, slice_sizes={{1,5}}
}}"""


_OF_MATRIX = f"""ENTRY main {{
  x = s16[20,30] parameter(0)
  i = s32[7,90] parameter(1)
  j = s32[7,90] parameter(2){_wrapped("i", "s32", "7,90", 20)}{_wrapped("j", "s32", "7,90", 30)}
  a = s32[7,90,1] reshape(iw)
  b = s32[7,90,1] reshape(jw)
  s = s32[7,90,2] concatenate(a, b), dimensions={{2}}
  ROOT y = s16[7,90] gather(x, s), offset_dims={{}}, collapsed_slice_dims={{0,1}}, start_index_map={{0,1}},
    index_vector_dim=2, slice_sizes={{1,1}}
}}"""

_ONE_OF_TWO_IS_RAISED = f"""ENTRY main {{
  x = f32[20,30,5] parameter(0)
  i = s32[90] parameter(1)
  j = s32[90] parameter(2){_wrapped("i", "s32", "90", 20)}
  a = s32[1,90] reshape(iw)
  k = s32[90] add(j, j)
  b = s32[1,90] reshape(k)
  s = s32[2,90] concatenate(b, a), dimensions={{0}}
  ROOT y = f32[90,5] gather(x, s), offset_dims={{1}}, collapsed_slice_dims={{0,1}}, start_index_map={{1,0}},
    index_vector_dim=0, slice_sizes={{1,1,5}}
}}"""

_NONE_IS_RAISED = """ENTRY main {
  x = f32[20,30] parameter(0)
  i = s32[7,90] parameter(1)
  j = s32[7,90] parameter(2)
  a = s32[7,90,1] reshape(i)
  b = s32[7,90,1] reshape(j)
  s = s32[7,90,2] concatenate(a, b), dimensions={2}
  ROOT y = f32[7,90] gather(x, s), offset_dims={}, collapsed_slice_dims={0,1}, start_index_map={0,1},
    index_vector_dim=2, slice_sizes={1,1}
}"""

_BOTH_NUMBERS_AT_ONCE = f"""ENTRY main {{
  x = f32[20,20] parameter(0)
  i = s32[90,2] parameter(1){_wrapped("i", "s32", "90,2", 20)}
  ROOT y = f32[90] gather(x, iw), offset_dims={{}}, collapsed_slice_dims={{0,1}}, start_index_map={{0,1}},
    index_vector_dim=1, slice_sizes={{1,1}}
}}"""

_TRANSPOSED = f"""ENTRY main {{
  x = f32[40] parameter(0)
  i = s32[7,90] parameter(1){_wrapped("i", "s32", "7,90", 40)}
  t = s32[90,7] transpose(iw), dimensions={{1,0}}
  s = s32[90,7,1] reshape(t)
  ROOT y = f32[90,7] gather(x, s), offset_dims={{}}, collapsed_slice_dims={{0}}, start_index_map={{0}},
    index_vector_dim=2, slice_sizes={{1}}
}}"""

_ADDED = f"""add {{
  p = s32[] parameter(0)
  q = s32[] parameter(1)
  ROOT r = s32[] add(p, q)
}}
ENTRY main {{
  x = s32[20,30] parameter(0)
  i = s32[700] parameter(1)
  j = s32[700] parameter(2)
  v = s32[700] parameter(3){_wrapped("i", "s32", "700", 20)}{_wrapped("j", "s32", "700", 30)}
  a = s32[700,1] reshape(iw)
  b = s32[700,1] reshape(jw)
  s = s32[700,2] concatenate(a, b), dimensions={{1}}
  ROOT y = s32[20,30] scatter(x, s, v), update_window_dims={{}}, inserted_window_dims={{0,1}},
    scatter_dims_to_operand_dims={{0,1}}, index_vector_dim=1, to_apply=add
}}"""

# Rows of one array each, in the order of its batch: threads share them.
_ROWS_OF_A_BATCH = f"""add {{
  p = s32[] parameter(0)
  q = s32[] parameter(1)
  ROOT r = s32[] add(p, q)
}}
ENTRY main {{
  x = s32[8,30] parameter(0)
  i = s32[8,9000] parameter(1)
  v = s32[8,9000] parameter(2){_wrapped("i", "s32", "8,9000", 30)}
  s = s32[8,9000,1] reshape(iw)
  ROOT y = s32[8,30] scatter(x, s, v), update_window_dims={{}}, inserted_window_dims={{1}},
    scatter_dims_to_operand_dims={{1}}, index_vector_dim=2, input_batching_dims={{0}},
    scatter_indices_batching_dims={{0}}, to_apply=add
}}"""


def _check(context: Context, text: str, operands: Sequence[np.ndarray], loops: int) -> None:
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        explanation = executable.artifact(Artifact.EXPLANATION).decode()
        assert "with 0 library calls" in explanation and explanation.count("native loop") == loops, explanation
        ours = get(run(executable, *(put(memory, x) for x in operands))[0])
    with jax.enable_x64(True):
        (theirs,) = run_on_xla(hlo_of_text(text), tuple(operands))
    np.testing.assert_array_equal(ours, np.asarray(theirs))


def _indices(rng: np.random.Generator, dtype: type, size: int, *dims: int) -> np.ndarray:
    """From either end, a few beyond it, and as far as the type goes."""
    indices = rng.integers(-size - 3, size + 3, dims).astype(dtype)
    indices.reshape(-1)[:3] = np.iinfo(dtype).min, np.iinfo(dtype).max, -1
    return indices


@pytest.mark.parametrize("index", _TYPES)
def test_elements_and_rows(index: str, context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 5)).astype(np.float32)
    indices = _indices(rng, _TYPES[index], 40, 700)
    _check(context, _elements(index), (x[:, 0].copy(), indices), loops=1)
    _check(context, _rows(index), (x, indices), loops=0)


@pytest.mark.parametrize(("wrap", "direction"), [(-40, "LT"), (40, "GT"), (40, "LE")])
def test_what_looks_alike(wrap: int, direction: str, context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 5)).astype(np.float32)
    indices = _indices(rng, np.int32, 40, 700)
    _check(context, _elements("s32", wrap, direction), (x[:, 0].copy(), indices), loops=1)
    _check(context, _rows("s32", wrap, direction), (x, indices), loops=1)


@pytest.mark.parametrize("wrap", [0, 7, 41, 2**31 - 1])
def test_raised_by_other_numbers_than_the_size(wrap: int, context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 5)).astype(np.float32)
    indices = _indices(rng, np.int32, 40, 700)
    _check(context, _elements("s32", wrap), (x[:, 0].copy(), indices), loops=1)
    _check(context, _rows("s32", wrap), (x, indices), loops=0)


def test_unsigned_indices_are_never_negative(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal(40).astype(np.float32)
    indices = rng.integers(0, 300, 700).astype(np.uint8)
    memory = context.devices[0].default_memory
    with compile(context, _elements("u8")) as executable:
        ours = get(run(executable, put(memory, x), put(memory, indices))[0])
    np.testing.assert_array_equal(ours, x[np.minimum(indices, 39)])


def test_elements_of_a_matrix(context: Context, rng: np.random.Generator) -> None:
    x = rng.integers(-1000, 1000, (20, 30)).astype(np.int16)
    _check(context, _OF_MATRIX, (x, _indices(rng, np.int32, 20, 7, 90), _indices(rng, np.int32, 30, 7, 90)), loops=1)


def test_one_number_of_two(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((20, 30, 5)).astype(np.float32)
    operands = (x, _indices(rng, np.int32, 20, 90), _indices(rng, np.int32, 15, 90))
    _check(context, _ONE_OF_TWO_IS_RAISED, operands, loops=1)


def test_numbers_that_are_not_raised(context: Context, rng: np.random.Generator) -> None:
    """Each is read where it is, and clamped."""
    x = rng.standard_normal((20, 30)).astype(np.float32)
    operands = (x, _indices(rng, np.int32, 20, 7, 90), _indices(rng, np.int32, 30, 7, 90))
    _check(context, _NONE_IS_RAISED, operands, loops=1)


def test_both_numbers_of_one_array(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal((20, 20)).astype(np.float32)
    _check(context, _BOTH_NUMBERS_AT_ONCE, (x, _indices(rng, np.int32, 20, 90, 2)), loops=1)


def test_indices_in_another_order(context: Context, rng: np.random.Generator) -> None:
    x = rng.standard_normal(40).astype(np.float32)
    _check(context, _TRANSPOSED, (x, _indices(rng, np.int32, 40, 7, 90)), loops=1)


def test_scatter(context: Context, rng: np.random.Generator) -> None:
    x, v = rng.integers(0, 1000, (20, 30)).astype(np.int32), rng.integers(0, 1000, 700).astype(np.int32)
    _check(context, _ADDED, (x, _indices(rng, np.int32, 20, 700), _indices(rng, np.int32, 30, 700), v), loops=0)


def test_scatter_that_threads_share(context: Context, rng: np.random.Generator) -> None:
    x, v = rng.integers(0, 1000, (8, 30)).astype(np.int32), rng.integers(0, 1000, (8, 9000)).astype(np.int32)
    _check(context, _ROWS_OF_A_BATCH, (x, _indices(rng, np.int32, 30, 8, 9000), v), loops=0)


def test_an_array_that_is_its_own_index(context: Context, rng: np.random.Generator) -> None:
    """Elements at the places that the array names; the result may not be written over what is still read."""
    text = f"""ENTRY main {{
  i = s32[40] parameter(0){_wrapped("i", "s32", "40", 40)}
  s = s32[40,1] reshape(iw)
  g = s32[40] gather(i, s), offset_dims={{}}, collapsed_slice_dims={{0}}, start_index_map={{0}},
    index_vector_dim=1, slice_sizes={{1}}
  ROOT y = s32[40] add(g, i)
}}"""
    _check(context, text, (_indices(rng, np.int32, 40, 40),), loops=1)
