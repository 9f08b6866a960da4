"""Runs a program, given as HLO text or as a JAX function, on the reference kernels and on stock XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxlib import _hlo

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.types import ArrayShape, leaves
from flagos_backend.kernels.reference import storage
from flagos_backend.kernels.reference.registry import Run
from programs import hlo_bytes, run_on_xla
from support.numbers import NUMPY_DTYPE


def hlo_of_text(text: str) -> bytes:
    """A serialized HloModuleProto, parsed and verified by jaxlib."""
    return _hlo.hlo_module_from_text(f"HloModule test\n{text}").as_serialized_hlo_module_proto()


def to_storage(array: np.ndarray, shape: ArrayShape) -> torch.Tensor:
    return storage.from_bytes(np.ascontiguousarray(array).tobytes(), shape)


def from_storage(tensor: torch.Tensor, shape: ArrayShape) -> np.ndarray:
    assert tensor.dtype == storage.dtype_of(shape.element_type)
    assert tuple(tensor.shape) == shape.dims
    return np.frombuffer(storage.to_bytes(tensor), NUMPY_DTYPE[shape.element_type]).reshape(shape.dims)


def run_on_backend(hlo: bytes, args: Sequence[np.ndarray], run: Run | None = None) -> list[np.ndarray]:
    return run_module(import_module(hlo), args, run)


def run_module(module: Module, args: Sequence[np.ndarray], run: Run | None = None) -> list[np.ndarray]:
    """The results of ``module`` as it is, on the reference kernels."""
    plan = build_plan(module.entry)
    shapes = [leaf for parameter in module.entry.parameters for leaf in leaves(parameter.shape)]
    with torch.inference_mode():
        tensors = [to_storage(np.asarray(a), s) for a, s in zip(args, shapes, strict=True)]
        results = plan.run(run or Run(), list(tensors))
    for array, tensor, shape in zip(args, tensors, shapes, strict=True):
        before = storage.to_bytes(to_storage(np.asarray(array), shape))
        assert storage.to_bytes(tensor) == before, "an argument was written over"
    return [from_storage(t, s) for t, s in zip(results, plan.result_shapes, strict=True)]


def assert_same(ours: np.ndarray, theirs: np.ndarray, tolerance: float | None) -> None:
    """``tolerance`` None: equal values (NaN equals NaN); otherwise relative to the greatest magnitude."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if tolerance is None or ours.dtype.kind in "biu":
        if ours.dtype.kind not in "biuc":  # numpy knows no NaN of the types of ml_dtypes
            ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
        np.testing.assert_array_equal(ours, theirs)
        return
    wide = np.complex128 if ours.dtype.kind == "c" else np.float64
    ours, theirs = ours.astype(wide), theirs.astype(wide)
    finite = np.abs(theirs[np.isfinite(theirs)])
    scale = max(1.0, float(finite.max())) if finite.size else 1.0
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * scale)


def check(text: str, *args: np.ndarray, tolerance: float | None = None) -> list[np.ndarray]:
    """The program in HLO ``text`` gives the same on both; returns our results."""
    return check_hlo(hlo_of_text(text), args, tolerance)


def check_function(function: Callable[..., Any], *args: np.ndarray, tolerance: float | None = None) -> list[np.ndarray]:
    """The JAX function gives the same on both; returns our results."""
    return check_hlo(hlo_bytes(function, *args), args, tolerance)


def check_hlo(hlo: bytes, args: Sequence[np.ndarray], tolerance: float | None) -> list[np.ndarray]:
    ours, theirs = run_on_backend(hlo, args), run_on_xla(hlo, args)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_same(a, b, tolerance)
    return ours
