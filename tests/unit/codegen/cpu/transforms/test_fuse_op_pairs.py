"""Which operations are joined in pairs, and which shifts are rotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flagos_backend.codegen.cpu.emit_row_loop import Phases
from flagos_backend.codegen.cpu.fusion_policy import schedule
from flagos_backend.codegen.cpu.transforms.fuse_op_pairs import with_pairs, with_rotations
from flagos_backend.importer import import_module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.loop_ir.flat import flatten
from flagos_backend.loop_ir.intrinsics import SUBTRACTED, Intrinsic
from flagos_backend.loop_ir.region import Apply, Region
from flagos_backend.passes.pipelines import optimize
from programs import hlo_bytes

F32 = np.ones(256, np.float32)
U32 = np.ones(256, np.uint32)
ROWS = np.ones((64, 256), np.float32)


def region_of(function: Callable[..., Any], *arguments: np.ndarray) -> Region:
    items = schedule(flatten(optimize(import_module(hlo_bytes(function, *arguments))).entry)).items
    (region,) = (item for item in items if isinstance(item, Region))
    return with_rotations(region)


def operations(region: Region) -> list[tuple[Opcode, str]]:
    return [(e.opcode, e.detail) for e in region.expressions() if isinstance(e, Apply)]


def paired(function: Callable[..., Any], *arguments: np.ndarray) -> list[tuple[Opcode, str]]:
    return operations(with_pairs(region_of(function, *arguments), {}))


def rotated(shift: int, back: int) -> Callable[..., Any]:
    return lambda x: (x << np.uint32(shift)) | (x >> np.uint32(back))


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (lambda x, y: x * y + 1, (F32, F32), [(Opcode.ADD, "multiply")]),
        (lambda x, y: 1 + x * y, (F32, F32), [(Opcode.ADD, "multiply")]),
        (lambda x, y: x * y - 1, (F32, F32), [(Opcode.SUBTRACT, "multiply")]),
        (lambda x, y: 1 - x * y, (F32, F32), [(Opcode.SUBTRACT, "multiply" + SUBTRACTED)]),
        (lambda x, y: (x & y) ^ 3, (U32, U32), [(Opcode.XOR, "and")]),
    ],
)
def test_two_operations_become_one(
    function: Callable[..., Any], arguments: Sequence[np.ndarray], expected: list[tuple[Opcode, str]]
) -> None:
    assert paired(function, *arguments) == expected


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x, y: (x * y + 1) / (x * y), (F32, F32)),  # the product is read twice
        (lambda x, y: jnp.maximum(x * y, 1), (F32, F32)),
        (lambda x, y: x / y + 1, (F32, F32)),
        (lambda x, y: x * y + 1, (F32.astype(np.int32), F32.astype(np.int32))),
    ],
)
def test_others_stay(function: Callable[..., Any], arguments: Sequence[np.ndarray]) -> None:
    assert not any(detail for _, detail in paired(function, *arguments))


def test_of_three_operations_the_first_two_are_joined() -> None:
    assert paired(lambda x, y: (x * y + 1) * y, F32, F32) == [(Opcode.ADD, "multiply"), (Opcode.MULTIPLY, "")]


@pytest.mark.parametrize("shift", [1, 13, 31])
def test_rotation(shift: int) -> None:
    assert operations(region_of(rotated(shift, 32 - shift), U32)) == [(Opcode.SHIFT_LEFT, Intrinsic.ROTATE)]
    assert paired(lambda x: rotated(shift, 32 - shift)(x) ^ x, U32) == [(Opcode.XOR, Intrinsic.ROTATE)]


@pytest.mark.parametrize("function", [rotated(13, 18), rotated(32, 0), lambda x: (x << x) | (x >> np.uint32(3))])
def test_other_shifts_are_no_rotation(function: Callable[..., Any]) -> None:
    assert (Opcode.SHIFT_LEFT, Intrinsic.ROTATE) not in operations(region_of(function, U32))


def test_what_is_computed_once_for_a_row_is_not_joined_with_what_varies() -> None:
    region = region_of(lambda x: x + x.sum(-1, keepdims=True) * 0.5, ROWS)
    joined = with_pairs(region, Phases(region).varies)
    assert operations(joined) == [(Opcode.MULTIPLY, ""), (Opcode.ADD, "")]
