"""What the vendor's libraries compute, read by kernels/choice.py."""

from __future__ import annotations

from flagos_backend.devices.target import Target
from flagos_backend.ir.custom_calls.attention import BACKWARD, FORWARD
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.kernels.implementation import Implementation, Provider
from flagos_backend.kernels.vendor import attention, byte_products, convolution, dot, eigh, lu, ragged
from flagos_backend.kernels.vendor.library import LIBRARY, is_vendor_reference, reference_variants

_VENDOR = Provider.VENDOR
# What more than the reference kernel makes.
_VARIANTS = {"flagos.eigh": eigh.variants, "flagos.lu": lu.variants}


def _on_the_host(instruction: Instruction, target: Target) -> str:
    return "" if is_vendor_reference(instruction, target) else "the host has no vendor"


IMPLEMENTATIONS: tuple[tuple[str, Implementation], ...] = (
    (FORWARD, Implementation("attention", _VENDOR, attention.unsupported, attention.forward_variants, library=True)),
    (
        BACKWARD,
        Implementation(
            "attention_backward", _VENDOR, attention.unsupported_backward, attention.backward_variants, library=True
        ),
    ),
    (
        str(Opcode.CONVOLUTION),
        Implementation("convolution", _VENDOR, convolution.unsupported, convolution.variants, library=True),
    ),
    (str(Opcode.DOT), Implementation("dot", _VENDOR, dot.unsupported, dot.variants, library=True)),
    (
        "aten::_int_mm",
        Implementation("int_mm", _VENDOR, byte_products.call_unsupported, byte_products.call_variants, library=True),
    ),
    *(
        (name, Implementation(name, _VENDOR, _on_the_host, _VARIANTS.get(name, reference_variants), library=True))
        for name in LIBRARY
    ),
    (
        str(Opcode.RAGGED_DOT),
        Implementation(
            "grouped_mm",
            _VENDOR,
            ragged.unsupported,
            ragged.variants,
            library=True,
            is_checked=lambda instruction: True,
        ),
    ),
)
