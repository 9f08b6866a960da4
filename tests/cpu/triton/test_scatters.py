"""Our Triton scatters against updates made one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from flagos_backend.importer import import_module
from flagos_backend.ir.attributes import ScatterAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.choice import implementations_of
from flagos_backend.kernels.implementation import Provider, Variant
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.triton import scatter
from flagos_backend.passes.rewrite import array_shape
from support.against_xla import from_storage, hlo_of_text
from support.kernels import target, to_storage

RUN = Run(asynchronous=True)
(TRITON,) = (i for i in implementations_of(str(Opcode.SCATTER)) if i.provider is Provider.TRITON)

# Target, indices and updates; which dimensions are which.
CASES = {
    "rows": (
        "[43,33] [7,9] [7,9,33]",
        "update_window_dims={2}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=2",
    ),
    "wide rows": (
        "[5,700] [6,1] [6,700]",
        "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1",
    ),
    "elements": (
        "[60] [300,1] [300]",
        "update_window_dims={}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1",
    ),
    "elements of a matrix, indices across": (
        "[9,8] [2,50] [50]",
        "update_window_dims={}, inserted_window_dims={0,1}, scatter_dims_to_operand_dims={1,0}, index_vector_dim=0",
    ),
    "three indices of four": (
        "[4,5,6,3] [40,3] [40,3]",
        "update_window_dims={1}, inserted_window_dims={0,1,2}, scatter_dims_to_operand_dims={2,0,1}, "
        "index_vector_dim=1",
    ),
    "columns, in front of the batch": (
        "[12,40] [90] [12,90]",
        "update_window_dims={0}, inserted_window_dims={1}, scatter_dims_to_operand_dims={1}, index_vector_dim=1",
    ),
    "windows that overlap": (
        "[20,30,5] [2,21] [3,21,4,5]",
        "update_window_dims={0,2,3}, inserted_window_dims={}, scatter_dims_to_operand_dims={1,0}, index_vector_dim=0",
    ),
    "a window that no index moves": (
        "[9,8] [5,1] [5,7]",
        "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1",
    ),
    "one window": (
        "[9,8] [2] [4,3]",
        "update_window_dims={0,1}, inserted_window_dims={}, scatter_dims_to_operand_dims={0,1}, index_vector_dim=0",
    ),
    "windows without indices": (
        "[7] [3,0] [3,5]",
        "update_window_dims={1}, inserted_window_dims={}, scatter_dims_to_operand_dims={}, index_vector_dim=1",
    ),
}
OVERLAPPING = {
    "columns, in front of the batch",
    "windows that overlap",
    "a window that no index moves",
    "windows without indices",
}
NUMPY: dict[str, Any] = {
    "pred": np.bool_, "s8": np.int8, "u8": np.uint8, "u16": np.uint16, "s32": np.int32, "u32": np.uint32,
    "s64": np.int64, "u64": np.uint64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32,
    "f64": np.float64, "c64": np.complex64,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "assign": lambda old, new: new, "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "maximum": np.maximum, "minimum": np.minimum,
}  # fmt: skip
COMBINED = [(o, e) for o in ("add", "maximum", "minimum") for e in ("s32", "u32", "s64", "u64", "f32", "f64")]
COMBINED += [(o, e) for o in ("and", "or", "xor") for e in ("s32", "u32", "s64", "u64")]


def instruction(case: str, operation: str, element: str, index: str = "s32", extra: str = "") -> Instruction:
    shapes, attributes = CASES[case]
    array, indices, updates = shapes.split()
    root = "ROOT " if operation == "assign" else ""
    combined = "" if operation == "assign" else f"ROOT c = {element}[] {operation}(a, b)"
    text = f"""f {{ a = {element}[] parameter(0) {root}b = {element}[] parameter(1) {combined} }}
ENTRY e {{ x = {element}{array} parameter(0) i = {index}{indices} parameter(1) u = {element}{updates} parameter(2)
  ROOT y = {element}{array} scatter(x, i, u), {attributes}{extra}, to_apply=f }}"""
    return import_module(hlo_of_text(text)).entry.root


def drawn(element: str, dims: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Integers as floats, whose sums are exact in any order."""
    dtype = NUMPY[element]
    if dtype is np.bool_:
        return rng.integers(0, 2, dims) > 0
    if np.issubdtype(dtype, np.integer):
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, dims, dtype=dtype, endpoint=True)
    return rng.integers(-99, 99, dims).astype(dtype)


def one_by_one(call: Instruction, operation: str, x: np.ndarray, i: np.ndarray, u: np.ndarray) -> np.ndarray:
    attributes = call.attributes_as(ScatterAttributes)
    batch = [d for d in range(u.ndim) if d not in attributes.update_window_dims]
    windows = u.transpose(*batch, *attributes.update_window_dims)
    vectors = i[..., None] if attributes.index_vector_dim == i.ndim else np.moveaxis(i, attributes.index_vector_dim, -1)
    result = x.copy()
    for place in itertools.product(*map(range, vectors.shape[:-1])):
        starts = [0] * x.ndim
        for d, start in zip(attributes.scatter_dims_to_operand_dims, vectors[place], strict=True):
            starts[d] = int(start)
        window = np.expand_dims(windows[place], attributes.inserted_window_dims)
        ends = [start + size for start, size in zip(starts, window.shape, strict=True)]
        if min(starts) >= 0 and all(end <= size for end, size in zip(ends, x.shape, strict=True)):
            part = tuple(map(slice, starts, ends))
            result[part] = FUNCTIONS[operation](result[part], window)
    return result


def variant_of(call: Instruction) -> Variant:
    assert not TRITON.unsupported(call, target())
    (variant,) = TRITON.variants(call, target())
    return variant


def check(call: Instruction, operation: str, *arrays: np.ndarray) -> None:
    """As a new array, in a place that is given, and over the operand, row-major or not."""
    expected = one_by_one(call, operation, *arrays)
    shapes = [array_shape(operand) for operand in call.operands]
    given = [to_storage(array, shape.element_type) for array, shape in zip(arrays, shapes, strict=True)]
    variant = variant_of(call)
    made = variant.kernel(RUN, *given)
    assert variant.into is not None
    home = torch.empty_like(given[0])
    assert variant.into(RUN, (home,), *given) is home
    results = [made, home]
    assert np.array_equal(from_storage(given[0].cpu(), shapes[0]), arrays[0], equal_nan=arrays[0].dtype.kind == "f")
    if variant.in_place is not None:
        assert variant.in_place.operands == (0,)
        turned = given[0].clone().movedim(0, -1).contiguous().movedim(-1, 0)
        for array in (given[0].clone(), turned):
            assert variant.in_place.kernel(RUN, array, *given[1:]) is array
            results.append(array)
    for result in results:
        np.testing.assert_array_equal(from_storage(result.cpu(), shapes[0]), expected)


def indices_of(case: str, rng: np.random.Generator, dtype: Any = np.int32) -> np.ndarray:
    """Mostly in bounds; some beyond either end, as far as the type goes."""
    dims = dims_of(case)[1]
    limits = np.iinfo(dtype)
    indices = rng.integers(max(limits.min, -2), min(limits.max, 45), dims).astype(dtype)
    few = rng.integers(0, 6, dims).astype(dtype)
    indices = np.where(rng.random(dims) < 0.7, few, indices)
    indices.reshape(-1)[:2] = (limits.min, limits.max)[: indices.size]
    return indices


def dims_of(case: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, dims.strip("[]").split(","))) for dims in CASES[case][0].split()]


@pytest.mark.parametrize(
    ("case", "operation", "element"),
    [("elements", *combined) for combined in COMBINED]
    + [(c, o, e) for c in CASES for o, e in (("add", "f32"), ("xor", "u64"))],
)
def test_combinations(case: str, operation: str, element: str, rng: np.random.Generator) -> None:
    call = instruction(case, operation, element)
    array, _, updates = dims_of(case)
    check(call, operation, drawn(element, array, rng), indices_of(case, rng), drawn(element, updates, rng))


@pytest.mark.parametrize(
    ("case", "element"),
    [("rows", element) for element in NUMPY] + [(case, "f32") for case in CASES if case not in OVERLAPPING],
)
@pytest.mark.parametrize("compared", [0, 1024], ids=["by a table", "by comparing"])
def test_the_last_window_at_a_place_is_written(
    case: str, compared: int, element: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(scatter, "_MAX_COMPARED", compared)
    call = instruction(case, "assign", element)
    array, _, updates = dims_of(case)
    check(call, "assign", drawn(element, array, rng), indices_of(case, rng), drawn(element, updates, rng))


@pytest.mark.parametrize("dtype", ["s8", "u8", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("case", ["rows", "elements of a matrix, indices across"])
def test_types_of_indices(case: str, dtype: str, rng: np.random.Generator) -> None:
    call = instruction(case, "add", "f32", dtype)
    array, _, updates = dims_of(case)
    check(call, "add", drawn("f32", array, rng), indices_of(case, rng, NUMPY[dtype]), drawn("f32", updates, rng))


def test_windows_that_are_promised_to_be_apart(rng: np.random.Generator) -> None:
    call = instruction("a window that no index moves", "assign", "f32", extra=", unique_indices=true")
    array, _, updates = dims_of("a window that no index moves")
    indices = rng.permutation(9)[:5, None].astype(np.int32)
    check(call, "assign", drawn("f32", array, rng), indices, drawn("f32", updates, rng))


@pytest.mark.parametrize("element", ["f32", "f64"])
@pytest.mark.parametrize("operation", ["maximum", "minimum"])
def test_minima_and_maxima_of_special_numbers(operation: str, element: str, rng: np.random.Generator) -> None:
    """NaN of either sign, in the target and among the updates, win; zeros and infinities are ordered."""
    dtype = NUMPY[element]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.5, -1.5, 5e-324, -1e-40], dtype)
    call = instruction("elements", operation, element)
    array, index_dims, updates = dims_of("elements")
    for _ in range(5):
        x, u = rng.choice(special, array), rng.choice(special, updates)
        indices = rng.integers(0, 60, index_dims).astype(np.int32)
        expected = one_by_one(call, operation, x, indices, u)
        given = [torch.from_numpy(a).to(target().device_type) for a in (x.copy(), indices, u)]
        np.testing.assert_array_equal(variant_of(call).kernel(RUN, *given).cpu().numpy(), expected)


@pytest.mark.parametrize(
    ("case", "operation", "element", "reason"),
    [
        ("rows", "multiply", "f32", "no instruction"),
        ("rows", "add", "bf16", "no instruction"),
        ("rows", "and", "pred", "no instruction"),
        ("rows", "assign", "c128", "moves no"),
        ("windows that overlap", "assign", "f32", "in their order"),
    ],
)
def test_what_is_left_to_others(case: str, operation: str, element: str, reason: str) -> None:
    assert reason in TRITON.unsupported(instruction(case, operation, element), target())


def test_a_table_of_too_many_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "_MAX_COMPARED", 0)
    monkeypatch.setattr(scatter, "_TABLE_RATIO", 0.1)
    assert "too many places" in TRITON.unsupported(instruction("rows", "assign", "f32"), target())
