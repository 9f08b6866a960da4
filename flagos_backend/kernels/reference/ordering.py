"""Turns numbers into integers that torch orders as HLO does."""

from __future__ import annotations

from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference import small_floats
from flagos_backend.process.torch_loading import Tensor, torch

_BITS_DTYPE = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def total_order(values: Tensor, element_type: ElementType) -> Tensor:
    """Integers in the order of ``values``, floats as -NaN < -inf < ... < -0 < +0 < ... < inf < NaN. Not for complex.
    The only NaN of the types without -0 has that code, and so a negative sign."""
    if element_type is ElementType.PRED:
        return values.to(torch.uint8)
    if element_type.is_float:
        bits = values.contiguous().view(_BITS_DTYPE[values.element_size() * 8])
        if element_type.bits == 4:
            bits = bits << 4  # brings the sign to the top
        if element_type is ElementType.F8E8M0FNU:
            return values  # unsigned exponents: the bits are the order
        if small_floats.is_small(element_type) and not small_floats.FORMATS[element_type].has_negative_zero:
            return torch.where(bits > -128, torch.where(bits < 0, -128 - bits, bits), bits)
        info = torch.iinfo(bits.dtype)
        return bits ^ ((bits >> (info.bits - 1)) & info.max)
    if element_type.is_unsigned and element_type.bits > 8:
        return values ^ torch.iinfo(values.dtype).min
    return values
