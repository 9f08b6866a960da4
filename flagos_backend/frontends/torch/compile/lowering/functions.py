"""Elementwise operators that are several instructions, as ATen computes them for float32 and float64, and quotients of
integers. For 16-bit floats they are ATen's, which computes wider and rounds once."""

from __future__ import annotations

from typing import Any

import torch

from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering.elementwise import HALF_FLOATS, Operand, binary, refuse_complex
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.table import lowering
from flagos_backend.ir.attributes import CompareAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType

aten = torch.ops.aten
E = ElementType


class _Floats:
    """What a rule computes with: arrays of the type and sizes of ``result``, which is float32 or float64."""

    def __init__(self, emitter: Emitter, result: torch.Tensor, *operands: Operand) -> None:
        refuse_complex(result, operands)
        self.kind, self.dims, self.emitter = element_type(result), tuple(result.shape), emitter
        if self.kind not in (E.F32, E.F64):
            raise NoLoweringError("other types than float32 and float64 are ATen's")
        self.operands = [self.of(operand) for operand in operands]

    def of(self, value: Operand) -> Instruction:
        return self.emitter.operand(value, self.kind, self.dims)

    def add(self, opcode: Opcode, *operands: Operand) -> Instruction:
        return self.emitter.add(opcode, *(self.of(operand) for operand in operands))

    def compare(self, direction: Comparison, x: Operand, y: Operand) -> Instruction:
        return self.emitter.builder.add(Opcode.COMPARE, [self.of(x), self.of(y)], CompareAttributes(direction))

    def select(self, condition: Instruction, x: Operand, y: Operand) -> Instruction:
        return self.emitter.add(Opcode.SELECT, condition, self.of(x), self.of(y))


# ---- Of one operand


@lowering(aten.sign.default, aten.sgn.default)
def _sign(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    """0 of both zeros and of NaN."""
    floats = _Floats(emitter, result, x)
    (x,) = floats.operands
    negative = floats.select(floats.compare(Comparison.LT, x, 0.0), -1.0, 0.0)
    return floats.select(floats.compare(Comparison.GT, x, 0.0), 1.0, negative)


@lowering(aten.trunc.default)
def _trunc(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    floats = _Floats(emitter, result, x)
    (x,) = floats.operands
    return _toward_zero(floats, x)


def _toward_zero(floats: _Floats, x: Instruction) -> Instruction:
    negative = floats.compare(Comparison.LT, x, 0.0)
    return floats.select(negative, floats.add(Opcode.CEIL, x), floats.add(Opcode.FLOOR, x))


@lowering(aten.isnan.default)
def _isnan(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    _of_floats(x)
    return emitter.builder.add(Opcode.COMPARE, [x, x], CompareAttributes(Comparison.NE))


@lowering(aten.isinf.default)
def _isinf(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    kind = _of_floats(x)
    infinity = emitter.operand(float("inf"), kind, array(x).dims)
    return emitter.builder.add(Opcode.COMPARE, [emitter.add(Opcode.ABS, x), infinity], CompareAttributes(Comparison.EQ))


def _of_floats(x: Instruction) -> ElementType:
    kind = array(x).element_type
    if not kind.is_float or kind.bits < 16:
        raise NoLoweringError("only floats of 16 bits or more are compared here")
    return kind


@lowering(aten.atan.default)
def _atan(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    return binary(emitter, result, Opcode.ATAN2, x, 1.0, exact_number=True)


# ---- Of two operands


@lowering(aten.pow.Tensor_Scalar)
def _pow(emitter: Emitter, result: torch.Tensor, x: Instruction, exponent: float) -> Instruction:
    """ATen turns some exponents into copies, products and roots."""
    floats = _Floats(emitter, result, x)
    (x,) = floats.operands
    match exponent:
        case 1:
            return x
        case 2 | -2:
            power = floats.add(Opcode.MULTIPLY, x, x)
        case 3:
            power = floats.add(Opcode.MULTIPLY, floats.add(Opcode.MULTIPLY, x, x), x)
        case 0.5:
            power = floats.add(Opcode.SQRT, x)
        case -0.5:
            power = floats.add(Opcode.RSQRT, x)
        case -1:
            power = x
        case _:
            return floats.add(Opcode.POWER, x, exponent)
    return floats.add(Opcode.DIVIDE, 1.0, power) if exponent in (-1, -2) else power


@lowering(aten.pow.Scalar)
def _exponential(emitter: Emitter, result: torch.Tensor, base: float, exponent: Instruction) -> Instruction:
    return _Floats(emitter, result, exponent).add(Opcode.POWER, base, exponent)


@lowering(aten.pow.Tensor_Tensor)
def _power(emitter: Emitter, result: torch.Tensor, base: Instruction, exponent: Instruction) -> Instruction:
    return _Floats(emitter, result, base, exponent).add(Opcode.POWER, base, exponent)


class _Integers:
    """``x`` and ``y`` as arrays of the type and sizes of ``result``, which is of integers; how often ``y`` is in ``x``,
    towards zero, and the rest, which has the sign of ``x``. The quotient of the least number and -1 is the least one.

    A divisor of zero is an error on the host, which ATen finds, and anything on accelerators."""

    def __init__(self, emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand) -> None:
        kind, dims = element_type(result), tuple(result.shape)
        if kind is E.PRED or any(isinstance(v, bool) or not _is_integer(v) for v in (x, y)):
            raise NoLoweringError("quotients of truth values are ATen's")
        if (emitter.on_host and isinstance(y, Instruction)) or (not isinstance(y, Instruction) and y == 0):
            raise NoLoweringError("ATen refuses to divide by zero")
        self.emitter, self.kind = emitter, kind
        self.x, self.y = emitter.operand(x, kind, dims), emitter.operand(y, kind, dims)
        self.rest = emitter.add(Opcode.REMAINDER, self.x, self.y)
        self.quotient = emitter.add(Opcode.DIVIDE, self.x, self.y)

    def lower(self) -> tuple[Instruction, Instruction]:
        """The quotient rounded down, and its rest, which has the sign of ``y``."""
        if not self.kind.is_signed:
            return self.quotient, self.rest
        zero, one = (self.emitter.operand(number, self.kind, array(self.x).dims) for number in (0, 1))

        def compare(direction: Comparison, x: Instruction, y: Instruction) -> Instruction:
            return self.emitter.builder.add(Opcode.COMPARE, [x, y], CompareAttributes(direction))

        signs = (compare(Comparison.LT, value, zero) for value in (self.rest, self.y))
        above = self.emitter.add(Opcode.AND, compare(Comparison.NE, self.rest, zero), compare(Comparison.NE, *signs))
        quotient = self.emitter.add(
            Opcode.SELECT, above, self.emitter.add(Opcode.SUBTRACT, self.quotient, one), self.quotient
        )
        rest = self.emitter.add(Opcode.SELECT, above, self.emitter.add(Opcode.ADD, self.rest, self.y), self.rest)
        return quotient, rest


def _is_integer(value: Operand) -> bool:
    return isinstance(value, int) if not isinstance(value, Instruction) else array(value).element_type.is_integer


def _of_integers(result: torch.Tensor) -> bool:
    return not result.dtype.is_floating_point and not result.is_complex()


@lowering(aten.fmod.Tensor, aten.fmod.Scalar)
def _fmod(emitter: Emitter, result: torch.Tensor, x: Instruction, y: Operand) -> Instruction:
    """With the sign of the dividend."""
    if _of_integers(result):
        return _Integers(emitter, result, x, y).rest
    return _Floats(emitter, result, x, y).add(Opcode.REMAINDER, x, y)


@lowering(aten.remainder.Tensor, aten.remainder.Scalar)
def _remainder(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand) -> Instruction:
    """With the sign of the divisor."""
    if _of_integers(result):
        return _Integers(emitter, result, x, y).lower()[1]
    return _modulo(_Floats(emitter, result, x, y))[0]


def _modulo(floats: _Floats) -> tuple[Instruction, Instruction, Instruction]:
    """x mod y with the sign of y; with the sign of x; and where they differ."""
    x, y = floats.operands
    rest = floats.add(Opcode.REMAINDER, x, y)
    signs_differ = floats.emitter.builder.add(
        Opcode.COMPARE,
        [floats.compare(Comparison.LT, y, 0.0), floats.compare(Comparison.LT, rest, 0.0)],
        CompareAttributes(Comparison.NE),
    )
    differ = floats.emitter.add(Opcode.AND, floats.compare(Comparison.NE, rest, 0.0), signs_differ)
    return floats.select(differ, floats.add(Opcode.ADD, rest, y), rest), rest, differ


@lowering(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _rounded_quotient(
    emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand, *, rounding_mode: str | None = None
) -> Instruction:
    if _of_integers(result):
        integers = _Integers(emitter, result, x, y)
        return integers.quotient if rounding_mode == "trunc" else integers.lower()[0]
    floats = _Floats(emitter, result, x, y)
    x, y = floats.operands
    quotient = floats.add(Opcode.DIVIDE, x, y)
    if rounding_mode is None:
        return quotient
    return _toward_zero(floats, quotient) if rounding_mode == "trunc" else _floor_quotient(floats, quotient)


@lowering(aten.floor_divide.default, aten.floor_divide.Scalar)
def _floor_divide(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand) -> Instruction:
    if _of_integers(result):
        return _Integers(emitter, result, x, y).lower()[0]
    floats = _Floats(emitter, result, x, y)
    return _floor_quotient(floats, floats.add(Opcode.DIVIDE, *floats.operands))


def _floor_quotient(floats: _Floats, quotient: Instruction) -> Instruction:
    """As Python and ATen divide: from the remainder, so that rounding does not lead to the next whole number."""
    x, y = floats.operands
    _, rest, differ = _modulo(floats)
    exact = floats.add(Opcode.DIVIDE, floats.add(Opcode.SUBTRACT, x, rest), y)
    exact = floats.select(differ, floats.add(Opcode.SUBTRACT, exact, 1.0), exact)
    floor = floats.add(Opcode.FLOOR, exact)
    up = floats.compare(Comparison.GT, floats.add(Opcode.SUBTRACT, exact, floor), 0.5)
    rounded = floats.select(up, floats.add(Opcode.ADD, floor, 1.0), floor)
    # A zero has the sign of the quotient.
    zero = floats.add(Opcode.MULTIPLY, quotient, 0.0)
    rounded = floats.select(floats.compare(Comparison.EQ, exact, 0.0), zero, rounded)
    return floats.select(floats.compare(Comparison.EQ, y, 0.0), quotient, rounded)


# ---- Bounds


@lowering(aten.clamp.default)
def _clamp(
    emitter: Emitter, result: torch.Tensor, x: Instruction, low: float | None = None, high: float | None = None
) -> Instruction:
    if any(bound is not None and bound != bound for bound in (low, high)):
        raise NoLoweringError("a bound is NaN")
    if element_type(result) in HALF_FLOATS:
        raise NoLoweringError("ATen rounds the bounds of 16-bit floats its own way")
    for opcode, bound in ((Opcode.MAXIMUM, low), (Opcode.MINIMUM, high)):
        if bound is not None:
            x = binary(emitter, result, opcode, x, bound)
    return emitter.convert(x, element_type(result))


@lowering(aten.clamp_min.default)
def _clamp_min(emitter: Emitter, result: torch.Tensor, x: Instruction, low: float) -> Instruction:
    return _clamp(emitter, result, x, low)


@lowering(aten.clamp_max.default)
def _clamp_max(emitter: Emitter, result: torch.Tensor, x: Instruction, high: float) -> Instruction:
    return _clamp(emitter, result, x, None, high)


@lowering(aten.clamp.Tensor)
def _clamp_by_tensors(
    emitter: Emitter, result: torch.Tensor, x: Instruction, low: Operand | None = None, high: Operand | None = None
) -> Instruction:
    given = [bound for bound in (low, high) if bound is not None]
    floats = _Floats(emitter, result, x, *given)
    for opcode, bound in ((Opcode.MAXIMUM, low), (Opcode.MINIMUM, high)):
        if bound is not None:
            x = floats.add(opcode, x, bound)
    return x


# ---- Of three operands, as optimizers have them


@lowering(aten.addcmul.default)
def _addcmul(
    emitter: Emitter, result: torch.Tensor, x: Instruction, first: Operand, second: Operand, *, value: float = 1
) -> Instruction:
    floats = _Floats(emitter, result, x, first, second)
    x, first, second = floats.operands
    scaled = first if value == 1 else floats.add(Opcode.MULTIPLY, value, first)
    return floats.add(Opcode.ADD, x, floats.add(Opcode.MULTIPLY, scaled, second))


@lowering(aten.addcdiv.default)
def _addcdiv(
    emitter: Emitter, result: torch.Tensor, x: Instruction, first: Operand, second: Operand, *, value: float = 1
) -> Instruction:
    floats = _Floats(emitter, result, x, first, second)
    x, first, second = floats.operands
    scaled = first if value == 1 else floats.add(Opcode.MULTIPLY, value, first)
    return floats.add(Opcode.ADD, x, floats.add(Opcode.DIVIDE, scaled, second))


@lowering(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(emitter: Emitter, result: torch.Tensor, start: Instruction, end: Instruction, weight: Operand) -> Instruction:
    """From the nearer end, so that a weight of 1 is exact."""
    floats = _Floats(emitter, result, start, end, weight)
    start, end, factor = floats.operands
    difference = floats.add(Opcode.SUBTRACT, end, start)
    from_start = floats.add(Opcode.ADD, start, floats.add(Opcode.MULTIPLY, factor, difference))
    rest = floats.add(Opcode.MULTIPLY, floats.add(Opcode.SUBTRACT, factor, 1.0), difference)
    from_end = floats.add(Opcode.ADD, end, rest)
    if not isinstance(weight, Instruction):
        return from_start if abs(weight) < 0.5 else from_end
    near = floats.compare(Comparison.LT, floats.add(Opcode.ABS, factor), 0.5)
    return floats.select(near, from_start, from_end)


def _fma(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand, z: Operand) -> Instruction:
    """A product and a sum, rounded once: products of float32 are exact in float64."""
    refuse_complex(result, [x, y, z])
    kind, dims = element_type(result), tuple(result.shape)
    if kind is not E.F32:
        raise NoLoweringError("no type holds products of other floats exactly")
    x, y, z = (emitter.operand(value, E.F64, dims) for value in (x, y, z))
    return emitter.convert(emitter.add(Opcode.ADD, emitter.add(Opcode.MULTIPLY, x, y), z), kind)


_fma_of_prims: Any = getattr(torch.ops.prims, "fma", None)  # of later versions of PyTorch
if _fma_of_prims is not None:
    lowering(_fma_of_prims.default)(_fma)
