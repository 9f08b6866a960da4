"""Quotients that are the logistic function, and those that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.codegen.logistics import with_logistics
from flagos_backend.fusion.flat import flatten
from flagos_backend.fusion.fuse import fuse
from flagos_backend.fusion.region import Apply, Region
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.pipeline import optimize
from programs import hlo_bytes

X = np.ones(8, np.float32)


def operations(function: Callable[..., Any], x: np.ndarray) -> list[Opcode]:
    schedule = fuse(flatten(optimize(import_module(hlo_bytes(function, x))).entry))
    (region,) = (item for item in schedule.items if isinstance(item, Region))
    return [e.opcode for e in with_logistics(region).expressions() if isinstance(e, Apply)]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_sigmoid_is_one_operation(dtype: Any) -> None:
    assert operations(jax.nn.sigmoid, X.astype(dtype)) == [Opcode.LOGISTIC]


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
