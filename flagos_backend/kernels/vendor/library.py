"""Instructions whose reference kernel is the chip maker's library already: ATen's operator on tensors of the device."""

from __future__ import annotations

from flagos_backend.devices.target import Target
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.attention import BACKWARD, FORWARD
from flagos_backend.kernels.implementation import Variant, operation_of
from flagos_backend.kernels.reference import registry
from flagos_backend.kernels.reference.aten import prepare_into

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


def is_vendor_reference(instruction: Instruction, target: Target) -> bool:
    """Whether the reference kernel stands in vendor/table.py instead."""
    return not target.is_host and operation_of(instruction) in LIBRARY


def runs_library(instruction: Instruction, target: Target) -> bool:
    """Whether the reference kernel calls the library at all."""
    return not target.is_host and operation_of(instruction) in _CONTAINS_LIBRARY


def reference_variants(instruction: Instruction, target: Target) -> tuple[Variant, ...]:
    return (Variant("", registry.prepare(instruction), prepare_into(instruction)),)
