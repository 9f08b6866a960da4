"""Quotients that are the logistic function, and those that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.codegen.transforms.logistic import with_logistics
from flagos_backend.fusion.fuse import fuse
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.region import Apply, Region
from flagos_backend.passes.pipelines import optimize
from programs import hlo_bytes

X = np.ones(8, np.float32)


def operations(function: Callable[..., Any], x: np.ndarray, excess_precision: bool = False) -> list[Opcode]:
    schedule = fuse(flatten(optimize(import_module(hlo_bytes(function, x))).entry))
    (region,) = (item for item in schedule.items if isinstance(item, Region))
    found = with_logistics(region, excess_precision).expressions()
    return [e.opcode for e in found if isinstance(e, Apply)]


def test_sigmoid_is_one_operation() -> None:
    assert operations(jax.nn.sigmoid, X) == [Opcode.LOGISTIC]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_of_16_bits_only_with_excess_precision(dtype: Any) -> None:
    assert operations(jax.nn.sigmoid, X.astype(dtype), excess_precision=True) == [Opcode.LOGISTIC]
    assert Opcode.LOGISTIC not in operations(jax.nn.sigmoid, X.astype(dtype))


def test_either_order_of_the_sum() -> None:
    assert operations(lambda x: 1 / (jnp.exp(-x) + 1), X) == [Opcode.LOGISTIC]
    assert operations(lambda x: x / 3 + 1 / (1 + jnp.exp(-jnp.sin(x))), X).count(Opcode.LOGISTIC) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 2 / (1 + jnp.exp(-x)),
        lambda x: 1 / (2 + jnp.exp(-x)),
        lambda x: 1 / (1 + jnp.exp(x)),
        lambda x: 1 / (1 - jnp.exp(-x)),
        lambda x: (1 + jnp.exp(-x)) / 1.5,
        lambda x: jnp.exp(-x) / (1 + jnp.exp(-x)),
        lambda x: jnp.log(1 + jnp.exp(-x)) + 1 / (1 + jnp.exp(-x)),
    ],
)
def test_others_stay(function: Callable[..., Any]) -> None:
    assert Opcode.LOGISTIC not in operations(function, X)
