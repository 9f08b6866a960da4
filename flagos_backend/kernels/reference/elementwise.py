"""Elementwise kernels: arithmetic, comparison, selection. Every element type has one table of functions on storage
tensors; the reductions take theirs from here as well (``binary_function``)."""

from __future__ import annotations

import math
from collections.abc import Callable

from flagos_backend.errors import UnsupportedElementType
from flagos_backend.ir.attributes import CompareAttributes, ConstantAttributes
from flagos_backend.ir.functions import TABLE, TABLE_OF_TWO, WRITTEN
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.kernels.reference import complex_numbers, integers, small_floats
from flagos_backend.kernels.reference.integers import Binary, Unary
from flagos_backend.kernels.reference.ordering import total_order
from flagos_backend.kernels.reference.registry import Kernel, Storage, kernel
from flagos_backend.kernels.reference.storage import from_bytes, wrap
from flagos_backend.process.torch_loading import torch

E = ElementType
O = Opcode  # noqa: E741


def element_type_of(instruction: Instruction) -> ElementType:
    """The element type of an instruction that gives one array."""
    shape = instruction.shape
    assert isinstance(shape, ArrayShape), instruction
    return shape.element_type


def splat_constant(instruction: Instruction) -> int | float | bool | complex | None:
    """The storage value that every element of ``instruction`` has, when that is known from a scalar constant."""
    while instruction.opcode in (O.BROADCAST, O.RESHAPE, O.COPY):
        instruction = instruction.operands[0]
    shape = instruction.shape
    if instruction.opcode is not O.CONSTANT or not isinstance(shape, ArrayShape) or shape.num_elements != 1:
        return None
    value: int | float | bool | complex = from_bytes(instruction.attributes_as(ConstantAttributes).data, shape).item()
    return value


# ---- Functions of floats


def _sign(x: torch.Tensor) -> torch.Tensor:
    # torch.sign drops NaN and the sign of zero.
    return torch.where((x != x) | (x == 0), x, torch.sign(x))


def _round_away(x: torch.Tensor) -> torch.Tensor:
    whole = torch.trunc(x)
    return torch.where((x - whole).abs() >= 0.5, whole + torch.sign(x), whole)


def _growing(function: Unary, end: Unary) -> Unary:
    """cosh or sinh, ``end`` giving the sign. torch's vectorised ones are infinite as soon as e**|x| is, though its half
    is not."""

    def call(x: torch.Tensor) -> torch.Tensor:
        result, root = function(x), torch.exp(x.abs() * 0.5)
        return torch.where(result.isinf(), end(x) * ((0.5 * root) * root), result)

    return call


def _cbrt(x: torch.Tensor) -> torch.Tensor:
    magnitude = x.abs().double()
    root = magnitude.pow(1 / 3)
    # The power is off by some ulp of double: one Newton step, where it is defined.
    better = root - (root - magnitude / (root * root)) / 3
    root = torch.where((magnitude > 0) & (magnitude < math.inf), better, root)
    return torch.copysign(root.to(x.dtype), x)


def _remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fmod. torch's vectorised one is wrong where the quotient overflows its type, so float32 goes through float64 and
    float64 is first reduced by multiples of the divisor."""
    if a.dtype is not torch.float64:
        return torch.fmod(a.double(), b.double()).to(a.dtype)
    step = 2.0**500
    for power in (4, 3, 2, 1):
        multiple = b
        for _ in range(power):
            multiple = multiple * step
        a = torch.fmod(a, multiple)
    return torch.fmod(a, b)


_FLOAT_UNARY: dict[Opcode, Unary] = {
    O.ABS: torch.abs,
    O.CBRT: _cbrt,
    O.COSH: _growing(torch.cosh, torch.ones_like),
    O.IMAG: torch.zeros_like,
    O.IS_FINITE: torch.isfinite,
    O.NEGATE: torch.neg,
    O.REAL: torch.clone,
    O.ROUND_AFZ: _round_away,
    O.SIGN: _sign,
    O.SINH: _growing(torch.sinh, torch.sign),
    **{function.opcode: getattr(torch, function.in_torch) for function in TABLE if function.in_torch != WRITTEN},
}
# Of two zeros with different signs maximum and minimum may give either.
_FLOAT_BINARY: dict[Opcode, Binary] = {
    O.ADD: torch.add,
    O.DIVIDE: torch.div,
    O.MAXIMUM: torch.maximum,
    O.MINIMUM: torch.minimum,
    O.MULTIPLY: torch.mul,
    O.REMAINDER: _remainder,
    O.SUBTRACT: torch.sub,
    **{function.opcode: getattr(torch, function.in_torch) for function in TABLE_OF_TWO if function.in_torch != WRITTEN},
}
# What torch computes on half-width floats in float32, rounding once. Anything else is widened here, to the same effect,
# but for torch.sqrt of float32, which may be off by a last bit.
_HALF_NATIVE = frozenset(
    {
        *(O.ABS, O.CEIL, O.FLOOR, O.IMAG, O.IS_FINITE, O.NEGATE, O.REAL, O.ROUND_EVEN, O.SIGN, O.SQRT),
        *(O.ADD, O.DIVIDE, O.MAXIMUM, O.MINIMUM, O.MULTIPLY, O.REMAINDER, O.SUBTRACT),
    }
)

# ---- Functions of integers and PRED

_INTEGER_UNARY: dict[Opcode, Callable[[ElementType], Unary]] = {
    O.ABS: integers.absolute,
    O.CLZ: integers.count_leading_zeros,
    O.IMAG: lambda e: torch.zeros_like,
    O.NEGATE: lambda e: lambda x: wrap(-x, e),
    O.NOT: integers.logical_not,
    O.POPCNT: integers.population_count,
    O.REAL: lambda e: torch.clone,
    O.SIGN: integers.sign,
}
_INTEGER_BINARY: dict[Opcode, Callable[[ElementType], Binary]] = {
    O.ADD: lambda e: torch.add if e.bits >= 8 else lambda a, b: wrap(a + b, e),
    O.AND: lambda e: torch.bitwise_and,
    O.DIVIDE: integers.divide,
    O.MAXIMUM: integers.maximum,
    O.MINIMUM: integers.minimum,
    O.MULHI: integers.multiply_high,
    O.MULTIPLY: lambda e: torch.mul if e.bits >= 8 else lambda a, b: wrap(a * b, e),
    O.OR: lambda e: torch.bitwise_or,
    O.POWER: integers.power,
    O.REMAINDER: integers.remainder,
    O.SHIFT_LEFT: integers.shift_left,
    O.SHIFT_RIGHT_ARITHMETIC: integers.shift_right_arithmetic,
    O.SHIFT_RIGHT_LOGICAL: integers.shift_right_logical,
    O.SUBTRACT: lambda e: torch.sub if e.bits >= 8 else lambda a, b: wrap(a - b, e),
    O.XOR: lambda e: torch.bitwise_xor,
}
_PRED_UNARY: dict[Opcode, Unary] = {O.NOT: torch.logical_not}
_PRED_BINARY: dict[Opcode, Binary] = {
    O.ADD: torch.logical_or,
    O.AND: torch.logical_and,
    O.MAXIMUM: torch.logical_or,
    O.MINIMUM: torch.logical_and,
    O.MULTIPLY: torch.logical_and,
    O.OR: torch.logical_or,
    O.SUBTRACT: torch.logical_xor,
    O.XOR: torch.logical_xor,
}
_SHIFTS = frozenset({O.SHIFT_LEFT, O.SHIFT_RIGHT_ARITHMETIC, O.SHIFT_RIGHT_LOGICAL})


def unary_function(opcode: Opcode, element_type: ElementType) -> Unary:
    """What ``opcode`` computes on storage tensors of ``element_type``. KeyError when it is not defined on that type."""
    if element_type is E.PRED:
        return _PRED_UNARY[opcode]
    if element_type.is_integer:
        return _INTEGER_UNARY[opcode](element_type)
    if element_type.is_complex:
        return complex_numbers.UNARY[opcode]
    function = _FLOAT_UNARY[opcode]
    if small_floats.is_small(element_type):
        if opcode is O.IS_FINITE:
            return lambda x: torch.isfinite(small_floats.decode(x, element_type))
        return lambda x: small_floats.encode(_on_wider(function, _decoded(x, element_type)), element_type)
    return function if _computes_once(opcode, element_type) else lambda x: _on_wider(function, x)


def binary_function(opcode: Opcode, element_type: ElementType) -> Binary:
    """As unary_function, for two operands that broadcast."""
    if element_type is E.PRED:
        return _PRED_BINARY[opcode]
    if element_type.is_integer:
        return _INTEGER_BINARY[opcode](element_type)
    if element_type.is_complex:
        return complex_numbers.BINARY[opcode]
    function = _FLOAT_BINARY[opcode]
    if small_floats.is_small(element_type):
        return lambda a, b: small_floats.encode(
            _on_wider(function, _decoded(a, element_type), _decoded(b, element_type)), element_type
        )
    return function if _computes_once(opcode, element_type) else lambda a, b: _on_wider(function, a, b)


def _computes_once(opcode: Opcode, element_type: ElementType) -> bool:
    return element_type.bits >= 32 or opcode in _HALF_NATIVE


def _on_wider(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """The function of half-width floats in float32, rounded once; float32 as it is."""
    return function(*(x.float() for x in operands)).to(operands[0].dtype)


def _decoded(codes: torch.Tensor, element_type: ElementType) -> torch.Tensor:
    # XLA computes on these types in float16, whose rounding comes before their own; E8M0 has float32's range.
    dtype = torch.float32 if element_type is E.F8E8M0FNU else torch.float16
    return small_floats.decode(codes, element_type, dtype)


# ---- Kernels


@kernel(*_FLOAT_UNARY, O.CLZ, O.NOT, O.POPCNT, storage=Storage.FRESH, elementwise=True)
def _prepare_unary(instruction: Instruction) -> Kernel:
    element_type = element_type_of(instruction.operands[0])
    try:
        function = unary_function(instruction.opcode, element_type)
    except KeyError:
        raise UnsupportedElementType.at(instruction, element_type=element_type.name) from None
    return lambda run, x: function(x)


@kernel(*_FLOAT_BINARY, *_INTEGER_BINARY.keys() - _FLOAT_BINARY.keys(), storage=Storage.FRESH, elementwise=True)
def _prepare_binary(instruction: Instruction) -> Kernel:
    element_type = element_type_of(instruction)
    constant = splat_constant(instruction.operands[1])
    if constant is not None:
        simpler = _with_constant(instruction.opcode, element_type, constant)
        if simpler is not None:
            return lambda run, x, _: simpler(x)
    try:
        function = binary_function(instruction.opcode, element_type)
    except KeyError:
        raise UnsupportedElementType.at(instruction, element_type=element_type.name) from None
    return lambda run, a, b: function(a, b)


def _with_constant(opcode: Opcode, element_type: ElementType, constant: int | float | complex) -> Unary | None:
    """A cheaper function for a second operand known when the program is compiled; results are the same."""
    if element_type.is_integer and isinstance(constant, int):
        if opcode in _SHIFTS:
            return integers.shift_by(opcode, element_type, constant)
        if opcode is O.DIVIDE:
            return integers.divide_by(element_type, constant)
        if opcode is O.REMAINDER:
            return integers.remainder_by(element_type, constant)
    if opcode is O.POWER and element_type in (E.F32, E.F64) and constant == 2:
        return torch.square
    return None


@kernel(O.COMPLEX, storage=Storage.FRESH, elementwise=True)
def _prepare_complex(instruction: Instruction) -> Kernel:
    return lambda run, real, imaginary: torch.complex(real, imaginary)


_COMPARISONS: dict[Comparison, Binary] = {
    Comparison.EQ: torch.eq,
    Comparison.NE: torch.ne,
    Comparison.GE: torch.ge,
    Comparison.GT: torch.gt,
    Comparison.LE: torch.le,
    Comparison.LT: torch.lt,
}


@kernel(O.COMPARE, storage=Storage.FRESH, elementwise=True)
def _prepare_compare(instruction: Instruction) -> Kernel:
    attributes = instruction.attributes_as(CompareAttributes)
    element_type = element_type_of(instruction.operands[0])
    function = _COMPARISONS[attributes.direction]
    if element_type.is_float and attributes.order is ComparisonOrder.TOTAL:
        return lambda run, a, b: function(total_order(a, element_type), total_order(b, element_type))
    if small_floats.is_small(element_type):
        return lambda run, a, b: function(small_floats.decode(a, element_type), small_floats.decode(b, element_type))
    sign_insensitive = attributes.direction in (Comparison.EQ, Comparison.NE)
    if element_type.is_complex and not sign_insensitive:
        raise UnsupportedElementType.at(instruction, element_type=element_type.name)
    if element_type in (E.U16, E.U32, E.U64) and not sign_insensitive:
        return lambda run, a, b: function(integers.ordered(a, element_type), integers.ordered(b, element_type))
    return lambda run, a, b: function(a, b)


@kernel(O.SELECT, storage=Storage.FRESH, elementwise=True)
def _prepare_select(instruction: Instruction) -> Kernel:
    return lambda run, chosen, on_true, on_false: torch.where(chosen, on_true, on_false)


@kernel(O.CLAMP, storage=Storage.FRESH, elementwise=True)
def _prepare_clamp(instruction: Instruction) -> Kernel:
    """min(max(x, low), high); a NaN among three real numbers wins."""
    element_type = element_type_of(instruction)
    if element_type.is_float and not small_floats.is_small(element_type):
        return lambda run, low, x, high: torch.clamp(x, low, high)
    if element_type.is_complex:
        return lambda run, low, x, high: complex_numbers.clamp(low, x, high)
    try:
        maximum, minimum = (binary_function(o, element_type) for o in (O.MAXIMUM, O.MINIMUM))
    except KeyError:
        raise UnsupportedElementType.at(instruction, element_type=element_type.name) from None
    return lambda run, low, x, high: minimum(maximum(x, low), high)
