"""Runs a program, given as HLO text or as a JAX function, on the reference kernels and on stock XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from jaxlib import _hlo

from flagos_backend.importer import import_module
from flagos_backend.ir.types import ArrayShape, ElementType, leaves
from flagos_backend.kernels.reference import storage
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.plan import Plan
from programs import hlo_bytes, run_on_xla

_SMALL = {
    ElementType.S4: ml_dtypes.int4,
    ElementType.U4: ml_dtypes.uint4,
    ElementType.S2: ml_dtypes.int2,
    ElementType.U2: ml_dtypes.uint2,
    ElementType.F8E5M2: ml_dtypes.float8_e5m2,
    ElementType.F8E4M3FN: ml_dtypes.float8_e4m3fn,
    ElementType.BF16: ml_dtypes.bfloat16,
    ElementType.U16: np.uint16,
    ElementType.U32: np.uint32,
    ElementType.U64: np.uint64,
}


def hlo_of_text(text: str) -> bytes:
    """A serialized HloModuleProto, parsed and verified by jaxlib."""
    return _hlo.hlo_module_from_text(f"HloModule test\n{text}").as_serialized_hlo_module_proto()


def to_storage(array: np.ndarray, shape: ArrayShape) -> torch.Tensor:
    return storage.from_bytes(np.ascontiguousarray(array).tobytes(), shape)


def from_storage(tensor: torch.Tensor, shape: ArrayShape) -> np.ndarray:
    dtype = _SMALL.get(shape.element_type)
    assert tensor.dtype == storage.dtype_of(shape.element_type)
    assert tuple(tensor.shape) == shape.dims
    if dtype is None:
        return tensor.numpy()
    return np.frombuffer(storage.to_bytes(tensor), dtype=dtype).reshape(shape.dims)


def run_on_backend(hlo: bytes, args: Sequence[np.ndarray], run: Run | None = None) -> list[np.ndarray]:
    module = import_module(hlo)
    plan = Plan.build(module.entry)
    shapes = [leaf for parameter in module.entry.parameters for leaf in leaves(parameter.shape)]
    with torch.inference_mode():
        tensors = [to_storage(np.asarray(a), s) for a, s in zip(args, shapes, strict=True)]
        results = plan.run(run or Run(), list(tensors))
        kept = [to_storage(np.asarray(a), s) for a, s in zip(args, shapes, strict=True)]
        for before, after in zip(kept, tensors, strict=True):
            assert (
                torch.equal(
                    before.view(torch.uint8) if before.dim() else before,
                    after.view(torch.uint8) if after.dim() else after,
                )
                or before.is_floating_point()
                or before.is_complex()
            ), "an argument was written over"
    return [from_storage(t, s) for t, s in zip(results, plan.result_shapes, strict=True)]


def assert_same(ours: np.ndarray, theirs: np.ndarray, tolerance: float | None) -> None:
    """``tolerance`` None: equal values (NaN equals NaN); otherwise relative to the greatest magnitude."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    if tolerance is None or ours.dtype.kind in "biu":
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
