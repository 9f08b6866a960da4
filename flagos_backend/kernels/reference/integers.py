"""Integer arithmetic of every width with HLO's semantics, on storage tensors: wrap-around, unsigned order and division,
shifts past the width, division by zero. Used by the elementwise, conversion and reduction kernels."""

from __future__ import annotations

from collections.abc import Callable

from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.storage import dtype_of, wrap
from flagos_backend.process.torch_loading import torch

E = ElementType
Unary = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Stored as the signed type of the same bits.
_BIASED = frozenset({E.U16, E.U32, E.U64})


def least(element_type: ElementType) -> int:
    """The storage value of the smallest number of the type."""
    return -(1 << (element_type.bits - 1)) if element_type.is_signed else 0


def greatest(element_type: ElementType) -> int:
    """The storage value of the largest number of the type (-1 where unsigned lies as signed)."""
    if element_type in _BIASED:
        return -1
    return (1 << (element_type.bits - element_type.is_signed)) - 1


def ordered(x: torch.Tensor, element_type: ElementType) -> torch.Tensor:
    """A tensor that torch orders as HLO orders ``x``. Applied twice it gives ``x`` back."""
    return x ^ -(1 << (element_type.bits - 1)) if element_type in _BIASED else x


def widened(x: torch.Tensor, element_type: ElementType) -> torch.Tensor:
    """The values as int64; of U64 the bits."""
    if element_type in (E.U16, E.U32):
        return x.long() & ((1 << element_type.bits) - 1)
    return x.long()


def narrowed(x: torch.Tensor, element_type: ElementType) -> torch.Tensor:
    """int64 back into storage, modulo the type's width."""
    return wrap(x.to(dtype_of(element_type)), element_type)


def maximum(element_type: ElementType) -> Binary:
    if element_type in _BIASED:
        return lambda a, b: ordered(torch.maximum(ordered(a, element_type), ordered(b, element_type)), element_type)
    return torch.maximum


def minimum(element_type: ElementType) -> Binary:
    if element_type in _BIASED:
        return lambda a, b: ordered(torch.minimum(ordered(a, element_type), ordered(b, element_type)), element_type)
    return torch.minimum


# ---- The upper half of a product


def multiply_high(element_type: ElementType) -> Binary:
    if element_type is E.U64:
        return _unsigned_high_64
    if element_type is E.S64:
        return lambda a, b: _unsigned_high_64(a, b) - torch.where(a < 0, b, 0) - torch.where(b < 0, a, 0)
    return lambda a, b: narrowed(
        (widened(a, element_type) * widened(b, element_type)) >> element_type.bits, element_type
    )


def _unsigned_high_64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of halves of 32 bits, whose products and carries fit 64 bits."""
    a_low, b_low, a_high, b_high = _lower_32(a), _lower_32(b), _upper_32(a), _upper_32(b)
    first = a_high * b_low + _upper_32(a_low * b_low)
    second = a_low * b_high + _lower_32(first)
    return a_high * b_high + _upper_32(first) + _upper_32(second)


def _lower_32(x: torch.Tensor) -> torch.Tensor:
    return x & 0xFFFF_FFFF


def _upper_32(x: torch.Tensor) -> torch.Tensor:
    return (x >> 32) & 0xFFFF_FFFF


# ---- Division


def _signed_quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # By 0 the quotient is -1; by -1 it is a wrapping negation, where the processor would trap on the least integer.
    zero, minus_one = b == 0, b == -1
    quotient = torch.div(a, torch.where(zero | minus_one, 1, b), rounding_mode="trunc")
    return torch.where(zero, -1, torch.where(minus_one, -a, quotient))


def _signed_remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    zero = b == 0
    return torch.where(zero, a, torch.fmod(a, torch.where(zero | (b == -1), 1, b)))


def _unsigned_quotient_64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Halve the dividend so that it is positive, divide, double, and correct by at most one; for divisors with the top
    bit set the quotient is 0 or 1."""
    order_a, order_b = ordered(a, E.U64), ordered(b, E.U64)
    divisor = b.clamp(min=1)
    quotient = torch.div((a >> 1) & greatest(E.S64), divisor, rounding_mode="trunc") << 1
    rest = a - quotient * divisor
    quotient = quotient + (ordered(rest, E.U64) >= ordered(divisor, E.U64))
    return torch.where(b == 0, -1, torch.where(b < 0, (order_a >= order_b).long(), quotient))


def _unsigned_remainder_64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b == 0, a, a - _unsigned_quotient_64(a, b) * b)


def divide(element_type: ElementType) -> Binary:
    """By 0: all bits set. The least integer by -1: itself."""
    if element_type is E.U64:
        return _unsigned_quotient_64
    if element_type.is_signed:
        return lambda a, b: wrap(_signed_quotient(a, b), element_type)
    ones = greatest(element_type)
    if element_type in _BIASED:
        return lambda a, b: torch.where(
            b == 0, ones, narrowed(_safe_div(widened(a, element_type), widened(b, element_type)), element_type)
        )
    return lambda a, b: torch.where(b == 0, ones, _safe_div(a, b))


def remainder(element_type: ElementType) -> Binary:
    """The sign is the dividend's. By 0: the dividend."""
    if element_type is E.U64:
        return _unsigned_remainder_64
    if element_type in _BIASED:
        return lambda a, b: torch.where(
            b == 0, a, narrowed(_safe_mod(widened(a, element_type), widened(b, element_type)), element_type)
        )
    if element_type.is_signed:
        return _signed_remainder
    return lambda a, b: torch.where(b == 0, a, _safe_mod(a, b))


def _safe_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, torch.where(b == 0, 1, b), rounding_mode="trunc")


def _safe_mod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmod(a, torch.where(b == 0, 1, b))


def divide_by(element_type: ElementType, divisor: int) -> Unary | None:
    """The quotient by a constant (its storage value), which needs no guards; None where that is not faster."""
    if element_type in _BIASED or divisor in (0, -1):
        return None
    return lambda a: torch.div(a, divisor, rounding_mode="trunc")


def remainder_by(element_type: ElementType, divisor: int) -> Unary | None:
    if element_type in _BIASED or divisor in (0, -1):
        return None
    return lambda a: torch.fmod(a, divisor)


# ---- Shifts: the amount is unsigned, and one not below the width shifts everything out


def shift_left(element_type: ElementType) -> Binary:
    bits = element_type.bits

    def shift(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        inside = (b >= 0) & (b < bits)
        return torch.where(inside, wrap(a << torch.where(inside, b, 0), element_type), 0)

    return shift


def shift_right_arithmetic(element_type: ElementType) -> Binary:
    bits = element_type.bits
    if element_type in (E.U1, E.U2, E.U4, E.U8):
        # The top bit is the sign here as well.
        def shift_byte(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            amount = torch.where(b < bits, b, bits - 1)
            signed = (a << (8 - bits)).view(torch.int8) >> (8 - bits)
            return wrap((signed >> amount.view(torch.int8)).view(torch.uint8), element_type)

        return shift_byte

    def shift(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a >> torch.where((b >= 0) & (b < bits), b, bits - 1)

    return shift


def shift_right_logical(element_type: ElementType) -> Binary:
    bits = element_type.bits
    if dtype_of(element_type) is torch.uint8:
        return lambda a, b: torch.where(b < bits, a >> torch.where(b < bits, b, 0), 0)

    def shift(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        inside = (b >= 0) & (b < bits)
        amount = torch.where(inside & (b > 0), b - 1, 0)
        # The first place is shifted with the sign masked away, so that the rest brings in zeros.
        shifted = wrap(((a >> 1) & ((1 << (bits - 1)) - 1)) >> amount, element_type)
        return torch.where(inside, torch.where(b == 0, a, shifted), 0)

    return shift


def shift_by(opcode: Opcode, element_type: ElementType, amount: int) -> Unary:
    """The shift by a constant amount (its storage value)."""
    bits = element_type.bits
    inside = 0 <= amount < bits
    if opcode is Opcode.SHIFT_LEFT:
        return (lambda a: wrap(a << amount, element_type)) if inside else torch.zeros_like
    if opcode is Opcode.SHIFT_RIGHT_ARITHMETIC:
        general = shift_right_arithmetic(element_type)
        constant = torch.tensor(amount, dtype=dtype_of(element_type))
        if not element_type.is_signed and element_type not in _BIASED:
            return lambda a: general(a, constant.to(a.device))
        clipped = amount if inside else bits - 1
        return lambda a: a >> clipped
    if not inside:
        return torch.zeros_like
    if amount == 0:
        return torch.clone
    mask = (1 << (bits - amount)) - 1
    return lambda a: (a >> amount) & mask


# ---- Powers and bit counts


def power(element_type: ElementType) -> Binary:
    """Wraps around. A negative exponent gives the truncated reciprocal power: 0, 1 or -1."""
    bits = element_type.bits

    def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        base, exponent = widened(a, element_type), widened(b, element_type)
        result = torch.ones_like(base)
        square = base
        for place in range(bits - element_type.is_signed):
            result = torch.where((exponent >> place) & 1 != 0, result * square, result)
            square = square * square
        if element_type.is_signed:
            parity = torch.where(exponent & 1 != 0, -1, 1)
            reciprocal = torch.where(base == 1, 1, torch.where(base == -1, parity, 0))
            result = torch.where(exponent < 0, reciprocal, result)
        return narrowed(result, element_type)

    return compute


def _ones(x: torch.Tensor) -> torch.Tensor:
    """How many bits of each int64 are set."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56) & 0xFF


def _bits_of(x: torch.Tensor, element_type: ElementType) -> torch.Tensor:
    x = x.long()
    return x if element_type.bits == 64 else x & ((1 << element_type.bits) - 1)


def population_count(element_type: ElementType) -> Unary:
    return lambda x: narrowed(_ones(_bits_of(x, element_type)), element_type)


def count_leading_zeros(element_type: ElementType) -> Unary:
    bits = element_type.bits

    def compute(x: torch.Tensor) -> torch.Tensor:
        x = _bits_of(x, element_type)
        # Smear the highest set bit downwards; what stays clear above it are the leading zeros.
        x = x | ((x >> 1) & greatest(E.S64))
        for distance in (2, 4, 8, 16, 32):
            x = x | (x >> distance)
        return narrowed(bits - _ones(x), element_type)

    return compute


def absolute(element_type: ElementType) -> Unary:
    """The least signed integer has no opposite and stays."""
    return (lambda x: wrap(x.abs(), element_type)) if element_type.is_signed else torch.clone


def sign(element_type: ElementType) -> Unary:
    if element_type.is_signed:
        return torch.sign
    return lambda x: (x != 0).to(x.dtype)


def logical_not(element_type: ElementType) -> Unary:
    return lambda x: wrap(~x, element_type)
