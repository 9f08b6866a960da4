"""Elementwise operators, with PyTorch's type promotion. functions.py has those of several instructions. Of complex
numbers products only; ATen has the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flagos_backend.frontends.torch.compile.dtypes import ELEMENT_TYPE, TORCH_DTYPE
from flagos_backend.frontends.torch.compile.errors import NoLoweringError
from flagos_backend.frontends.torch.compile.lowering import complex_numbers, small_floats
from flagos_backend.frontends.torch.compile.lowering.emitter import Emitter, array, element_type
from flagos_backend.frontends.torch.compile.lowering.table import Rule, lowering
from flagos_backend.ir.attributes import CompareAttributes
from flagos_backend.ir.functions import TABLE, TABLE_OF_TWO, WRITTEN
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType

aten = torch.ops.aten
E = ElementType
Operand = Instruction | complex
HALF_FLOATS = (E.F16, E.BF16)


def refuse_complex(result: torch.Tensor, operands: Sequence[Any]) -> None:
    kinds = [element_type(result), *(array(o).element_type for o in operands if isinstance(o, Instruction))]
    if any(kind.is_complex or (kind.is_float and kind.bits < 16) for kind in kinds):
        raise NoLoweringError("complex numbers and small floats are ATen's")
    if any(isinstance(o, complex) for o in operands):
        raise NoLoweringError("complex numbers are ATen's")


def _compute_type(kind: ElementType, operands: Sequence[Any]) -> ElementType:
    """ATen computes 16-bit floats with a number in float32, and does not round the number first."""
    return E.F32 if kind in HALF_FLOATS and not all(isinstance(o, Instruction) for o in operands) else kind


def _float_unary(opcode: Opcode) -> Rule:
    """Operators of floats; integers become floats first, and what rounds them is ATen's."""

    def rule(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
        refuse_complex(result, [x])
        kind = element_type(result)
        if not kind.is_float:
            raise NoLoweringError("integers stay as they are")
        return emitter.add(opcode, emitter.convert(x, kind))

    return rule


for _function in TABLE:
    if _function.in_aten != WRITTEN:
        lowering(getattr(aten, _function.in_aten).default)(_float_unary(_function.opcode))


@lowering(aten.neg.default)
def _neg(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    refuse_complex(result, [x])
    return emitter.add(Opcode.NEGATE, x)


@lowering(aten.abs.default)
def _abs(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    refuse_complex(result, [x])
    if not (array(x).element_type.is_float or array(x).element_type.is_signed):
        raise NoLoweringError("abs of unsigned integers is ATen's")
    return emitter.add(Opcode.ABS, x)


@lowering(aten.reciprocal.default)
def _reciprocal(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    return binary(emitter, result, Opcode.DIVIDE, 1.0, x, exact_number=True)


@lowering(aten.bitwise_not.default)
def _bitwise_not(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    return emitter.add(Opcode.NOT, x)


@lowering(aten.logical_not.default)
def _logical_not(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    refuse_complex(result, [x])
    return emitter.add(Opcode.NOT, emitter.convert(x, E.PRED))


@lowering(aten.relu.default)
def _relu(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    refuse_boolean(result)
    return binary(emitter, result, Opcode.MAXIMUM, x, 0, exact_number=True)


def binary(
    emitter: Emitter, result: torch.Tensor, opcode: Opcode, x: Operand, y: Operand, *, exact_number: bool = False
) -> Instruction:
    """``exact_number``: a number among the operands is the same in every type, so nothing is computed wider."""
    refuse_complex(result, [x, y])
    kind = element_type(result)
    compute = kind if exact_number else _compute_type(kind, [x, y])
    dims = tuple(result.shape)
    operands = [emitter.operand(value, compute, dims) for value in (x, y)]
    return emitter.convert(emitter.add(opcode, *operands), kind)


def _float_binary(opcode: Opcode) -> Rule:
    """Operators of floats; integers and numbers become floats first."""
    return lambda emitter, result, x, y: binary(emitter, result, opcode, x, y)


def _overloads(name: str) -> list[Any]:
    """Those of an operator of two operands that return a new tensor."""
    packet = getattr(aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]


for _function in TABLE_OF_TWO:
    if _function.in_aten != WRITTEN:
        lowering(*_overloads(_function.in_aten))(_float_binary(_function.opcode))


def _is_boolean(operand: Operand) -> bool:
    return array(operand).element_type is E.PRED if isinstance(operand, Instruction) else isinstance(operand, bool)


def refuse_boolean(result: torch.Tensor) -> None:
    if result.dtype == torch.bool:
        raise NoLoweringError("arithmetic on booleans is ATen's")


@lowering(aten.add.Tensor, aten.add.Scalar)
def _add(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand, alpha: float = 1) -> Instruction:
    return _sum(emitter, result, Opcode.ADD, x, _scaled(emitter, result, y, alpha))


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def _sub(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand, alpha: float = 1) -> Instruction:
    return _sum(emitter, result, Opcode.SUBTRACT, x, _scaled(emitter, result, y, alpha))


@lowering(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand, alpha: float = 1) -> Instruction:
    return _sum(emitter, result, Opcode.SUBTRACT, y, _scaled(emitter, result, x, alpha))


def _sum(emitter: Emitter, result: torch.Tensor, opcode: Opcode, x: Operand, y: Operand) -> Instruction:
    """Unlike products, sums of 16-bit floats and a number round the number first."""
    refuse_boolean(result)
    if opcode is Opcode.SUBTRACT and any(_is_boolean(operand) for operand in (x, y)):
        raise NoLoweringError("differences of booleans are refused by ATen")
    if element_type(result) in HALF_FLOATS:
        x, y = (v if isinstance(v, Instruction) else torch.tensor(v, dtype=result.dtype).item() for v in (x, y))
    return binary(emitter, result, opcode, x, y)


def _scaled(emitter: Emitter, result: torch.Tensor, y: Operand, alpha: float) -> Operand:
    if alpha == 1:
        return y
    kind = element_type(result)
    if kind in HALF_FLOATS:
        raise NoLoweringError("ATen scales 16-bit floats in float32 within the sum")
    if not isinstance(y, Instruction):
        return y * alpha
    refuse_complex(result, [y])
    dims = array(y).dims
    return emitter.add(Opcode.MULTIPLY, emitter.convert(y, kind), emitter.operand(alpha, kind, dims))


@lowering(aten.mul.Tensor, aten.mul.Scalar)
def _mul(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand) -> Instruction:
    if result.dtype == torch.bool:
        return binary(emitter, result, Opcode.AND, x, y)
    if result.is_complex() and isinstance(x, Instruction) and isinstance(y, Instruction):
        return complex_numbers.multiply(emitter, result, x, y)
    return _product(emitter, result, Opcode.MULTIPLY, x, y)


@lowering(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.true_divide.Scalar)
def _div(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand) -> Instruction:
    return _product(emitter, result, Opcode.DIVIDE, x, y)


def _product(emitter: Emitter, result: torch.Tensor, opcode: Opcode, x: Operand, y: Operand) -> Instruction:
    """A second operand of one element is as good as a number: beside it ATen computes 16-bit floats in float32, too."""
    kind = element_type(result)
    one = array(y) if isinstance(y, Instruction) else None
    if kind not in HALF_FLOATS or one is None or one.num_elements != 1 or one.element_type is kind:
        return binary(emitter, result, opcode, x, y)
    refuse_complex(result, [x, y])
    dims = tuple(result.shape)
    operands = [emitter.operand(value, E.F32, dims) for value in (x, y)]
    return emitter.convert(emitter.add(opcode, *operands), kind)


@lowering(aten.maximum.default)
def _maximum(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand) -> Instruction:
    return binary(emitter, result, Opcode.MAXIMUM, x, y)


@lowering(aten.minimum.default)
def _minimum(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand) -> Instruction:
    return binary(emitter, result, Opcode.MINIMUM, x, y)


def _bitwise(opcode: Opcode) -> Rule:
    def rule(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand) -> Instruction:
        return binary(emitter, result, opcode, x, y)

    return rule


lowering(aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)(_bitwise(Opcode.AND))
lowering(aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)(_bitwise(Opcode.OR))
lowering(aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)(_bitwise(Opcode.XOR))


def _shift(signed: Opcode, unsigned: Opcode) -> Rule:
    """By as many bits as there are, or more, all of the number is shifted out; to the right its sign stays."""

    def rule(emitter: Emitter, result: torch.Tensor, x: Operand, y: Operand) -> Instruction:
        kind = element_type(result)
        if not kind.is_integer or kind is E.PRED:
            raise NoLoweringError("bits of other types are ATen's")
        return binary(emitter, result, signed if kind.is_signed else unsigned, x, y)

    return rule


_LEFT, _RIGHT = Opcode.SHIFT_LEFT, Opcode.SHIFT_RIGHT_ARITHMETIC
lowering(
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
)(_shift(_LEFT, _LEFT))
lowering(
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
)(_shift(_RIGHT, Opcode.SHIFT_RIGHT_LOGICAL))


def _logical(opcode: Opcode) -> Rule:
    def rule(emitter: Emitter, result: torch.Tensor, x: Instruction, y: Instruction) -> Instruction:
        refuse_complex(result, [x, y])
        return emitter.add(opcode, *(emitter.operand(value, E.PRED, tuple(result.shape)) for value in (x, y)))

    return rule


lowering(aten.logical_and.default)(_logical(Opcode.AND))
lowering(aten.logical_or.default)(_logical(Opcode.OR))
lowering(aten.logical_xor.default)(_logical(Opcode.XOR))


def _compare(direction: Comparison) -> Rule:
    def rule(emitter: Emitter, result: torch.Tensor, x: Instruction, y: Operand) -> Instruction:
        refuse_complex(result, [x, y])
        kind = _common_type(x, y)
        operands = [emitter.operand(value, kind, tuple(result.shape)) for value in (x, y)]
        return emitter.builder.add(Opcode.COMPARE, operands, CompareAttributes(direction))

    return rule


def _common_type(x: Instruction, y: Operand) -> ElementType:
    """What ATen rounds both to before it compares them."""

    def meta(value: Operand) -> Any:
        if not isinstance(value, Instruction):
            return value
        # Only dtype and whether there are dimensions matter to promotion.
        dims = (1,) * array(value).rank
        return torch.empty(dims, dtype=TORCH_DTYPE[array(value).element_type], device="meta")

    return ELEMENT_TYPE[torch.result_type(meta(x), meta(y))]


for _name, _direction in {
    "eq": Comparison.EQ,
    "ne": Comparison.NE,
    "lt": Comparison.LT,
    "le": Comparison.LE,
    "gt": Comparison.GT,
    "ge": Comparison.GE,
}.items():
    lowering(getattr(aten, _name).Tensor, getattr(aten, _name).Scalar)(_compare(_direction))


@lowering(aten.where.self)
def _where(emitter: Emitter, result: torch.Tensor, condition: Any, x: Operand, y: Operand) -> Instruction:
    kind, dims = element_type(result), tuple(result.shape)
    if array(condition).element_type is not E.PRED:
        raise NoLoweringError("the condition is not boolean")
    chosen = [emitter.operand(value, kind, dims) for value in (x, y)]
    return emitter.add(Opcode.SELECT, emitter.expand(condition, dims), *chosen)


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(emitter: Emitter, result: torch.Tensor, x: Instruction, mask: Instruction, value: Any) -> Instruction:
    if not isinstance(value, Instruction):
        emitter.refuse_overflow(value, element_type(result))
    elif array(value).element_type is not element_type(result):
        raise NoLoweringError("ATen refuses a value out of range")
    return _where(emitter, result, mask, value, x)


# Derivatives that are a product or a choice.


@lowering(aten.threshold_backward.default)
def _threshold_backward(
    emitter: Emitter, result: torch.Tensor, gradient: Instruction, x: Instruction, threshold: float
) -> Instruction:
    refuse_complex(result, [gradient, x])
    kind, dims = array(x).element_type, tuple(result.shape)
    if kind in HALF_FLOATS:  # the threshold is not rounded
        kind = E.F32
    operands = [emitter.operand(value, kind, dims) for value in (x, threshold)]
    passes = emitter.builder.add(Opcode.COMPARE, operands, CompareAttributes(Comparison.LE))
    return _where(emitter, result, passes, 0, gradient)


@lowering(aten.tanh_backward.default)
def _tanh_backward(emitter: Emitter, result: torch.Tensor, gradient: Instruction, y: Instruction) -> Instruction:
    kind, dims = full_precision(result, gradient, y)
    square = emitter.add(Opcode.MULTIPLY, y, y)
    rest = emitter.add(Opcode.SUBTRACT, emitter.operand(1.0, kind, dims), square)
    return emitter.add(Opcode.MULTIPLY, gradient, rest)


@lowering(aten.sigmoid_backward.default)
def _sigmoid_backward(emitter: Emitter, result: torch.Tensor, gradient: Instruction, y: Instruction) -> Instruction:
    kind, dims = full_precision(result, gradient, y)
    rest = emitter.add(Opcode.SUBTRACT, emitter.operand(1.0, kind, dims), y)
    return emitter.add(Opcode.MULTIPLY, gradient, emitter.add(Opcode.MULTIPLY, rest, y))


def full_precision(result: torch.Tensor, *operands: Instruction) -> tuple[ElementType, tuple[int, ...]]:
    kind, dims = element_type(result), tuple(result.shape)
    if kind not in (E.F32, E.F64) or any(array(o).element_type is not kind or array(o).dims != dims for o in operands):
        raise NoLoweringError("ATen computes this in another type")
    return kind, dims


@lowering(aten._to_copy.default)
def _to_copy(emitter: Emitter, result: torch.Tensor, x: Instruction, **_: Any) -> Instruction:
    return _convert(emitter, result, x)


@lowering(torch.ops.prims.convert_element_type.default)
def _convert_element_type(emitter: Emitter, result: torch.Tensor, x: Instruction, dtype: torch.dtype) -> Instruction:
    return _convert(emitter, result, x)


def _convert(emitter: Emitter, result: torch.Tensor, x: Instruction) -> Instruction:
    source, kind = array(x).element_type, element_type(result)
    if kind is E.F8E4M3FN and source in small_floats.SOURCES:
        return small_floats.as_e4m3(emitter, x)
    if source is not kind:
        refuse_complex(result, [x])
    return emitter.cast(x, result)
