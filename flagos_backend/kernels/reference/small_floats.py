"""Floats of 8 bits or less, kept as their bits in uint8: exact decoding and correctly rounded encoding by tables.
Used by every reference kernel that computes on them; formats are those of the ml_dtypes package."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from flagos_backend.ir.types import ElementType
from flagos_backend.process.torch_loading import torch

E = ElementType


@dataclass(frozen=True, slots=True)
class Format:
    """``infinity`` and ``nan`` are codes of positive sign; ``overflow``: the code that too large magnitudes become."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    nan: int
    overflow: int
    infinity: int | None = None
    signed: bool = True
    has_negative_zero: bool = True
    has_nan: bool = True

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits) if self.signed else 0


FORMATS: dict[ElementType, Format] = {
    E.F8E5M2: Format(5, 2, 15, nan=0x7E, overflow=0x7C, infinity=0x7C),
    E.F8E4M3: Format(4, 3, 7, nan=0x7C, overflow=0x78, infinity=0x78),
    E.F8E3M4: Format(3, 4, 3, nan=0x78, overflow=0x70, infinity=0x70),
    E.F8E4M3FN: Format(4, 3, 7, nan=0x7F, overflow=0x7F),
    E.F8E4M3B11FNUZ: Format(4, 3, 11, nan=0x80, overflow=0x80, has_negative_zero=False),
    E.F8E4M3FNUZ: Format(4, 3, 8, nan=0x80, overflow=0x80, has_negative_zero=False),
    E.F8E5M2FNUZ: Format(5, 2, 16, nan=0x80, overflow=0x80, has_negative_zero=False),
    E.F8E8M0FNU: Format(8, 0, 127, nan=0xFF, overflow=0xFF, signed=False),
    E.F4E2M1FN: Format(2, 1, 1, nan=0x08, overflow=0x07, has_nan=False),
}


def is_small(element_type: ElementType) -> bool:
    return element_type in FORMATS


def decode(codes: torch.Tensor, element_type: ElementType, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of ``codes`` (uint8, any shape) as ``dtype``, which must hold every value of the type."""
    return _values(element_type, dtype, codes.device)[codes.long()]


def encode(values: torch.Tensor, element_type: ElementType) -> torch.Tensor:
    """The codes (uint8) of real floats, rounded once to nearest, ties to even."""
    form = FORMATS[element_type]
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    codes = torch.bucketize(values.abs(), _thresholds(element_type, values.dtype, values.device), right=True)
    if not form.signed:
        # A power of two holds neither zero nor a negative number.
        codes = torch.where(values > 0, codes, form.nan)
    codes = codes.to(torch.uint8)
    if codes.numel() and form.overflow != _largest(form) + 1:
        codes = torch.where(codes > _largest(form), form.overflow, codes)
    if form.signed:
        negative = torch.signbit(values)
        if not form.has_negative_zero:
            # Code 0x80 is the NaN, so that a zero or an overflowed value takes no sign.
            negative = negative & (codes != 0) & (codes != form.nan)
        codes = torch.where(negative, codes | form.sign_bit, codes)
    return torch.where(values.isnan(), _nan_codes(values, form), codes)


def _nan_codes(values: torch.Tensor, form: Format) -> torch.Tensor:
    nan = torch.full((), form.nan, dtype=torch.uint8, device=values.device)
    if not form.signed or not form.has_negative_zero or not form.has_nan:
        return nan
    return torch.where(torch.signbit(values), nan | form.sign_bit, nan)


def _largest(form: Format) -> int:
    """The code of the largest finite magnitude."""
    top = (1 << (form.exponent_bits + form.mantissa_bits)) - 1
    if form.infinity is not None:
        return form.infinity - 1
    return top - 1 if form.nan == top else top


def _value(code: int, form: Format) -> float:
    magnitude = code & ~form.sign_bit & 0xFF
    largest = max(_largest(form), form.infinity or 0)
    if form.has_nan and (code == form.nan or (form.has_negative_zero and magnitude > largest)):
        return math.nan
    sign = -1.0 if code & form.sign_bit else 1.0
    if magnitude == form.infinity:
        return sign * math.inf
    exponent, mantissa = magnitude >> form.mantissa_bits, magnitude & ((1 << form.mantissa_bits) - 1)
    if exponent == 0 and form.mantissa_bits:
        return sign * math.ldexp(mantissa, 1 - form.bias - form.mantissa_bits)
    return sign * math.ldexp((1 << form.mantissa_bits) + mantissa, exponent - form.bias - form.mantissa_bits)


@functools.cache
def _values(element_type: ElementType, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    form = FORMATS[element_type]
    # Bits above the type's own width say nothing.
    mask = (1 << element_type.bits) - 1
    return torch.tensor([_value(c & mask, form) for c in range(256)], dtype=torch.float64, device=device).to(dtype)


@functools.cache
def _thresholds(element_type: ElementType, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Magnitude i + 1 begins at threshold i; the last one is where overflow begins."""
    form = FORMATS[element_type]
    codes = range(_largest(form) + 1)
    values = [_value(code, form) for code in codes]
    step = values[-1] - values[-2] if form.mantissa_bits else values[-1]
    midpoints = [(low + high) / 2 for low, high in zip(values, [*values[1:], values[-1] + step], strict=True)]
    thresholds = torch.tensor(midpoints, dtype=dtype, device=device)
    above = torch.nextafter(thresholds, torch.full_like(thresholds, math.inf))
    if not form.mantissa_bits:
        # ml_dtypes and XLA round a tie between powers of two up, and all above the least one to the second.
        thresholds[0] = torch.nextafter(torch.full_like(thresholds[0], values[0]), above[0])
        return thresholds
    # A tie goes to the even code: above an even code it takes more than the midpoint.
    even = torch.tensor([code % 2 == 0 for code in codes], device=device)
    return torch.where(even, above, thresholds)
