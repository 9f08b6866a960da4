"""Kernels that change the element type: convert, bitcast-convert, reduce-precision, stochastic-convert."""

from __future__ import annotations

from flagos_backend.errors import UnsupportedElementType
from flagos_backend.ir.attributes import ReducePrecisionAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference import integers, small_floats
from flagos_backend.kernels.reference.integers import Unary
from flagos_backend.kernels.reference.registry import Kernel, Storage, identity, kernel
from flagos_backend.kernels.reference.storage import dtype_of, wrap
from flagos_backend.process.torch_loading import torch

E = ElementType


def element_types(instruction: Instruction) -> tuple[ElementType, ElementType]:
    """Those of the first operand and of the result."""
    source, target = instruction.operands[0].shape, instruction.shape
    assert isinstance(source, ArrayShape)
    assert isinstance(target, ArrayShape)
    return source.element_type, target.element_type


# ---- convert


def converter(source: ElementType, target: ElementType) -> Unary | None:
    """The function that converts storage of one type to new storage of another, or None when the storage is the same.

    Integers wrap around, floats round to nearest even, floats to integers truncate and saturate with NaN giving 0,
    anything but zero is true. Complex converts to complex only: the verifier holds programs to that.
    """
    if source is target or _same_storage(source, target):
        return None
    if target.is_complex and not source.is_complex:
        dtype = dtype_of(target)
        widen = converter(source, target.real)
        return (lambda x: widen(x).to(dtype)) if widen else lambda x: x.to(dtype)
    if target is E.PRED:
        return _to_pred(source)
    if source is E.PRED or source.is_complex:
        return _from_pred_or_complex(source, target)
    if source.is_integer:
        return _integer_to_integer(source, target) if target.is_integer else _integer_to_float(source, target)
    return _float_to_integer(source, target) if target.is_integer else _float_to_float(source, target)


def _same_storage(source: ElementType, target: ElementType) -> bool:
    return (
        source.is_integer
        and target.is_integer
        and dtype_of(source) is dtype_of(target)
        and (source.bits == target.bits or (source.bits < target.bits <= 8))
    )


def _to_pred(source: ElementType) -> Unary:
    if small_floats.is_small(source):
        return lambda x: small_floats.decode(x, source) != 0
    return lambda x: x != 0


def _from_pred_or_complex(source: ElementType, target: ElementType) -> Unary:
    dtype = dtype_of(target)
    if small_floats.is_small(target):
        return lambda x: small_floats.encode(x.float(), target)
    if target.is_integer and target.is_signed and target.bits == 1:
        return lambda x: wrap(x.to(dtype), target)
    return lambda x: x.to(dtype)


def _integer_to_integer(source: ElementType, target: ElementType) -> Unary:
    if source in (E.U16, E.U32) and target.bits > source.bits:
        return lambda x: integers.narrowed(integers.widened(x, source), target)
    dtype = dtype_of(target)
    return (lambda x: wrap(x.to(dtype), target)) if target.bits < 8 else lambda x: x.to(dtype)


def _integer_to_float(source: ElementType, target: ElementType) -> Unary:
    # Types narrower than float32 are reached through it, with its rounding first, as XLA does.
    middle = torch.float64 if target is E.F64 else torch.float32

    def widen(x: torch.Tensor) -> torch.Tensor:
        if source is not E.U64:
            return (integers.widened(x, source) if source in (E.U16, E.U32) else x).to(middle)
        # A number with the top bit set is halved with its last bit kept as sticky, so that it rounds only once.
        halved = ((x >> 1) & integers.greatest(E.S64)) | (x & 1)
        return torch.where(x < 0, halved.to(middle) * 2, x.to(middle))

    if small_floats.is_small(target):
        return lambda x: small_floats.encode(widen(x), target)
    dtype = dtype_of(target)
    return widen if dtype is middle else lambda x: widen(x).to(dtype)


def _float_to_integer(source: ElementType, target: ElementType) -> Unary:
    dtype = dtype_of(target)
    if target.bits == 64:
        saturate = _saturate_s64 if target is E.S64 else _saturate_u64
    else:
        low = 0 if target.is_unsigned else integers.least(target)
        high = low + (1 << target.bits) - 1
        wide = torch.int64 if target is E.U32 else torch.int32

        def saturate(x: torch.Tensor) -> torch.Tensor:
            # Every 32-bit bound is exact in float64.
            return x.double().clamp(low, high).nan_to_num_(0).to(wide).to(dtype)

    if small_floats.is_small(source):
        return lambda x: saturate(small_floats.decode(x, source))
    return saturate


def _saturate_s64(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    high, low = x >= 2.0**63, x < -(2.0**63)
    inside = torch.where(high | low, 0, x).nan_to_num_(0).long()
    return torch.where(high, integers.greatest(E.S64), torch.where(low, integers.least(E.S64), inside))


def _saturate_u64(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    low = torch.where((x > 0) & (x < 2.0**63), x, 0).long()
    high = torch.where((x >= 2.0**63) & (x < 2.0**64), x - 2.0**63, 0).long() ^ integers.least(E.S64)
    return torch.where(x >= 2.0**64, -1, torch.where(x >= 2.0**63, high, low))


def _float_to_float(source: ElementType, target: ElementType) -> Unary:
    dtype = dtype_of(target)
    if small_floats.is_small(source):
        if small_floats.is_small(target):
            return lambda x: small_floats.encode(small_floats.decode(x, source), target)
        return lambda x: small_floats.decode(x, source).to(dtype)
    if small_floats.is_small(target):
        return lambda x: small_floats.encode(x, target)
    if source is E.F64 and target is E.F16:
        return lambda x: _float32_rounded_to_odd(x).to(dtype)
    return lambda x: x.to(dtype)


def _float32_rounded_to_odd(x: torch.Tensor) -> torch.Tensor:
    """float64 as the float32 beside it whose last bit says that something is missing: the next rounding is right then.

    torch reaches float16 through a float32 rounded to nearest, which makes ties of what lies right beside them.
    """
    nearest = x.float()
    bits = nearest.view(torch.int32)
    back = nearest.double()
    missing = (back != x) & nearest.isfinite() & (bits & 1 == 0)
    # Neighbours of one sign are neighbours as integers.
    return torch.where(missing, torch.where(back.abs() > x.abs(), bits - 1, bits + 1), bits).view(torch.float32)


@kernel(Opcode.CONVERT, storage=Storage.FRESH, elementwise=True)
def _prepare_convert(instruction: Instruction) -> Kernel:
    function = converter(*element_types(instruction))
    return (lambda run, x: function(x)) if function else identity


# ---- bitcast-convert


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Row major, by its strides too: torch takes whatever has no element for contiguous."""
    return x.contiguous() if x.numel() else x.new_empty(x.shape)


@kernel(Opcode.BITCAST_CONVERT, storage=Storage.VIEW, elementwise=True)
def _prepare_bitcast_convert(instruction: Instruction) -> Kernel:
    """A wider result swallows the operand's last dimension, a narrower one gets a new last dimension; the first of its
    elements are the low bits."""
    source, target = element_types(instruction)
    dtype = dtype_of(target)
    if source.is_complex is not target.is_complex:
        raise UnsupportedElementType.at(instruction, element_type=f"{source.name} bitcast to {target.name}")
    if source.bits == target.bits:
        if dtype is dtype_of(source):
            return identity
        if source.bits < 8:
            return lambda run, x: wrap(x.view(dtype), target)
        return lambda run, x: x.view(dtype)
    if min(source.bits, target.bits) < 8:
        return _repack(source, target)
    if source.bits > target.bits:
        return lambda run, x: _dense(x).unsqueeze(-1).view(dtype)
    return lambda run, x: _dense(x).view(dtype).squeeze(-1)


_BITS_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _repack(source: ElementType, target: ElementType) -> Kernel:
    """Between a type of less than a byte and a wider one."""
    dtype, bits = dtype_of(target), min(source.bits, target.bits)
    count = max(source.bits, target.bits) // bits
    mask = (1 << bits) - 1

    def split(run: object, x: torch.Tensor) -> torch.Tensor:
        whole = x.view(_BITS_DTYPE[x.element_size()]).long().unsqueeze(-1)
        parts = (whole >> torch.arange(0, count * bits, bits, device=x.device)) & mask
        return wrap(parts.to(torch.uint8).view(dtype), target)

    def merge(run: object, x: torch.Tensor) -> torch.Tensor:
        parts = (x.long() & mask) << torch.arange(0, count * bits, bits, device=x.device)
        whole = parts.sum(-1)
        if target.bits < 8:
            return wrap(whole.to(torch.uint8).view(dtype), target)
        return whole.to(_BITS_DTYPE[target.bytes]).view(dtype)

    return split if source.bits > target.bits else merge


# ---- reduce-precision

# Exponent and mantissa bits, and the integer type of the same width.
_FLOAT_LAYOUT = {
    E.F16: (5, 10, torch.int16),
    E.BF16: (8, 7, torch.int16),
    E.F32: (8, 23, torch.int32),
    E.F64: (11, 52, torch.int64),
}


@kernel(Opcode.REDUCE_PRECISION, storage=Storage.FRESH, elementwise=True)
def _prepare_reduce_precision(instruction: Instruction) -> Kernel:
    attributes = instruction.attributes_as(ReducePrecisionAttributes)
    element_type = element_types(instruction)[0]
    exponent_bits, mantissa_bits = attributes.exponent_bits, attributes.mantissa_bits
    if small_floats.is_small(element_type):
        reduce = _precision_reducer(E.F32, exponent_bits, mantissa_bits)
        return lambda run, x: small_floats.encode(reduce(small_floats.decode(x, element_type)), element_type)
    if element_type not in _FLOAT_LAYOUT:
        raise UnsupportedElementType.at(instruction, element_type=element_type.name)
    function = _precision_reducer(element_type, exponent_bits, mantissa_bits)
    return lambda run, x: function(x)


def _precision_reducer(element_type: ElementType, exponent_bits: int, mantissa_bits: int) -> Unary:
    """Rounds the mantissa to nearest even; then what the exponent cannot hold becomes infinity, and what would be
    subnormal a zero of the same sign."""
    source_exponent_bits, source_mantissa_bits, integer = _FLOAT_LAYOUT[element_type]
    dtype = dtype_of(element_type)
    dropped = source_mantissa_bits - mantissa_bits
    sign = torch.iinfo(integer).min
    exponent_mask = ((1 << source_exponent_bits) - 1) << source_mantissa_bits
    bias, reduced_bias = (1 << (source_exponent_bits - 1)) - 1, (1 << (exponent_bits - 1)) - 1
    largest = (bias + reduced_bias) << source_mantissa_bits
    smallest = (bias - reduced_bias) << source_mantissa_bits

    def reduce(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(integer)
        if dropped > 0:
            bits = (bits + ((bits >> dropped) & 1) + ((1 << (dropped - 1)) - 1)) & -(1 << dropped)
        if exponent_bits < source_exponent_bits:
            exponent = bits & exponent_mask
            bits = torch.where(exponent > largest, (bits & sign) | exponent_mask, bits)
            bits = torch.where(exponent <= smallest, bits & sign, bits)
        return torch.where(x != x, x, bits.view(dtype))

    return reduce


# ---- stochastic-convert


@kernel(Opcode.STOCHASTIC_CONVERT, storage=Storage.FRESH, elementwise=True)
def _prepare_stochastic_convert(instruction: Instruction) -> Kernel:
    """Float to signed integer, away from zero with the probability of the fraction: the random operand is compared with
    the fraction as a fixed-point number of its width. Saturates; NaN gives 0."""
    source, target = element_types(instruction)
    random_shape = instruction.operands[1].shape
    assert isinstance(random_shape, ArrayShape)
    random_type = random_shape.element_type
    supported = source in _FLOAT_LAYOUT and target.is_signed and random_type.is_unsigned and random_type.bits >= 8
    if not supported or random_type.bits != source.bits:
        raise UnsupportedElementType.at(instruction, element_type=f"{source.name} to {target.name}")
    saturate = _float_to_integer(E.F64, target)
    to_fixed = _saturate_u64 if random_type is E.U64 else _float_to_integer(E.F64, random_type)

    def convert(run: object, x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
        magnitude = x.double().abs()
        whole = magnitude.floor()
        fraction = to_fixed((magnitude - whole) * 2.0**random_type.bits)
        up = integers.ordered(random, random_type) < integers.ordered(fraction, random_type)
        return saturate(torch.copysign(whole + up, x.double()))

    return convert
