"""Productions of elementwise instructions: arithmetic, comparisons, type changes, and chains of them that fuse."""

from __future__ import annotations

from flagos_backend.ir.attributes import CompareAttributes, ReducePrecisionAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from tools.fuzz.scope import (
    ARITHMETIC,
    COMPLEX,
    FLOATS,
    INTEGERS,
    SMALL_FLOATS,
    SMALL_INTEGERS,
    Scope,
    canonical,
    dims_of,
    shape_of,
    type_of,
)

E = ElementType
_INEXACT = (*FLOATS, *COMPLEX)
_NUMBERS = (*FLOATS, *INTEGERS, *COMPLEX)

_UNARY: dict[Opcode, tuple[E, ...]] = {
    Opcode.NEGATE: _NUMBERS,
    # StableHLO, through which programs come to the oracle, has neither for unsigned integers.
    **dict.fromkeys((Opcode.ABS, Opcode.SIGN), tuple(t for t in _NUMBERS if not t.is_unsigned)),
    **dict.fromkeys(
        (
            *(Opcode.TANH, Opcode.EXP, Opcode.LOGISTIC, Opcode.SIN, Opcode.COS, Opcode.SQRT, Opcode.RSQRT, Opcode.LOG),
            *(Opcode.LOG1P, Opcode.EXPM1, Opcode.CBRT, Opcode.TAN),
        ),
        _INEXACT,
    ),
    **dict.fromkeys((Opcode.FLOOR, Opcode.CEIL, Opcode.ROUND_AFZ, Opcode.ROUND_EVEN, Opcode.ERF), FLOATS),
    Opcode.IS_FINITE: FLOATS,
    Opcode.NOT: (*INTEGERS, E.PRED),
    Opcode.POPCNT: INTEGERS,
    # XLA folds the leading zeros of negative constants as if they were 64 bits wide.
    Opcode.CLZ: tuple(t for t in INTEGERS if t.is_unsigned),
    **dict.fromkeys((Opcode.REAL, Opcode.IMAG), COMPLEX),
    Opcode.COPY: ARITHMETIC,
    Opcode.OPTIMIZATION_BARRIER: ARITHMETIC,
}
# Complex functions whose branch cuts and overflow differ between correct implementations are left to the accuracy tool.
_NO_COMPLEX = frozenset({Opcode.CBRT, Opcode.TAN, Opcode.LOG1P, Opcode.EXPM1, Opcode.LOGISTIC})
_BINARY: dict[Opcode, tuple[E, ...]] = {
    **dict.fromkeys((Opcode.ADD, Opcode.MULTIPLY, Opcode.SUBTRACT), _NUMBERS),
    **dict.fromkeys((Opcode.MAXIMUM, Opcode.MINIMUM), (*FLOATS, *INTEGERS, E.PRED)),
    Opcode.DIVIDE: _NUMBERS,
    **dict.fromkeys((Opcode.AND, Opcode.OR, Opcode.XOR), (*INTEGERS, E.PRED)),
    **dict.fromkeys((Opcode.SHIFT_LEFT, Opcode.SHIFT_RIGHT_ARITHMETIC, Opcode.SHIFT_RIGHT_LOGICAL), INTEGERS),
    **dict.fromkeys((Opcode.REMAINDER,), (*FLOATS, *INTEGERS)),
    **dict.fromkeys((Opcode.POWER, Opcode.ATAN2), FLOATS),
}


def unary(scope: Scope) -> Instruction:
    opcode = scope.tape.pick(tuple(_UNARY))
    types = tuple(t for t in _UNARY[opcode] if not (t.is_complex and opcode in _NO_COMPLEX))
    value = scope.operand(types)
    if opcode is Opcode.ABS and type_of(value).is_integer:
        # The least integer's is itself; fused with a conversion to a wider type XLA makes the positive number of it.
        value = scope.builder.add(Opcode.MAXIMUM, [value, _splat(scope, _least(type_of(value)) + 1, shape_of(value))])
    return scope.add(opcode, [value])


def binary(scope: Scope) -> Instruction:
    opcode = scope.tape.pick(tuple(_BINARY))
    lhs = scope.operand(_BINARY[opcode])
    rhs = scope.like(shape_of(lhs))
    if opcode is Opcode.ATAN2:  # the sign of a zero, which a maximum of zeros leaves open, says which side of its cut
        lhs, rhs = canonical(scope, lhs), canonical(scope, rhs)
    return scope.add(opcode, [rhs, lhs] if scope.tape.below(2) else [lhs, rhs])


def integer_power(scope: Scope) -> Instruction:
    """The exponent is not negative: what a negative one gives differs between compilers. And no compiler sees the power
    behind a barrier: XLA turns a division by it into a multiplication by a negative one, of integers too."""
    base = scope.operand(INTEGERS)
    exponent = scope.builder.add(Opcode.AND, [scope.like(shape_of(base)), _splat(scope, 7, shape_of(base))])
    return scope.add(Opcode.OPTIMIZATION_BARRIER, [scope.builder.add(Opcode.POWER, [base, exponent])])


def compare(scope: Scope) -> Instruction:
    lhs = scope.operand(ARITHMETIC)
    complex_type = type_of(lhs).is_complex
    direction = scope.tape.pick((Comparison.EQ, Comparison.NE) if complex_type else tuple(Comparison))
    operands = [lhs, scope.like(shape_of(lhs))]
    if type_of(lhs) not in FLOATS or not scope.tape.chance(4):
        return scope.add(Opcode.COMPARE, operands, CompareAttributes(direction))
    operands = [canonical(scope, operand) for operand in operands]
    return scope.add(Opcode.COMPARE, operands, CompareAttributes(direction, ComparisonOrder.TOTAL))


def select(scope: Scope) -> Instruction:
    on_true = scope.operand(ARITHMETIC)
    shape = shape_of(on_true)
    predicate = scope.like(ArrayShape(E.PRED, () if scope.tape.chance(4) else shape.dims))
    return scope.add(Opcode.SELECT, [predicate, on_true, scope.like(shape)])


def clamp(scope: Scope) -> Instruction:
    """XLA takes the bounds to be in order: it leaves out the clamp of a lower bound, say."""
    value = scope.operand((*FLOATS, *INTEGERS))
    shape = shape_of(value)
    bound = ArrayShape(shape.element_type, shape.dims if scope.tape.below(2) else ())
    bounds = [scope.like(bound) for _ in range(2)]
    low, high = (scope.builder.add(opcode, bounds) for opcode in (Opcode.MINIMUM, Opcode.MAXIMUM))
    return scope.add(Opcode.CLAMP, [low, value, high])


def convert(scope: Scope) -> Instruction:
    everything = (*ARITHMETIC, *SMALL_INTEGERS, *SMALL_FLOATS)
    value = scope.operand(everything)
    targets = COMPLEX if type_of(value).is_complex else everything
    return scope.add(Opcode.CONVERT, [value], shape=ArrayShape(scope.tape.nearly_first(targets), dims_of(value)))


def bitcast(scope: Scope) -> Instruction:
    """Among integers: the bits of a float would show roundings and kinds of NaN that compilers are free in."""
    value = scope.operand(INTEGERS)
    kind = scope.tape.pick(INTEGERS)
    old, new = type_of(value).bits, kind.bits
    dims = dims_of(value)
    if old > new:
        dims = (*dims, old // new)
    elif old < new:
        if not dims or dims[-1] != new // old:
            return scope.add(Opcode.NEGATE, [value])
        dims = dims[:-1]
    return scope.add(Opcode.BITCAST_CONVERT, [value], shape=ArrayShape(kind, dims))


def make_complex(scope: Scope) -> Instruction:
    real = scope.operand((E.F32, E.F64))
    return scope.add(Opcode.COMPLEX, [real, scope.like(shape_of(real))])


def reduce_precision(scope: Scope) -> Instruction:
    value = scope.operand((E.F32, E.F64))
    attributes = ReducePrecisionAttributes(scope.tape.pick((8, 5, 4)), scope.tape.pick((7, 10, 3)))
    return scope.add(Opcode.REDUCE_PRECISION, [value], attributes)


def chain(scope: Scope) -> Instruction:
    """Several operations one after the other on values of one shape, as an activation or an optimizer has them."""
    value = scope.operand(FLOATS)
    opcodes = (Opcode.MULTIPLY, Opcode.ADD, Opcode.SUBTRACT, Opcode.MAXIMUM, Opcode.TANH, Opcode.EXP, Opcode.LOGISTIC)
    for _ in range(scope.tape.below(6) + 1):
        opcode = scope.tape.pick((*opcodes, Opcode.NEGATE, Opcode.ABS))
        operands = [value, scope.like(shape_of(value))] if opcode in _BINARY else [value]
        value = scope.builder.add(opcode, operands)
    return scope.keep(value)


def _least(signed: E) -> int:
    return -(1 << (signed.bits - 1))


def _splat(scope: Scope, value: int, shape: ArrayShape) -> Instruction:
    return scope.builder.broadcast(scope.scalar(value, shape.element_type), shape.dims)


PRODUCTIONS = (
    (10, binary),
    (8, unary),
    (4, select),
    (4, compare),
    (4, convert),
    (5, chain),
    (2, clamp),
    (2, bitcast),
    (1, make_complex),
    (1, reduce_precision),
    (1, integer_power),
)
