"""Eigenvalues and eigenvectors of symmetric and Hermitian matrices: for float32 of 32 to 512 rows ATen takes cuSOLVER's
Jacobi method, for float64 its divide and conquer, which takes no longer on an H200, and less than half as long from 256
rows on."""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.implementation import Variant
from flagos_backend.kernels.reference.registry import Run, Value
from flagos_backend.kernels.vendor.library import reference_variants
from flagos_backend.process.torch_loading import Tensor, torch

_WIDER = {ElementType.F32: torch.float64, ElementType.C64: torch.complex128}
_JACOBI = range(32, 513)


def variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    """In float64, rounded at the end, where that may be faster, and as it is."""
    plain = reference_variants(instruction, target)
    shape = instruction.operands[0].shape
    assert isinstance(shape, ArrayShape)
    wider = _WIDER.get(shape.element_type)
    if not target.facts.fast_float64 or wider is None or shape.dims[-1] not in _JACOBI or not shape.num_elements:
        return plain
    (only,) = plain

    def in_float64(run: Run, a: Tensor) -> Value:
        vectors, values = only.kernel(run, a.to(wider))
        return vectors.to(a.dtype), values.to(a.real.dtype)

    return replace(only, name="in float64", kernel=in_float64, into=None), only
