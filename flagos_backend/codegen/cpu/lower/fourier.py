"""Writes Fourier transforms as the numbers of a native step: kind, precision, lengths and how many there are.

Used by emitter.py; native/cpu/parse.cc reads the numbers.
"""

from __future__ import annotations

from math import prod

from flagos_backend.ir.attributes import FftAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import FftType
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.indexing import dims_of

_IS_DOUBLE = {ElementType.F32: 0, ElementType.C64: 0, ElementType.F64: 1, ElementType.C128: 1}
# Of native code: lengths are numbers of 32 bits, and all elements are fewer.
_MAX_LENGTH = (1 << 31) - 1
_MAX_ELEMENTS = 1 << 48


def fourier_numbers(item: Instruction) -> tuple[int, ...] | None:
    """The numbers of ``item``; None for what native code does not take: nothing to compute, or too much."""
    attributes = item.attributes_as(FftAttributes)
    lengths = attributes.lengths
    operand, result = dims_of(item.operands[0]), dims_of(item)
    batch = prod(operand[: len(operand) - len(lengths)])
    if 0 in (*operand, *result) or max(lengths) > _MAX_LENGTH or batch * prod(lengths) > _MAX_ELEMENTS:
        return None
    shape = item.operands[0].shape
    assert isinstance(shape, ArrayShape)
    return (int(attributes.fft_type), _IS_DOUBLE[shape.element_type], len(lengths), batch, *lengths)


def fourier_scratch(item: Instruction) -> int:
    """Bytes in which a transform to real numbers along several dimensions has those before the last."""
    attributes = item.attributes_as(FftAttributes)
    shape = item.operands[0].shape
    assert isinstance(shape, ArrayShape)
    inverse_of_several = attributes.fft_type is FftType.IRFFT and len(attributes.lengths) > 1
    return shape.num_bytes if inverse_of_several else 0
