"""Instructions whose reference kernel is the vendor's library already: ATen's operator on tensors of the device."""

from __future__ import annotations

import functools
from typing import Any

from flagos_backend.devices import tensor_float
from flagos_backend.devices.target import Target
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.implementation import Variant, operation_of
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.aten import prepare_into
from flagos_backend.kernels.reference.registry import Kernel, Value

# One call of ATen that the library serves (cuDNN, cuFFT, cuSOLVER and their like).
LIBRARY = (
    *(
        str(opcode)
        for opcode in (
            Opcode.BATCH_NORM_GRAD,
            Opcode.BATCH_NORM_INFERENCE,
            Opcode.BATCH_NORM_TRAINING,
            Opcode.CHOLESKY,
            Opcode.FFT,
            Opcode.RAGGED_DOT,
            Opcode.TRIANGULAR_SOLVE,
        )
    ),
    "ProductOfElementaryHouseholderReflectors",
    "Qr",
    "flagos.eig",
    "flagos.eigh",
    "flagos.geqp3",
    "flagos.geqrf",
    "flagos.hessenberg",
    "flagos.householder_product",
    "flagos.lu",
    "flagos.ormqr",
    "flagos.schur",
    "flagos.svd",
    "flagos.tridiagonal",
)
# More than one call, some of them the library's: slower than what vendor/ has for them, but the library all the same.
_CONTAINS_LIBRARY = frozenset({*LIBRARY, str(Opcode.CONVOLUTION), str(Opcode.DOT), FORWARD, BACKWARD})

# Calls that only enqueue products, whose f32 torch's setting for TF32 holds for.
_MULTIPLIES = frozenset(
    {
        str(Opcode.DOT),
        str(Opcode.RAGGED_DOT),
        str(Opcode.TRIANGULAR_SOLVE),
        *(
            f"aten::{name}"
            for name in ("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "dot", "mm", "mv", "vdot")
        ),
    }
)


def is_vendor_reference(instruction: Instruction, target: Target) -> bool:
    """Whether the reference kernel stands in vendor/table.py instead."""
    return not target.is_host and operation_of(instruction) in LIBRARY


def runs_library(instruction: Instruction, target: Target) -> bool:
    """Whether the reference kernel calls the library at all."""
    return not target.is_host and operation_of(instruction) in _CONTAINS_LIBRARY


def reference_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    kernel, into = registry.prepare(instruction), prepare_into(instruction)
    if target.has_tensor_float_switches and operation_of(instruction) in _MULTIPLIES:
        return (Variant("", _relying_on_it(kernel), into and _relying_on_it(into)),)
    return (Variant("", kernel, into),)


def _relying_on_it(kernel: Kernel) -> Kernel:
    @functools.wraps(kernel)
    def run(*arguments: Any) -> Value:
        with tensor_float.relied_on():
            result: Value = kernel(*arguments)
            return result

    return run
