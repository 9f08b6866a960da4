"""Argmin and argmax as reductions of generated kernels, against NumPy, which like XLA takes a NaN first and the first
of equals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cpu.triton.harness import run_generated
from flagos_backend.codegen.triton import RegionKernel
from flagos_backend.importer import import_module
from flagos_backend.passes.accelerator.pack_argminmax import pack_argminmax
from programs import hlo_bytes
from support.against_xla import hlo_of_text
from support.argminmax import DTYPES, answer, array_of, text_of
from support.passes import SIMULATED, for_accelerator, run_until

BF16 = ml_dtypes.bfloat16
# Shape, dimension: rows and columns, single elements and rows, several of a block, those of which partial results stay.
_SHAPES = [
    ((5, 700), 1),
    ((700, 5), 0),
    ((3, 40, 30), 1),
    ((4, 1), 1),
    ((1, 9), 1),
    ((7, 1, 3), 1),
    ((130,), 0),
    ((40, 3), 1),
    ((0, 4), 1),
]
# Positions take more bits than a narrow element leaves of 32, or than half of them.
_LONG = [("u8", 70000), ("f16", 70000), ("bf16", 70000), ("bf16", 65536), ("s16", 65537), ("f32", 70000)]


def run(hlo: bytes, *arrays: np.ndarray) -> tuple[list[np.ndarray], list[RegionKernel]]:
    return run_generated(for_accelerator(import_module(hlo)).entry, arrays)


def check(function: Callable[..., Any], *arrays: np.ndarray) -> tuple[list[np.ndarray], list[RegionKernel]]:
    return run(hlo_bytes(function, *arrays), *arrays)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("element", DTYPES)
def test_rows_and_columns(element: str, largest: bool, rng: np.random.Generator) -> None:
    dtype, index = np.dtype(DTYPES[element]), "s64" if element.startswith("f") else "s32"
    for shape, dimension in _SHAPES:
        x = array_of(dtype, shape, rng)
        (values, positions), made = run(hlo_of_text(text_of(element, dtype, index, shape, dimension, largest)), x)
        best, expected = answer(x, dimension, largest)
        np.testing.assert_array_equal(positions, expected)
        assert positions.dtype == np.dtype(np.int64 if index == "s64" else np.int32)
        assert values.dtype == dtype
        np.testing.assert_array_equal(values.astype(best.dtype), best)
        assert len(made) == 1 or not x.size, "value and position of one array are one kernel"


@pytest.mark.parametrize("index", ["u32", "u64"])
def test_unsigned_positions(index: str, rng: np.random.Generator) -> None:
    for element in ("f32", "s8", "s64"):
        x = array_of(np.dtype(DTYPES[element]), (6, 50), rng)
        (_, positions), _ = run(hlo_of_text(text_of(element, x.dtype, index, x.shape, 1, True)), x)
        np.testing.assert_array_equal(positions, answer(x, 1, True)[1])
        assert positions.dtype == np.dtype(f"uint{index[1:]}")


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("element", "size"), _LONG)
def test_long_rows(element: str, size: int, largest: bool, rng: np.random.Generator) -> None:
    x = array_of(np.dtype(DTYPES[element]), (2, size), rng)
    find = jnp.argmax if largest else jnp.argmin
    (positions,), (kernel,) = check(lambda x: find(x, 1), x)
    np.testing.assert_array_equal(positions, answer(x, 1, largest)[1])
    assert len(kernel.launches) == 2, "partial results, and what they give"


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("element", ["f32", "bf16", "s64"])
def test_rows_that_are_walked(element: str, rng: np.random.Generator) -> None:
    x = array_of(np.dtype(DTYPES[element]), (9, 1500), rng)
    (values, positions), _ = run(hlo_of_text(text_of(element, x.dtype, "s32", x.shape, 1, False)), x)
    best, expected = answer(x, 1, False)
    np.testing.assert_array_equal(positions, expected)
    np.testing.assert_array_equal(values.astype(best.dtype), best)


@pytest.mark.parametrize("element", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("largest", [True, False])
def test_what_floats_have(element: str, largest: bool) -> None:
    """NaNs of either sign and any payload, zeros of either sign, infinities, subnormal numbers; ties everywhere."""
    dtype = np.dtype(DTYPES[element])
    bits = np.dtype(f"uint{8 * dtype.itemsize}")
    inf, zero = np.array([np.inf, 0.0], dtype).view(bits)
    sign, one = bits.type(1 << (8 * dtype.itemsize - 1)), bits.type(1)
    nan, negative, loud = inf + one, (inf | sign) + one, sign - one
    rows = [
        [zero, sign, zero, sign],
        [sign, zero, sign, zero],
        [inf, nan, negative, loud],
        [inf, negative, nan, inf],
        [zero, loud | sign, loud, negative],
        [inf | sign] * 4,
        [inf] * 4,
        [inf | sign, inf, inf | sign, inf],
        [zero, one, one + one, one + one],
        [sign, sign | one, sign | (one + one), sign | (one + one)],
        [one, sign | one, zero, sign],
        [inf - one, inf, inf | sign, (inf | sign) - one],
    ]
    x = np.array(rows, bits).view(dtype)
    hlo = hlo_of_text(text_of(element, dtype, "s32", x.shape, 1, largest))
    (values, positions), _ = run(hlo, x)
    best, expected = answer(x, 1, largest)
    np.testing.assert_array_equal(positions, expected)
    np.testing.assert_array_equal(values.astype(best.dtype), best)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("element", ["pred", "s8", "u8", "s32", "u32", "s64", "u64", "f32", "bf16"])
def test_limits_of_a_type(element: str, largest: bool) -> None:
    """Those that a reduction begins with, and their neighbours."""
    dtype = np.dtype(DTYPES[element])
    if dtype == np.bool_:
        low, high = False, True
    elif dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        low, high = -np.inf, np.inf
    x = np.array([[low] * 3, [high] * 3, [low, high, low], [high, low, high], [low, low, high]], dtype)
    (values, positions), _ = run(hlo_of_text(text_of(element, dtype, "s32", x.shape, 1, largest)), x)
    best, expected = answer(x, 1, largest)
    np.testing.assert_array_equal(positions, expected)
    np.testing.assert_array_equal(values.astype(best.dtype), best)


def test_all_of_an_array(rng: np.random.Generator) -> None:
    x = array_of(np.dtype(np.float32), (30, 70), rng)
    (position,), made = check(jnp.argmax, x)
    assert position == np.argmax(x)
    assert len(made) == 1


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_with_what_comes_before_and_after(dtype: np.dtype, rng: np.random.Generator) -> None:
    """A masked product, of which narrow floats are rounded first, and arithmetic with the positions."""
    x, scale = (rng.standard_normal(shape).astype(dtype) for shape in ((40, 60), (60,)))

    def chosen(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.where(jax.lax.broadcasted_iota(np.int32, x.shape, 1) < 20, -jnp.inf, x * scale)
        found = jnp.argmax(scores, -1)
        return found, found * 2 + 1

    (found, after), made = check(chosen, x, scale)
    product = (x.astype(np.float32) * scale.astype(np.float32)).astype(dtype).astype(np.float32)
    expected = np.argmax(np.where(np.arange(60) < 20, -np.inf, product), -1)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(after, expected * 2 + 1)
    assert len(made) == 1


def test_value_and_position_of_what_is_computed(rng: np.random.Generator) -> None:
    """A step of Viterbi's algorithm: columns of sums."""
    scores, moves = (rng.standard_normal(shape).astype(np.float32) for shape in ((50,), (50, 50)))
    (best, position), made = check(lambda s, m: ((s[:, None] + m).max(0), jnp.argmax(s[:, None] + m, 0)), scores, moves)
    sums = scores[:, None] + moves
    np.testing.assert_array_equal(best, sums.max(0))
    np.testing.assert_array_equal(position, sums.argmax(0))
    assert len(made) == 1


def test_random_choices_are_one_kernel(rng: np.random.Generator) -> None:
    logits = rng.standard_normal((6, 300)).astype(np.float32)
    key = np.array([3, 7], np.uint32)

    def choose(key: jax.Array, logits: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.wrap_key_data(key), logits)

    (found,), made = check(choose, key, logits)
    with jax.default_device(jax.devices("cpu")[0]):
        noise = np.asarray(jax.random.gumbel(jax.random.wrap_key_data(key), logits.shape))
    scores = logits + noise
    taken = np.take_along_axis(scores, found[:, None], 1)[:, 0]
    np.testing.assert_allclose(taken, scores.max(1), rtol=1e-5)
    assert len(made) == 1


def test_columns_whose_reductions_are_split(rng: np.random.Generator) -> None:
    x = array_of(np.dtype(np.float32), (3000, 40), rng)
    (positions,), (kernel,) = check(lambda x: jnp.argmax(x, 0), x)
    np.testing.assert_array_equal(positions, answer(x, 0, True)[1])
    assert len(kernel.launches) == 2


def test_rows_and_columns_of_one_array(rng: np.random.Generator) -> None:
    x = array_of(np.dtype(np.float32), (70, 33), rng)
    (rows, columns), _ = check(lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0)), x)
    np.testing.assert_array_equal(rows, answer(x, 1, True)[1])
    np.testing.assert_array_equal(columns, answer(x, 0, False)[1])


@pytest.mark.parametrize(
    ("old", "new"),
    [("a, a), direction=NE", "a, b), direction=NE"), ("zero = s32[] constant(0)", "zero = s32[] constant(5)")],
)
def test_another_computation_is_left_as_it_is(old: str, new: str) -> None:
    text = text_of("f32", np.dtype(np.float32), "s32", (4, 50), 1, largest=True)
    assert old in text
    module = run_until("pack_argminmax", import_module(hlo_of_text(text.replace(old, new))), SIMULATED)
    assert pack_argminmax(module) is module
