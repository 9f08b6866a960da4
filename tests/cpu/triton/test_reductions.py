"""Reductions of every kind and type, over rows, columns and everything, whole, looped and split."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from cpu.triton.harness import check, reducer
from flagos_backend.codegen.triton import RegionKernel, tiling
from flagos_backend.ir.attributes import DimensionsAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.elementwise import COMBINES, ELEMENTWISE
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from support import kernels
from support.numbers import NUMPY_DTYPE, random_values

E = ElementType
O = Opcode  # noqa: E741

_TYPES = sorted(ELEMENTWISE[O.ADD])
_BITWISE = {O.AND, O.OR, O.XOR}
_CASES = [(o, t) for o in sorted(COMBINES) for t in _TYPES if not (t.is_float and o in _BITWISE)]
_SHAPES = [((9, 70), (1,)), ((70, 9), (0,)), ((3, 4, 5, 6), (1, 3)), ((130,), (0,))]
# Triton's interpreter combines with these element by element.
_SLOW = {O.MULTIPLY, *_BITWISE}
_SMALL_SHAPES = [((3, 14), (1,)), ((14, 3), (0,)), ((2, 3, 2, 3), (1, 3)), ((30,), (0,))]


def reduction(opcode: Opcode, element_type: ElementType, dims: tuple[int, ...]) -> object:
    def build(builder: Builder, x: Instruction, initial: Instruction) -> Instruction:
        called = [reducer(opcode, element_type)]
        return builder.add(O.REDUCE, [x, initial], DimensionsAttributes(dims), called=called)

    return build


def values(opcode: Opcode, element_type: ElementType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Of floats, those that add up without cancelling, so that orders of summation agree to few units."""
    x = random_values(element_type, int(np.prod(shape)), rng)
    if element_type.is_float and opcode is O.ADD:
        x = np.abs(x)
    if element_type.is_float and opcode is O.MULTIPLY:
        x = (1 + rng.standard_normal(x.size) / 500).astype(x.dtype)
    return x.reshape(shape)


def tolerance(opcode: Opcode, element_type: ElementType, count: int) -> float:
    if not element_type.is_float or opcode in (O.MAXIMUM, O.MINIMUM):
        return 0
    # 16-bit floats accumulate in float32; the initial value may join before or after the one rounding.
    return 2 if element_type.bits == 16 else 4 + count / (4 if opcode is O.MULTIPLY else 8)


@pytest.mark.parametrize(("opcode", "element_type"), _CASES, ids=lambda p: getattr(p, "name", str(p)))
def test_reduction(opcode: Opcode, element_type: ElementType, rng: np.random.Generator) -> None:
    for shape, dims in _SMALL_SHAPES if opcode in _SLOW else _SHAPES:
        x = values(opcode, element_type, shape, rng)
        initial = values(opcode, element_type, (), rng)
        count = x.size // int(np.prod([n for d, n in enumerate(shape) if d not in dims], initial=1))
        check(
            reduction(opcode, element_type, dims),
            [(element_type, x), (element_type, initial)],
            tolerance(opcode, element_type, count),
        )


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        *(((2000, 70), (0,)), ((60_000,), (0,)), ((300, 129), (1,))),
        *(((3, 700, 60), (1,)), ((40, 30, 8), (0, 2)), ((2, 40_000), (1,))),
    ],
    ids=str,
)
def test_a_reduction_that_is_stored_again_for_each_element(
    shape: tuple[int, ...], dims: tuple[int, ...], rng: np.random.Generator
) -> None:
    """Which is not split, as a second kernel would store it once."""
    x = rng.standard_normal(shape).astype(np.float32)
    kept = tuple(d for d in range(len(shape)) if d not in dims)

    def build(builder: Builder, x: Instruction, initial: Instruction) -> Instruction:
        called = [reducer(O.MAXIMUM, E.F32)]
        most = builder.add(O.REDUCE, [x, initial], DimensionsAttributes(dims), called=called)
        spread = builder.add(O.BROADCAST, [most], DimensionsAttributes(kept), shape=x.shape)
        return builder.add(O.TUPLE, [most, spread])

    check(build, [(E.F32, x), (E.F32, np.array(-np.inf, np.float32))])


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("opcode", [O.MAXIMUM, O.MINIMUM], ids=str)
def test_nan_wins_over_everything(opcode: Opcode, dims: tuple[int, ...], rng: np.random.Generator) -> None:
    x = rng.standard_normal((20, 33)).astype(np.float32)
    x[3, 5], x[4, 6], x[7, 8] = np.nan, np.inf, -np.inf
    check(reduction(opcode, E.F32, dims), [(E.F32, x), (E.F32, np.float32(0))])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), (1,), (1, 1), (1, 7), (7, 1)])
def test_odd_shapes(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = np.abs(rng.standard_normal(shape)).astype(np.float32)
    for dims in {(0,), (len(shape) - 1,), tuple(range(len(shape)))}:
        check(reduction(O.ADD, E.F32, dims), [(E.F32, x), (E.F32, np.float32(2.5))], 4)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((3, 70000), (1,)),  # rows longer than a block, few of them
        ((90000,), (0,)),
        ((2500, 40), (0,)),
        ((2, 1500, 40), (1,)),
        ((4, 3, 20000), (0, 2)),
    ],
)
@pytest.mark.parametrize("opcode", [O.ADD, O.MAXIMUM], ids=str)
def test_long_reductions_go_through_partial_results(
    opcode: Opcode, shape: tuple[int, ...], dims: tuple[int, ...], rng: np.random.Generator
) -> None:
    x = np.abs(rng.standard_normal(shape)).astype(np.float32)
    for element_type in (E.F32, E.S32):
        y = x if element_type is E.F32 else (x * 1e9).astype(np.int32)
        (kernel,) = check(
            reduction(opcode, element_type, dims), [(element_type, y), (element_type, y[(0,) * y.ndim])], 64
        )
        assert len(kernel.launches) == 2, kernel.text


def softmax_of_rows(builder: Builder, x: Instruction) -> Instruction:
    zero, low = builder.scalar(0, E.F32), builder.scalar(-np.inf, E.F32)
    rows = DimensionsAttributes((1,))
    top = builder.add(O.REDUCE, [x, low], rows, called=[reducer(O.MAXIMUM, E.F32)])
    power = builder.add(O.EXP, [builder.add(O.SUBTRACT, [x, builder.broadcast(top, x.shape.dims, (0,))])])
    total = builder.add(O.REDUCE, [power, zero], rows, called=[reducer(O.ADD, E.F32)])
    return builder.add(O.DIVIDE, [power, builder.broadcast(total, x.shape.dims, (0,))])


@pytest.mark.usefixtures("short_blocks")
def test_a_row_longer_than_a_block_is_walked_once_for_each_reduction_that_waits_for_another(
    rng: np.random.Generator,
) -> None:
    def build(builder: Builder, x: Instruction) -> Instruction:
        """Elements by the sum of their distances from the largest."""
        zero, low = builder.scalar(0, E.F32), builder.scalar(-np.inf, E.F32)
        rows = DimensionsAttributes((1,))
        top = builder.add(O.REDUCE, [x, low], rows, called=[reducer(O.MAXIMUM, E.F32)])
        below = builder.add(O.SUBTRACT, [builder.broadcast(top, x.shape.dims, (0,)), x])
        total = builder.add(O.REDUCE, [below, zero], rows, called=[reducer(O.ADD, E.F32)])
        return builder.add(O.DIVIDE, [x, builder.broadcast(total, x.shape.dims, (0,))])

    (kernel,) = check(build, [(E.F32, rng.standard_normal((30, 1000)).astype(np.float32))], 64)
    assert kernel.walks == 3
    (source,), (output,) = kernel.inputs, kernel.outputs
    assert not kernel.may_overwrite(output, source), "a later walk would read what an earlier one wrote"


def of_all_kinds(size: int, rng: np.random.Generator) -> np.ndarray:
    """Rows whose maximum comes first, last, and again and again; without a largest number; of numbers far apart."""
    x = rng.standard_normal((14, size)).astype(np.float32)
    x[0, 0], x[1, -1], x[2], x[3] = 60, 60, np.sort(x[2] * 30), -np.sort(x[3] * 30)
    x[4], x[5, :700], x[6, 3:], x[7, ::2] = -np.inf, -np.inf, -np.inf, -np.inf
    x[8, 400], x[9, 900], x[10, 0], x[11] = np.inf, np.nan, np.nan, x[11] * 1e30
    x[12], x[13, 5:9] = -3e38, np.inf
    return x


def walks_of_the_middle(kernel: RegionKernel) -> int:
    """Without the one of what stands before the first multiple of a unit, and after the last."""
    return kernel.walks - (kernel.tiling.alignment is not None)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("size", [1000, 1001])
def test_a_sum_below_a_maximum_goes_along_with_it(size: int, rng: np.random.Generator) -> None:
    x = of_all_kinds(size, rng)
    for element_type in (E.F32, E.F16, E.BF16):
        y = x.clip(-6e4, 6e4) if element_type is E.F16 else x

        def build(builder: Builder, x: Instruction) -> Instruction:
            return softmax_of_rows(builder, builder.convert(x, E.F32))

        with np.errstate(invalid="ignore"):
            y = np.where(np.isfinite(x), y, x).astype(NUMPY_DTYPE[element_type])
        (kernel,) = check(build, [(element_type, y)], 16)
        assert walks_of_the_middle(kernel) == 2


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("size", [1000, 1001])
def test_a_guarded_sum_below_a_maximum(size: int, rng: np.random.Generator) -> None:
    """As jax.nn.logsumexp has it: 0 is subtracted where there is no largest number."""

    def build(builder: Builder, x: Instruction) -> Instruction:
        zero, low = builder.scalar(0, E.F32), builder.scalar(-np.inf, E.F32)
        rows = DimensionsAttributes((1,))
        top = builder.add(O.REDUCE, [x, low], rows, called=[reducer(O.MAXIMUM, E.F32)])
        nothing = builder.broadcast(zero, top.shape.dims)
        top = builder.add(O.SELECT, [builder.add(O.IS_FINITE, [top]), top, nothing])
        power = builder.add(O.EXP, [builder.add(O.SUBTRACT, [x, builder.broadcast(top, x.shape.dims, (0,))])])
        total = builder.add(O.REDUCE, [power, zero], rows, called=[reducer(O.ADD, E.F32)])
        return builder.add(O.ADD, [builder.add(O.LOG, [total]), top])

    (kernel,) = check(build, [(E.F32, of_all_kinds(size, rng))], 16)
    assert kernel.source.count("for start in tl.range") == 1


def test_a_long_row_of_wide_elements_is_one_block(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rows are enough for the device."""
    target = dataclasses.replace(kernels.target(), multiprocessors=4)
    monkeypatch.setattr(kernels, "target", lambda: target)
    (kernel,) = check(softmax_of_rows, [(E.F32, rng.standard_normal((5, 32000)).astype(np.float32))], 16)
    assert "in blocks of 1x32768" in kernel.text
    (source,), (output,) = kernel.inputs, kernel.outputs
    assert kernel.may_overwrite(output, source)


@pytest.mark.parametrize("rows", [8, 9, 13, 40])
def test_long_rows_of_narrow_elements_are_loaded_ahead(
    rows: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program takes every so many rows, of which there are more for some."""
    target = dataclasses.replace(kernels.target(), multiprocessors=4, shared_memory_bytes=1 << 16)
    monkeypatch.setattr(kernels, "target", lambda: target)
    for limit, size in (("MAX_ROW", 256), ("MAX_LONG_ROW", 1024), ("_TILE", 256)):
        monkeypatch.setattr(tiling, limit, size)

    def build(builder: Builder, x: Instruction) -> Instruction:
        weights = softmax_of_rows(builder, builder.convert(x, E.F32))
        return builder.convert(weights, E.BF16)

    (kernel,) = check(build, [(E.BF16, rng.standard_normal((rows, 1000)).astype(ml_dtypes.bfloat16))], 1)
    assert "in blocks of 1x1024, 4 parts" in kernel.text and kernel.tiling.stages == 3
    (launch,) = kernel.launches
    assert launch.grid == 4
    (source,), (output,) = kernel.inputs, kernel.outputs
    assert kernel.may_overwrite(output, source), "a program writes the rows that it has read"


def test_what_all_threads_of_a_row_read_is_not_written_over(rng: np.random.Generator) -> None:
    """One thread would write a row's result before others have read the row's operand: of its size, at its index."""

    def build(builder: Builder, x: Instruction, scale: Instruction) -> Instruction:
        zero = builder.scalar(0, E.F32)
        total = builder.add(O.REDUCE, [x, zero], DimensionsAttributes((1,)), called=[reducer(O.ADD, E.F32)])
        return builder.add(O.MULTIPLY, [total, scale])

    x, scale = rng.uniform(1, 2, (300, 256)).astype(np.float32), rng.standard_normal(300).astype(np.float32)
    (kernel,) = check(build, [(E.F32, x), (E.F32, scale)], 16)
    (output,) = kernel.outputs
    assert len(kernel.inputs) == 2
    assert not any(kernel.may_overwrite(output, source) for source in kernel.inputs)
