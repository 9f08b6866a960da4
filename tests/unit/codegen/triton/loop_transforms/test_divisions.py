"""Which quotients by a shared divisor are corrected: those whose last bits somebody sees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from support.triton_programs import bf16
from support.triton_sources import sources

SHAPES = [bf16(512, 4096), bf16(512, 1)]


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, s: x / s, id="stored"),
        pytest.param(lambda x, s: jnp.floor(x / s), id="whole numbers of it, as it is rounded"),
        pytest.param(lambda x, s: x / s >= 1, id="compared, as it is rounded"),
        pytest.param(lambda x, s: ((x / s).astype(jnp.float32) * 3).astype(x.dtype), id="wider, and rounded again"),
    ],
)
def test_bfloat16_that_is_rounded_needs_no_correction(function: Callable[..., Any]) -> None:
    source = sources(function, SHAPES)
    assert "divide_corrected" not in source and "divisor_scale" in source


def test_float16_is_corrected() -> None:
    """Its quotients lie as near to the middle between two numbers as a product with a reciprocal is off."""
    shapes = [jax.ShapeDtypeStruct(shape.shape, jnp.float16) for shape in SHAPES]
    assert "fm.divide_corrected(" in sources(lambda x, s: x / s, shapes)
    assert "fm.divide_corrected(" in sources(lambda x: jax.nn.softmax(x, -1), shapes[:1])


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, s: jnp.floor((x / s).astype(jnp.float32)), id="whole numbers of it as it is held"),
        pytest.param(lambda x, s: (x / s).astype(jnp.float32) >= 1, id="compared as it is held"),
        pytest.param(lambda x, s: jnp.round((-(x / s) / 2).astype(jnp.float32)), id="through what is not rounded"),
        pytest.param(lambda x, s: (x / s).astype(jnp.float32), id="stored as it is held"),
    ],
)
def test_bfloat16_that_is_seen_as_it_is_held_is_corrected(function: Callable[..., Any]) -> None:
    assert "fm.divide_corrected(" in sources(function, SHAPES, excess=True)
    assert "divide_corrected" not in sources(function, SHAPES)
