"""Quotients and remainders that are rounded down, and those that only look like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flagos_backend.codegen.transforms.floor_division import with_floors
from flagos_backend.fusion.fuse import fuse
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.region import Apply, Region
from flagos_backend.passes.pipelines import optimize
from programs import hlo_bytes

X = np.ones(8, np.int32)


def operations(function: Callable[..., Any], *arguments: np.ndarray) -> list[tuple[Opcode, str]]:
    schedule = fuse(flatten(optimize(import_module(hlo_bytes(function, *arguments))).entry))
    (region,) = (item for item in schedule.items if isinstance(item, Region))
    return [(e.opcode, e.detail) for e in with_floors(region).expressions() if isinstance(e, Apply)]


@pytest.mark.parametrize("divisor", [100, 3, -7])
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_python_operators_are_one_operation_each(dtype: Any, divisor: int) -> None:
    x = X.astype(dtype)
    assert operations(lambda x: x % divisor, x) == [(Opcode.REMAINDER, Intrinsic.FLOOR)]
    assert operations(lambda x: x // divisor, x) == [(Opcode.DIVIDE, Intrinsic.FLOOR)]


def test_both_together() -> None:
    found = operations(lambda x: x % 10 + x // 10, X)
    assert sorted(found) == sorted(
        [(Opcode.REMAINDER, Intrinsic.FLOOR), (Opcode.DIVIDE, Intrinsic.FLOOR), (Opcode.ADD, "")]
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.rem(x, np.int32(10)),
        lambda x: jnp.where((lax.rem(x, np.int32(10)) < 0), lax.rem(x, np.int32(10)) + 9, lax.rem(x, np.int32(10))),
        lambda x: jnp.where(
            (lax.rem(x, np.int32(10)) > 0) & (lax.rem(x, np.int32(10)) != 0),
            lax.rem(x, np.int32(10)) + 10,
            lax.rem(x, np.int32(10)),
        ),
        lambda x: jnp.where(
            (jnp.sign(x) != -1) & (lax.rem(x, np.int32(10)) != 0),
            lax.div(x, np.int32(10)) - 1,
            lax.div(x, np.int32(10)),
        ),
        lambda x: jnp.where(
            (jnp.sign(x) != 1) & (lax.rem(x, np.int32(10)) != 0),
            lax.div(x, np.int32(10)) - 2,
            lax.div(x, np.int32(10)),
        ),
        lambda x: jnp.mod(x.astype(np.float32), 10),
        lambda x: x.astype(np.uint32) % 10,
    ],
)
def test_others_stay(function: Callable[..., Any]) -> None:
    assert Intrinsic.FLOOR not in [detail for _, detail in operations(function, X)]


def test_by_what_varies_stays() -> None:
    assert Intrinsic.FLOOR not in [detail for _, detail in operations(lambda x, y: x // y + x % y, X, X)]
