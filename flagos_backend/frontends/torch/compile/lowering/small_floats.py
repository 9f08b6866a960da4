"""Floats as float8_e4m3fn, by integer arithmetic on their bits: it fuses with what makes them, as quantization does."""

from __future__ import annotations

import functools

import torch

from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array
from flagos_backend.ir.attributes import CompareAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType

E = ElementType

#: The types whose values f32 holds, from which PyTorch converts.
SOURCES = (E.F32, E.BF16, E.F16)
# Bits of f32: all but the sign; of the least normal e4m3 number, 2^-6; of 480, which e4m3 does not have; of infinity.
_MAGNITUDE, _LEAST_NORMAL, _BEYOND, _INFINITE = 0x7FFFFFFF, 0x3C800000, 0x43F00000, 0x7F800000
# Bits of an f32 fraction beyond those of e4m3; its exponent's bias over that of e4m3, where e4m3 has its exponent.
_DROPPED, _BIAS = 20, (127 - 7) << 3
_LARGEST, _NAN, _SIGN, _SIGN_AT = 0x7E, 0x7F, 0x80, 24
# Numbers below the least normal one are multiples of 2^-9.
_SUBNORMAL_STEPS = 512.0


@functools.cache
def _beyond() -> int:
    """PyTorch went from NaN to the largest number."""
    return _NAN if bool(torch.tensor(1e9).to(torch.float8_e4m3fn).float().isnan()) else _LARGEST


def as_e4m3(emitter: Emitter, x: Instruction) -> Instruction:
    """``x``, of one of SOURCES, rounded to nearest even. What is beyond 448 becomes what this PyTorch makes of it."""
    x = emitter.convert(x, E.F32)
    dims = array(x).dims

    def number(value: float, kind: ElementType = E.S32) -> Instruction:
        return emitter.operand(value, kind, dims)

    def compare(left: Instruction, direction: Comparison, right: Instruction) -> Instruction:
        return emitter.builder.add(Opcode.COMPARE, [left, right], CompareAttributes(direction))

    def seen_as(value: Instruction, kind: ElementType) -> Instruction:
        return emitter.builder.add(Opcode.BITCAST_CONVERT, [value], shape=ArrayShape(kind, dims))

    bits = seen_as(x, E.S32)
    magnitude = emitter.add(Opcode.AND, bits, number(_MAGNITUDE))
    last = emitter.add(Opcode.AND, emitter.add(Opcode.SHIFT_RIGHT_LOGICAL, magnitude, number(_DROPPED)), number(1))
    half = emitter.add(Opcode.ADD, last, number((1 << (_DROPPED - 1)) - 1))
    rounded = emitter.add(Opcode.SHIFT_RIGHT_LOGICAL, emitter.add(Opcode.ADD, magnitude, half), number(_DROPPED))
    normal = emitter.add(Opcode.SUBTRACT, rounded, number(_BIAS))
    # Only a small number is taken from here; others stay in range by the bound.
    least = seen_as(number(_LEAST_NORMAL), E.F32)
    small = emitter.add(Opcode.MINIMUM, seen_as(magnitude, E.F32), least)
    steps = emitter.add(Opcode.ROUND_EVEN, emitter.add(Opcode.MULTIPLY, small, number(_SUBNORMAL_STEPS, E.F32)))
    subnormal = emitter.convert(steps, E.S32)
    found = emitter.add(Opcode.SELECT, compare(magnitude, Comparison.LT, number(_LEAST_NORMAL)), subnormal, normal)
    top = number(_beyond())
    found = emitter.add(Opcode.MINIMUM, found, top)
    found = emitter.add(Opcode.SELECT, compare(magnitude, Comparison.GE, number(_BEYOND)), top, found)
    found = emitter.add(Opcode.SELECT, compare(magnitude, Comparison.GT, number(_INFINITE)), number(_NAN), found)
    sign = emitter.add(Opcode.AND, emitter.add(Opcode.SHIFT_RIGHT_LOGICAL, bits, number(_SIGN_AT)), number(_SIGN))
    byte = emitter.convert(emitter.add(Opcode.OR, found, sign), E.U8)
    return seen_as(byte, E.F8E4M3FN)
