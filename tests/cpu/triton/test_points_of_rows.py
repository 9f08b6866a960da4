"""Points cut into blocks within rows, against the reference: what a row shares is loaded once for it."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.triton.harness import check
from flagos_backend.codegen.triton import tiling
from flagos_backend.ir.attributes import DimensionAttributes, DimensionsAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from support import kernels
from support.numbers import NUMPY_DTYPE, random_values

E = ElementType
O = Opcode  # noqa: E741


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in (("_FLAT_BLOCK", 64), ("_LEAST_ROW_OF_POINTS", 32), ("_SQUARE", 16)):
        monkeypatch.setattr(tiling, limit, value)


def rows(width: int) -> int:
    """So many that the device has work for each multiprocessor."""
    return 2 * kernels.target().multiprocessors * 64 // width + 3


def of_rows(shape: tuple[int, ...], dims: tuple[int, ...]) -> object:
    """An array plus one along ``dims`` alone, times the position in the last dimension."""

    def build(builder: Builder, x: Instruction, shared: Instruction) -> Instruction:
        whole = ArrayShape(x.shape.element_type, shape)
        spread = builder.add(O.BROADCAST, [shared], DimensionsAttributes(dims), shape=whole)
        position = builder.add(O.IOTA, (), DimensionAttributes(len(shape) - 1), shape=ArrayShape(E.S32, shape))
        factor = builder.add(O.CONVERT, [position], shape=whole)
        return builder.add(O.MULTIPLY, [builder.add(O.ADD, [x, spread]), factor])

    return build


@pytest.mark.parametrize("element_type", [E.F32, E.F64, E.U16, E.S8, E.S32, E.S64], ids=lambda t: t.name)
@pytest.mark.parametrize("width", [32, 48, 64, 112, 240])
def test_rows(element_type: ElementType, width: int, rng: np.random.Generator) -> None:
    shape = (rows(width), width)
    x = random_values(element_type, shape[0] * width, rng).reshape(shape)
    shared = random_values(element_type, shape[0], rng)
    with np.errstate(all="ignore"):
        (kernel,) = check(of_rows(shape, (0,)), [(element_type, x), (element_type, shared)])
    block = {32: 32, 48: 16, 64: 64, 112: 16, 240: 64}[width]
    assert f"in blocks of {64 // block}x{block}:" in kernel.text


def test_rows_of_several_dimensions(rng: np.random.Generator) -> None:
    """What is shared stands in the middle, as channels do."""
    shape = (rows(3 * 80), 3, 5, 16)
    x = rng.standard_normal(shape).astype(NUMPY_DTYPE[E.F32])
    shared = rng.standard_normal(3).astype(NUMPY_DTYPE[E.F32])
    (kernel,) = check(of_rows(shape, (1,)), [(E.F32, x), (E.F32, shared)])
    assert "in blocks of 4x16:" in kernel.text
    assert kernel.tiling.axes[0].sizes == shape[:2]


def test_rows_that_begin_anywhere_are_points(rng: np.random.Generator) -> None:
    shape = (rows(63), 63)
    x, shared = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape[0]).astype(np.float32)
    (kernel,) = check(of_rows(shape, (0,)), [(E.F32, x), (E.F32, shared)])
    assert "in blocks of 64:" in kernel.text
