"""Shape rules: elementwise operations and type changes."""

from __future__ import annotations

from collections.abc import Callable

from flagos_backend.ir.attributes import ReducePrecisionAttributes
from flagos_backend.ir.functions import ALL, Function
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.rules.common import Operation, Rule, broken, expect_same_dims
from flagos_backend.ir.types import ArrayShape, ElementType, Shape

Types = frozenset[ElementType]

_ALL: Types = frozenset(ElementType) - {ElementType.TOKEN}
_PRED: Types = frozenset({ElementType.PRED})
_INTEGER: Types = frozenset(t for t in ElementType if t.is_integer)
_FLOAT: Types = frozenset(t for t in ElementType if t.is_float)
_COMPLEX: Types = frozenset(t for t in ElementType if t.is_complex)
_INEXACT = _FLOAT | _COMPLEX
_NUMBER = _INTEGER | _INEXACT


def _of_function(function: Function) -> Types:
    return (_INEXACT if function.of_complex else _FLOAT) | (_INTEGER if function.of_integers else frozenset())


_FUNCTIONS = tuple({f.opcode: _of_function(f) for f in ALL if f.operands == count} for count in (1, 2))
_UNARY: dict[Opcode, Types] = {
    **_FUNCTIONS[0],
    **dict.fromkeys((Opcode.CLZ, Opcode.POPCNT), _INTEGER),
    Opcode.NEGATE: _NUMBER,
    Opcode.NOT: _INTEGER | _PRED,
    Opcode.SIGN: _NUMBER,
}
_BINARY: dict[Opcode, Types] = {
    **dict.fromkeys((Opcode.ADD, Opcode.MULTIPLY, Opcode.SUBTRACT), _ALL),
    **dict.fromkeys((Opcode.MAXIMUM, Opcode.MINIMUM), _ALL - _COMPLEX),
    **dict.fromkeys((Opcode.AND, Opcode.OR, Opcode.XOR), _INTEGER | _PRED),
    **dict.fromkeys((Opcode.SHIFT_LEFT, Opcode.SHIFT_RIGHT_ARITHMETIC, Opcode.SHIFT_RIGHT_LOGICAL), _INTEGER),
    **_FUNCTIONS[1],
    Opcode.DIVIDE: _NUMBER,
    Opcode.MULHI: _INTEGER,
}


def _expect_type(operation: Operation, shape: ArrayShape, types: Types) -> None:
    if shape.element_type not in types:
        broken(f"{operation.opcode} does not take {shape.element_type.name.lower()}")


def _unary(types: Types, result: Callable[[ElementType], ElementType] | None = None) -> Rule:
    def rule(operation: Operation) -> Shape:
        operation.expect_operands(1)
        shape = operation.array(0)
        _expect_type(operation, shape, types)
        return shape if result is None else ArrayShape(result(shape.element_type), shape.dims)

    return rule


def _binary(types: Types) -> Rule:
    def rule(operation: Operation) -> Shape:
        operation.expect_operands(2)
        lhs, rhs = operation.array(0), operation.array(1)
        if lhs != rhs:
            broken(f"{operation.opcode} takes operands of one shape, got {lhs} and {rhs}")
        _expect_type(operation, lhs, types)
        return lhs

    return rule


def _copy(operation: Operation) -> Shape:
    operation.expect_operands(1)
    return operation.operands[0]


def _compare(operation: Operation) -> Shape:
    operation.expect_operands(2)
    lhs, rhs = operation.array(0), operation.array(1)
    if lhs != rhs:
        broken(f"compare takes operands of one shape, got {lhs} and {rhs}")
    return ArrayShape(ElementType.PRED, lhs.dims)


def _complex(operation: Operation) -> Shape:
    operation.expect_operands(2)
    real, imaginary = operation.array(0), operation.array(1)
    made = {ElementType.F32: ElementType.C64, ElementType.F64: ElementType.C128}.get(real.element_type)
    if real != imaginary or made is None:
        broken(f"complex takes two f32 or f64 arrays of one shape, got {real} and {imaginary}")
    return ArrayShape(made, real.dims)


def _clamp(operation: Operation) -> Shape:
    operation.expect_operands(3)
    low, value, high = operation.arrays()
    for bound in (low, high):
        if bound.element_type is not value.element_type or bound.dims not in ((), value.dims):
            broken(f"a bound of clamp must be a scalar or an array like {value}, not {bound}")
    return value


def _select(operation: Operation) -> Shape:
    operation.expect_operands(3)
    predicate, on_true, on_false = operation.arrays()
    if on_true != on_false:
        broken(f"select chooses between arrays of one shape, got {on_true} and {on_false}")
    if predicate.element_type is not ElementType.PRED or predicate.dims not in ((), on_true.dims):
        broken(f"the predicate of select must be a pred scalar or pred{list(on_true.dims)}, not {predicate}")
    return on_true


def _convert(operation: Operation) -> Shape:
    operation.expect_operands(1)
    source, target = operation.array(0), operation.declared_array().element_type
    if source.element_type.is_complex and not target.is_complex:
        broken("convert does not drop an imaginary part: take real first")
    return ArrayShape(target, source.dims)


def _stochastic_convert(operation: Operation) -> Shape:
    operation.expect_operands(2)
    source, random = operation.arrays()
    _expect_type(operation, source, _FLOAT)
    if not random.element_type.is_unsigned or random.element_type.bits != source.element_type.bits:
        broken(f"the random operand must be unsigned and as wide as {source}, not {random}")
    expect_same_dims([source, random])
    return ArrayShape(operation.declared_array().element_type, source.dims)


def _bitcast_convert(operation: Operation) -> Shape:
    """Wider to narrower adds a last dimension, narrower to wider removes it."""
    operation.expect_operands(1)
    source, target = operation.array(0), operation.declared_array().element_type
    old, new = source.element_type.bits, target.bits
    if source.element_type.is_complex != target.is_complex:
        broken("bitcast-convert does not go between real and complex types")
    if old == new:
        return ArrayShape(target, source.dims)
    if old > new:
        return ArrayShape(target, (*source.dims, old // new))
    if not source.dims or source.dims[-1] != new // old:
        broken(f"bitcast-convert of {source} to {target.name.lower()} needs a last dimension of {new // old}")
    return ArrayShape(target, source.dims[:-1])


def _reduce_precision(operation: Operation) -> Shape:
    operation.expect_operands(1)
    shape = operation.array(0)
    _expect_type(operation, shape, _FLOAT)
    attributes = operation.attributes_as(ReducePrecisionAttributes)
    if attributes.exponent_bits < 1 or attributes.mantissa_bits < 0:
        broken("reduce-precision keeps at least 1 exponent bit and 0 mantissa bits")
    return shape


RULES: dict[Opcode, Rule] = {
    **{opcode: _unary(types) for opcode, types in _UNARY.items()},
    **{opcode: _binary(types) for opcode, types in _BINARY.items()},
    Opcode.ABS: _unary(_NUMBER, lambda t: t.real),
    Opcode.REAL: _unary(_INEXACT, lambda t: t.real),
    Opcode.IMAG: _unary(_INEXACT, lambda t: t.real),
    Opcode.IS_FINITE: _unary(_FLOAT, lambda _: ElementType.PRED),
    Opcode.COPY: _copy,
    Opcode.COMPARE: _compare,
    Opcode.COMPLEX: _complex,
    Opcode.CLAMP: _clamp,
    Opcode.SELECT: _select,
    Opcode.CONVERT: _convert,
    Opcode.STOCHASTIC_CONVERT: _stochastic_convert,
    Opcode.BITCAST_CONVERT: _bitcast_convert,
    Opcode.REDUCE_PRECISION: _reduce_precision,
}
