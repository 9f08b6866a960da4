"""Quotients and products that are logarithms to base 2, and those that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.codegen.transforms.log2 import with_base_two
from flagos_backend.fusion.fuse import fuse
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.region import Apply, Region
from flagos_backend.passes.pipelines import optimize
from programs import hlo_bytes

X = np.ones(8, np.float32)


def operations(function: Callable[..., Any], x: np.ndarray, excess_precision: bool = False) -> list[tuple[Opcode, str]]:
    schedule = fuse(flatten(optimize(import_module(hlo_bytes(function, x))).entry))
    (region,) = (item for item in schedule.items if isinstance(item, Region))
    found = with_base_two(region, excess_precision).expressions()
    return [(e.opcode, e.detail) for e in found if isinstance(e, Apply)]


def test_log2_is_one_operation() -> None:
    assert operations(jnp.log2, X) == [(Opcode.LOG, Intrinsic.BASE_TWO)]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_of_16_bits_only_with_excess_precision(dtype: Any) -> None:
    assert operations(jnp.log2, X.astype(dtype), excess_precision=True) == [(Opcode.LOG, Intrinsic.BASE_TWO)]
    assert (Opcode.LOG, Intrinsic.BASE_TWO) not in operations(jnp.log2, X.astype(dtype))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_product_with_the_reciprocal_is_one_operation(dtype: Any) -> None:
    """jax.numpy.log2 from JAX 0.11 on."""
    factor = np.asarray(1.4426950408889634, dtype)
    for product in (lambda x: jnp.log(x) * factor, lambda x: factor * jnp.log(x)):
        assert operations(product, X.astype(dtype), excess_precision=True) == [(Opcode.LOG, Intrinsic.BASE_TWO)]


def test_a_logarithm_used_elsewhere_stays() -> None:
    found = operations(lambda x: jnp.log2(x) * jnp.log(x), X)
    assert sorted(found) == [(Opcode.LOG, ""), (Opcode.LOG, Intrinsic.BASE_TWO), (Opcode.MULTIPLY, "")]


@pytest.mark.parametrize(
    "function",
    [
        jnp.log10,
        lambda x: jnp.log(x) / 0.7,
        lambda x: np.float32(np.log(2)) / jnp.log(x),
        lambda x: jnp.log(x) / np.float32(1 / np.log(2)),
        lambda x: jnp.log(x) * np.float32(np.log(2)),
    ],
)
def test_other_quotients_and_products_stay(function: Callable[..., Any]) -> None:
    assert (Opcode.LOG, Intrinsic.BASE_TWO) not in operations(function, X)
