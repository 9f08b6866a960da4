"""Gather, scatter, dynamic slices and factorisations as devices that run behind the host compute them, against how the
host does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flagos_backend.importer import import_module
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.factorizations import row_order
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.storage import dtype_of
from support.against_xla import hlo_of_text

HOST = Run()
BEHIND = dataclasses.replace(HOST, asynchronous=True)

COMBINERS = ("assign", "add", "multiply", "maximum", "minimum")


def scatter(kind: str, element: str, target: str, indices: str, updates: str, dims: str) -> str:
    combined = "copy(b)" if kind == "assign" else f"{kind}(a, b)"
    return f"""
combine {{
  a = {element}[] parameter(0)
  b = {element}[] parameter(1)
  ROOT c = {element}[] {combined}
}}
ENTRY main {{
  target = {element}{target} parameter(0)
  indices = s32{indices} parameter(1)
  updates = {element}{updates} parameter(2)
  ROOT r = {element}{target} scatter(target, indices, updates), {dims}, to_apply=combine
}}"""


ROWS = "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1"
WINDOWS = "update_window_dims={1,2}, inserted_window_dims={}, scatter_dims_to_operand_dims={0,1}, index_vector_dim=1"
ONE = "update_window_dims={0,1}, inserted_window_dims={}, scatter_dims_to_operand_dims={0,1}, index_vector_dim=0"
SCATTERS = [
    (kind, element, *shapes)
    for kind in COMBINERS
    for element in ("f32", "s32", "u32", "pred", "f16")
    for shapes in (
        ("[7,5]", "[12,1]", "[12,5]", ROWS),
        ("[300,2]", "[6,1]", "[6,2]", ROWS),
        ("[6,7]", "[9,2]", "[9,2,3]", WINDOWS),
        ("[6,7]", "[2]", "[2,3]", ONE),
    )
    if element != "pred" or kind in ("assign", "maximum", "minimum")
]
OTHERS = {
    "gather of one window": """ENTRY main {
  x = f32[6,7] parameter(0)
  i = s32[2] parameter(1)
  ROOT r = f32[2,3] gather(x, i), offset_dims={0,1}, collapsed_slice_dims={}, start_index_map={0,1},
    index_vector_dim=0, slice_sizes={2,3}
}""",
    "dynamic-slice": """ENTRY main {
  x = f32[6,7,3] parameter(0)
  i = s32[] parameter(1)
  j = u8[] parameter(2)
  k = s64[] parameter(3)
  ROOT r = f32[2,7,2] dynamic-slice(x, i, j, k), dynamic_slice_sizes={2,7,2}
}""",
    "dynamic-update-slice": """ENTRY main {
  x = f32[6,7,3] parameter(0)
  u = f32[2,7,2] parameter(1)
  i = s32[] parameter(2)
  j = u8[] parameter(3)
  k = s64[] parameter(4)
  ROOT r = f32[6,7,3] dynamic-update-slice(x, u, i, j, k)
}""",
}


def value(shape: ArrayShape, rng: np.random.Generator) -> torch.Tensor:
    dtype = dtype_of(shape.element_type)
    if shape.element_type in (ElementType.S32, ElementType.S64, ElementType.U8) and shape.rank <= 2:
        return torch.from_numpy(rng.integers(-2 if shape.element_type.is_signed else 0, 8, shape.dims)).to(dtype)
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape.dims)).to(dtype)
    return torch.from_numpy(np.asarray(rng.standard_normal(shape.dims) * 3)).to(dtype)


class NobodyWaits(TorchDispatchMode):
    """Fails at what reads a value on the host, or makes sizes of values."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        assert function not in waits, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


def check(text: str, rng: np.random.Generator) -> None:
    root = import_module(hlo_of_text(text)).entry.root
    shapes = [operand.shape for operand in root.operands if isinstance(operand.shape, ArrayShape)]
    in_place = registry.prepare_in_place(root)
    for _ in range(8):
        arguments = [value(shape, rng) for shape in shapes]
        expected = registry.prepare(root)(HOST, *arguments)
        kept = [argument.clone() for argument in arguments]
        prepared = registry.prepare(root)
        with NobodyWaits():
            found = prepared(BEHIND, *arguments)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        for argument, before in zip(arguments, kept, strict=True):
            assert torch.equal(argument, before)
        if in_place is not None:
            with NobodyWaits():
                written = in_place.kernel(BEHIND, *arguments)
            assert written.data_ptr() == arguments[0].data_ptr()
            torch.testing.assert_close(written, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("kind", "element", "target", "indices", "updates", "dims"), SCATTERS)
def test_scatter(
    kind: str, element: str, target: str, indices: str, updates: str, dims: str, rng: np.random.Generator
) -> None:
    check(scatter(kind, element, target, indices, updates, dims), rng)


@pytest.mark.parametrize("name", OTHERS)
def test_windows(name: str, rng: np.random.Generator) -> None:
    check(OTHERS[name], rng)


def test_nothing_valid_changes_nothing() -> None:
    root = import_module(hlo_of_text(scatter("assign", "f32", "[7,5]", "[12,1]", "[12,5]", ROWS))).entry.root
    target = torch.tensor([[-0.0, torch.nan, torch.inf, 1.0, 2.0]] * 7)
    outside = torch.full((12, 1), 9, dtype=torch.int32)
    found = registry.prepare(root)(BEHIND, target, outside, torch.randn(12, 5))
    assert torch.equal(found.view(torch.int32), target.view(torch.int32))


def factorisation(target: str, a: str, *results: str) -> str:
    results_text = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"""ENTRY main {{
  a = {a} parameter(0)
  ROOT r = {results_text} custom-call(a), custom_call_target="{target}"
}}"""


FACTORISATIONS = {
    "Qr": ("f32[3,5,4]", "f32[3,5,4]", "f32[3,4]"),
    "flagos.geqrf": ("c64[3,4,5]", "c64[3,4,5]", "c64[3,4]"),
    "flagos.hessenberg": ("f64[3,4,4]", "f64[3,4,4]", "f64[3,3]"),
    "flagos.tridiagonal": ("c128[3,4,4]", "c128[3,4,4]", "f64[3,4]", "f64[3,3]", "c128[3,3]"),
    "flagos.lu": ("f32[3,4,6]", "f32[3,4,6]", "s32[3,4]", "s32[3,4]"),
}
ITERATIONS = {
    "flagos.eigh": ("f32[3,4,4]", "f32[3,4,4]", "f32[3,4]"),
    "flagos.schur": ("f64[3,4,4]", "f64[3,4,4]", "f64[3,4,4]"),
    "flagos.svd": ("c64[3,5,4]", "f32[3,4]", "c64[3,5,5]", "c64[3,4,4]"),
}


@pytest.mark.parametrize("target", [*FACTORISATIONS, *ITERATIONS])
@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf])
def test_factorisation(target: str, bad: float | None, rng: np.random.Generator) -> None:
    """A matrix that is not finite leaves its neighbours alone, and gives NaN unless rows are only swapped."""
    root = import_module(hlo_of_text(factorisation(target, *(FACTORISATIONS | ITERATIONS)[target]))).entry.root
    shape = root.operands[0].shape
    assert isinstance(shape, ArrayShape)
    a = value(shape, rng)
    if bad is not None:
        a[1, 2, 1] = bad
    expected = registry.prepare(root)(HOST, a)
    with NobodyWaits() if target in FACTORISATIONS else contextlib.nullcontext():
        found = registry.prepare(root)(BEHIND, a)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
        if bad is not None and target != "flagos.lu":
            assert ours[1].isnan().all() and ours[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("batch", "swaps", "rows"), [((), 300, 300), ((3,), 5, 9), ((2, 2), 129, 140), ((2,), 0, 3)])
def test_order_of_rows(batch: tuple[int, ...], swaps: int, rows: int, rng: np.random.Generator) -> None:
    pivots = rng.integers(np.arange(swaps), rows, (*batch, swaps), dtype=np.int32)
    with NobodyWaits():
        found = row_order(torch.from_numpy(pivots), rows)
    assert found.dtype is torch.int32
    for place in np.ndindex(batch):
        expected = np.arange(rows)
        for i, other in enumerate(pivots[place]):
            expected[[i, other]] = expected[[other, i]]
        np.testing.assert_array_equal(found[place], expected)
