"""Argmin and argmax in native code against NumPy, which like XLA takes a NaN first and the first of equals."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context
from support.argminmax import DTYPES, answer, array_of, text_of

# Shape, dimension: rows and columns, few and many, short and long; those of which a row is cut into segments.
_SHAPES = [
    ((5, 700), 1),
    ((700, 5), 0),
    ((3, 40, 300), 1),
    ((9, 16), 1),
    ((1000, 10), 1),
    ((517, 64), 1),
    ((300, 1), 1),
    ((4, 1), 1),
    ((7, 1, 3), 1),
    ((100003,), 0),
    ((2, 30000), 1),
    ((1500, 130), 0),
    ((2, 20000, 3), 1),
    ((64, 64, 64), 0),
    ((0, 4), 1),
]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("shape", "dimension"), _SHAPES)
@pytest.mark.parametrize("element", DTYPES)
def test_minima_and_maxima(
    element: str,
    shape: tuple[int, ...],
    dimension: int,
    largest: bool,
    context: Context,
    rng: np.random.Generator,
) -> None:
    dtype = np.dtype(DTYPES[element])
    x = array_of(dtype, shape, rng)
    index = "s64" if element.endswith("64") else "s32"
    with compile(context, text_of(element, dtype, index, shape, dimension, largest)) as executable:
        assert "with 0 library calls" in executable.artifact(Artifact.EXPLANATION).decode()
        values, positions = map(get, run(executable, put(context.devices[0].default_memory, x)))
    best, expected = answer(x, dimension, largest)
    np.testing.assert_array_equal(positions, expected)
    assert values.dtype == dtype
    np.testing.assert_array_equal(values.astype(best.dtype), best)


@pytest.mark.parametrize("largest", [True, False])
def test_all_elements_the_least_there_is(largest: bool, context: Context) -> None:
    dtype = np.dtype(np.float32)
    x = np.full((3, 600), -np.inf if largest else np.inf, dtype)
    with compile(context, text_of("f32", dtype, "s32", x.shape, 1, largest)) as executable:
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
    text = text_of("f32", np.dtype(np.float32), "s32", (4, 50), 1, largest=True)
    assert old in text
    with compile(context, text.replace(old, new)) as executable:
        assert "native argminmax" not in executable.artifact(Artifact.EXPLANATION).decode()


def test_positions_of_another_dimension_are_left_to_the_library(context: Context) -> None:
    text = text_of("f32", np.dtype(np.float32), "s32", (50, 50), 1, largest=True)
    text = text.replace("broadcast(number), dimensions={1}", "broadcast(number), dimensions={0}")
    with compile(context, text) as executable:
        assert "native argminmax" not in executable.artifact(Artifact.EXPLANATION).decode()
