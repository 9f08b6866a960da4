"""Which 16-bit results keep float32's digits where that is allowed, and where they are rounded all the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.codegen.transforms.excess_precision import with_excess_precision
from flagos_backend.codegen.triton import schedule
from flagos_backend.importer import import_module
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Apply, Region
from flagos_backend.passes.pipelines import optimize
from programs import hlo_bytes
from support.triton_programs import H100

X = np.ones((4, 8), jnp.bfloat16)


def region_of(function: Callable[..., Any]) -> Region:
    items = schedule(flatten(optimize(import_module(hlo_bytes(function, X, X))).entry), H100).items
    (region,) = (item for item in items if isinstance(item, Region))
    return region


def operations(function: Callable[..., Any]) -> Counter[str]:
    """How often the region of a program has each operation with its type, conversions from 16 bits left out."""
    found = [e for e in with_excess_precision(region_of(function)).expressions() if isinstance(e, Apply)]
    return Counter(
        f"{e.opcode} {e.element_type.name}" for e in found if (str(e.opcode), e.element_type.name) != ("convert", "F32")
    )


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        pytest.param(lambda x, y: x * y, ["multiply BF16"], id="one operation"),
        pytest.param(lambda x, y: x * y - x, ["multiply F32", "subtract F32", "convert BF16"], id="two"),
        pytest.param(lambda x, y: -jnp.abs(x) + y, ["abs BF16", "negate BF16", "add BF16"], id="nothing to round"),
        pytest.param(
            lambda x, y: jnp.maximum(x * y, y) * y,
            ["multiply F32", "maximum F32", "multiply F32", "convert BF16"],
            id="through a choice",
        ),
        pytest.param(lambda x, y: (x * y).astype(jnp.float32), ["multiply F32"], id="converted to more"),
        pytest.param(
            lambda x, y: (x.astype(jnp.float32) * 3).astype(x.dtype) * y,
            ["multiply F32", "convert BF16", "multiply BF16"],
            id="rounded by the program",
        ),
        pytest.param(lambda x, y: jnp.floor(x * y), ["multiply BF16", "floor BF16"], id="whole numbers"),
        pytest.param(lambda x, y: x * y < 1, ["multiply BF16", "compare PRED"], id="compared"),
        pytest.param(lambda x, y: (x * y).max(-1), ["multiply BF16"], id="the maximum of a row"),
        pytest.param(
            lambda x, y: jnp.exp(x * y - y).astype(jnp.float32),
            ["multiply BF16", "subtract F32", "exponential F32"],
            id="the terms of a difference in an exponential",
        ),
        pytest.param(
            lambda x, y: (lax.optimization_barrier(x) * y, x * y + y),
            ["multiply F32", "convert BF16", "add F32", "convert BF16"],
            id="stored and read",
        ),
    ],
)
def test_operations(function: Callable[..., Any], expected: list[str]) -> None:
    assert operations(function) == Counter(expected)


def test_a_region_without_16_bits_is_the_same() -> None:
    region = region_of(lambda x, y: x.astype(jnp.float32) * y.astype(jnp.float32) + 1)
    assert with_excess_precision(region) is region
