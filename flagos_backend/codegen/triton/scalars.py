"""Scalar operations as Triton expressions: literals, and a text for each opcode. Used by writer.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from flagos_backend.codegen.triton.elements import HALF, HELD, Dialect, from_memory, rounded, to_memory
from flagos_backend.ir.functions import ALL
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.literals import identity_of, number_of
from flagos_backend.loop_ir.region import Apply, Expression, Literal, Reduce

E = ElementType
O = Opcode  # noqa: E741

Text = Callable[..., str]


def literal(expression: Literal, shape: str) -> str:
    """A block of ``shape`` of the held type."""
    element_type, data = expression.element_type, expression.data
    if element_type not in HELD:
        moved = _moved(element_type)
        return f"tl.full({shape}, {int.from_bytes(data, 'little', signed='uint' not in moved)}, {moved})"
    return f"tl.full({shape}, {_number(number_of(expression))}, {HELD[element_type]})"


def _moved(element_type: ElementType) -> str:
    """The storage type of a type that regions only move (kernels/reference/storage.py; complex lies as int64)."""
    if element_type.is_integer and element_type.is_signed:
        return "tl.int8"
    return {1: "tl.uint8", 8: "tl.int64"}[element_type.bytes]


def _number(value: int | float | bool) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


# ---- Operations. Each text takes those of its operands.


def _infix(operator: str) -> Text:
    return lambda a, b: f"{a} {operator} {b}"


def _call(function: str) -> Text:
    return lambda *operands: f"{function}({', '.join(operands)})"


def _function(text: str) -> Text:
    """Of a function's row: a name, or a text with {x}."""
    return (lambda x: text.format(x=x)) if "{x}" in text else _call(text)


_FLOAT: dict[Opcode, Text] = {
    O.ABS: _call("tl.abs"),
    O.ADD: _infix("+"),
    O.CLAMP: _call("fm.clamp"),
    O.DIVIDE: _call("fm.divide"),
    O.MAXIMUM: _call("fm.maximum"),
    O.MINIMUM: _call("fm.minimum"),
    O.MULTIPLY: _infix("*"),
    O.NEGATE: _call("fm.negate"),
    O.SELECT: _call("tl.where"),
    O.SIGN: _call("fm.sign"),
    O.SUBTRACT: _infix("-"),
}
_LIBDEVICE = _FLOAT | {
    **{function.opcode: _function(function.on_accelerator) for function in ALL},
}
_PLAIN = _FLOAT | {
    O.CLAMP: _call("fm.clamp_by_comparison"),
    O.MAXIMUM: _call("fm.maximum_by_comparison"),
    O.MINIMUM: _call("fm.minimum_by_comparison"),
    **{function.opcode: _function(function.in_plain_triton) for function in ALL},
}
_DIVISIONS: dict[str, Callable[..., str]] = {
    Intrinsic.SCALE: _call("fm.divisor_scale"),
    Intrinsic.CORRECTED: _call("fm.divide_corrected"),
    Intrinsic.BY_SUM: _call("fm.divide_by_sum"),
    Intrinsic.STRAIGHT: _call("nv.divide_straight"),
}
_BELOW: dict[str, Callable[..., str]] = {Intrinsic.BELOW: _call("nv.exp_below"), Intrinsic.TERM: _call("nv.exp_term")}
_NEAR = {O.LOG: _call("nv.log2_of_rest"), O.SQRT: _call("nv.sqrt_near")}
_ALONE = {O.ADD: _call("nv.add_alone"), O.SUBTRACT: _call("nv.subtract_alone")}
_LOG2 = {Dialect.LIBDEVICE: _call("libdevice.log2"), Dialect.PLAIN: _call("tl.log2")}
_LOG = {Dialect.LIBDEVICE: "libdevice.log", Dialect.PLAIN: "tl.log"}
_FLOATS: Mapping[Dialect, dict[Opcode, Text]] = {Dialect.LIBDEVICE: _LIBDEVICE, Dialect.PLAIN: _PLAIN}

_PRED: dict[Opcode, Text] = {
    O.ADD: _infix("|"),
    O.AND: _infix("&"),
    O.MAXIMUM: _infix("|"),
    O.MINIMUM: _infix("&"),
    O.MULTIPLY: _infix("&"),
    O.NOT: lambda x: f"{x} == 0",
    O.OR: _infix("|"),
    O.SELECT: _call("tl.where"),
    O.XOR: _infix("^"),
}

# Of complex numbers, and between them and their parts.
_COMPLEX: dict[Opcode, Text] = {
    O.ABS: _call("cf.absolute"),
    O.ADD: _call("cf.add"),
    O.COMPLEX: _call("cf.complex_of"),
    O.CONVERT: _call("cf.from_real"),
    O.DIVIDE: _call("cf.quotient"),
    O.IMAG: _call("cf.imaginary"),
    O.MULTIPLY: _call("cf.multiply"),
    O.NEGATE: _call("cf.negative"),
    O.REAL: _call("cf.real"),
    O.SELECT: _call("tl.where"),
    O.SUBTRACT: _call("cf.subtract"),
}
_COMPARE_COMPLEX = {Comparison.EQ: "cf.equal", Comparison.NE: "cf.different"}

_COMPARE = {
    Comparison.EQ: "==",
    Comparison.NE: "!=",
    Comparison.GE: ">=",
    Comparison.GT: ">",
    Comparison.LE: "<=",
    Comparison.LT: "<",
}


def _integer(opcode: Opcode, element_type: ElementType) -> Text:
    """KeyError for an opcode that integers do not have."""
    bits, signed, held = element_type.bits, element_type.is_signed, HELD[element_type]
    least = -(1 << (bits - 1)) if signed else 0
    ones = -1 if signed else (1 << bits) - 1
    other, unsigned = f"tl.int{bits}", f"tl.uint{bits}"

    def as_type(text: str, name: str) -> str:
        return text if name == held else f"{text}.to({name}, bitcast=True)"

    def shift_right(kind: str, arithmetic: bool) -> Text:
        return lambda a, b: as_type(
            f"fm.shift_right({as_type(a, kind)}, {as_type(b, unsigned)}, {bits}, {arithmetic})"
            + ("" if kind == held else f".to({held}, bitcast=True)"),
            held,
        )

    wide = max(bits, 32)

    def counted(x: str) -> str:
        x = as_type(x, unsigned)
        return x if bits >= 32 else f"{x}.to(tl.uint32)"

    table: dict[Opcode, Text] = {
        O.ABS: (lambda x: f"tl.where({x} < 0, 0 - {x}, {x})") if signed else (lambda x: x),
        O.ADD: _infix("+"),
        O.AND: _infix("&"),
        O.CLAMP: lambda low, x, high: f"tl.minimum(tl.maximum({x}, {low}), {high})",
        O.CLZ: lambda x: f"({wide} - fm.count_ones_{wide}(fm.smear_{wide}({counted(x)})) - {wide - bits}).to({held})",
        O.DIVIDE: lambda a, b: f"fm.divide_integer({a}, {b}, {ones}, {least})",
        O.MAXIMUM: _call("tl.maximum"),
        O.MINIMUM: _call("tl.minimum"),
        O.MULTIPLY: _infix("*"),
        O.NEGATE: lambda x: f"0 - {x}",
        O.NOT: lambda x: f"~{x}",
        O.OR: _infix("|"),
        O.POPCNT: lambda x: f"fm.count_ones_{wide}({counted(x)}).to({held})",
        O.POWER: lambda a, b: f"fm.power_integer({a}, {b}, {bits - signed}, {signed})",
        O.REMAINDER: lambda a, b: f"fm.remainder_integer({a}, {b}, {least})",
        O.SELECT: _call("tl.where"),
        O.SHIFT_LEFT: lambda a, b: f"fm.shift_left({a}, {as_type(b, unsigned)}, {bits})",
        O.SHIFT_RIGHT_ARITHMETIC: shift_right(other, True),
        O.SHIFT_RIGHT_LOGICAL: shift_right(unsigned, False),
        O.SIGN: (lambda x: f"({x} > 0).to({held}) - ({x} < 0).to({held})")
        if signed
        else (lambda x: f"({x} != 0).to({held})"),
        O.SUBTRACT: _infix("-"),
        O.XOR: _infix("^"),
    }
    return table[opcode]


def apply(expression: Apply, operands: list[str], dialect: Dialect) -> str:
    """What ``expression`` computes, from the names of its operands, before it is rounded to 16 bits; conversions round.
    KeyError for what ir/elementwise.py forbids."""
    opcode, element_type = expression.opcode, expression.element_type
    source = expression.operands[-1].element_type
    if E.C64 in (source, element_type):
        return _of_complex(expression, operands)
    if opcode is O.CONVERT:
        return convert(operands[0], source, element_type, dialect)
    if opcode is O.BITCAST_CONVERT:
        return _bitcast(operands[0], source, element_type, dialect)
    if opcode is O.COMPARE:
        return _compare(expression, operands, source)
    if opcode is O.IS_FINITE:
        return f"fm.is_finite({operands[0]})"
    if element_type is E.PRED:
        return _PRED[opcode](*operands)
    if expression.detail == Intrinsic.ALONE:
        return _ALONE[opcode](*operands)
    if not element_type.is_float:
        return _integer(opcode, element_type)(*operands) if element_type in HELD else _PRED[opcode](*operands)
    if element_type not in HELD:
        return _PRED[opcode](*operands)
    if opcode is O.DIVIDE and expression.detail:
        return _DIVISIONS[expression.detail](*operands)
    if opcode is O.EXP and expression.detail:
        return _BELOW[expression.detail](*operands)
    if expression.detail == Intrinsic.NEAR:
        return _NEAR[opcode](*operands)
    if opcode is O.LOG and expression.detail == Intrinsic.BASE_TWO:
        if element_type is E.F64:
            return f"fm.log2_of_centered({operands[0]}, {_LOG[dialect]}(fm.centered({operands[0]})))"
        return _LOG2[dialect](*operands)
    return _FLOATS[dialect][opcode](*operands)


def _of_complex(expression: Apply, operands: list[str]) -> str:
    if expression.opcode is O.COMPARE:
        return f"{_COMPARE_COMPLEX[Comparison(expression.detail)]}({', '.join(operands)})"
    return _COMPLEX[expression.opcode](*operands)


def fused_term(expression: Apply, dialect: Dialect) -> tuple[Expression, Expression, Expression] | None:
    """x, y and c where ``expression`` is x * y + c in float32, to be rounded once: where x * y is exact, which changes
    nothing, and as in Horner's scheme, c being a constant, or one of two.

    Horner's step so is nearer to the truth and twice as fast. Other sums of products are not: what corrects a product
    for its rounding subtracts it from something that varies.
    """
    if expression.opcode is not O.ADD or expression.element_type is not E.F32:
        return None
    for product, other in (expression.operands, expression.operands[::-1]):
        factors = exact_product(product, dialect)
        if factors is None and _is_coefficient(other):
            factors = _product(product, dialect)
        if factors is not None:
            return *factors, other
    return None


def exact_product(expression: Expression, dialect: Dialect) -> tuple[Expression, Expression] | None:
    """The factors of a product in float32 whose first one is known to be 0 or 1."""
    factors = _product(expression, dialect)
    for first, other in (factors, factors[::-1]) if factors else ():
        if isinstance(first, Apply) and first.opcode is O.CONVERT and first.operands[0].element_type is E.PRED:
            return first, other
    return None


def _product(expression: Expression, dialect: Dialect) -> tuple[Expression, Expression] | None:
    """The factors of what is a product in float32, where there is a sum of one that is rounded once."""
    if dialect is not Dialect.LIBDEVICE or expression.element_type is not E.F32:
        return None
    if not isinstance(expression, Apply) or expression.opcode is not O.MULTIPLY:
        return None
    x, y = expression.operands
    return x, y


def _is_coefficient(expression: Expression) -> bool:
    if isinstance(expression, Apply) and expression.opcode is O.SELECT:
        return all(isinstance(choice, Literal) for choice in expression.operands[1:])
    return isinstance(expression, Literal)


def _compare(expression: Apply, operands: list[str], source: ElementType) -> str:
    a, b = operands
    if source is E.PRED:
        # One bit has no sign, but Triton orders it as if it had.
        a, b = f"{a}.to(tl.int32)", f"{b}.to(tl.int32)"
    elif expression.order is ComparisonOrder.TOTAL:
        a, b = f"fm.total_order({a})", f"fm.total_order({b})"
    return f"{a} {_COMPARE[Comparison(expression.detail)]} {b}"


def convert(text: str, source: ElementType, target: ElementType, dialect: Dialect) -> str:
    """Integers wrap around, floats round to nearest even and saturate as integers, anything but zero is true."""
    if source is target:
        return text
    if target is E.PRED:
        return f"{text} != 0"
    if source.is_float and target.is_integer:
        low = -(1 << (target.bits - 1)) if target.is_signed else 0
        past = low + (1 << target.bits)
        return f"fm.to_integer({text}, {HELD[target]}, {low}, {past - 1}, {past}.0)"
    if source is E.F64 and target is E.F16:
        return f"fm.as_f16({text})"  # Rounded once; to bfloat16 XLA goes by way of float32.
    if source is E.PRED and target.is_float:
        return f"fm.truth({text}, {HELD[target]})"
    if HELD[source] != HELD[target]:
        text = f"{text}.to({HELD[target]})"
    return rounded(text, target, dialect)


def _bitcast(text: str, source: ElementType, target: ElementType, dialect: Dialect) -> str:
    """Between types of one width, by way of what lies in memory."""
    if source is target:
        return text
    stored = {E.F16: "tl.float16", E.BF16: "tl.bfloat16"}.get(target, HELD[target])
    bits = to_memory(text, source, dialect) if source in HALF else text
    cast = f"{bits}.to({stored}, bitcast=True)"
    return from_memory(cast, target, dialect) if target in HALF else cast


# ---- Reductions


def identity(reduction: Reduce) -> str:
    """What changes nothing in the reduction, as it accumulates."""
    return _number(identity_of(reduction.combine, reduction.element_type))


def accumulated(element_type: ElementType) -> str:
    """The type that a reduction accumulates in: truth values as integers."""
    return "tl.int32" if element_type is E.PRED else HELD[element_type]


_PRED_COMBINE = {O.ADD: O.MAXIMUM, O.OR: O.MAXIMUM, O.MULTIPLY: O.MINIMUM, O.AND: O.MINIMUM}


def combine(reduction: Reduce, a: str, b: str, dialect: Dialect) -> str:
    """Two accumulated values in one."""
    opcode = (
        _PRED_COMBINE.get(reduction.combine, reduction.combine)
        if reduction.element_type is E.PRED
        else reduction.combine
    )
    if reduction.element_type.is_float:
        return _FLOATS[dialect][opcode](a, b)
    return _integer(opcode, E.S32 if reduction.element_type is E.PRED else reduction.element_type)(a, b)


_REDUCE = {
    O.AND: "bitwise_and",
    O.MULTIPLY: "multiply",
    O.OR: "bitwise_or",
    O.XOR: "bitwise_xor",
    O.MAXIMUM: "maximum",
    O.MINIMUM: "minimum",
}


def reduce(reduction: Reduce, text: str, axis: int, dialect: Dialect) -> str:
    """A block of accumulated values reduced along ``axis``, which stays with size 1."""
    element_type = reduction.element_type
    opcode = _PRED_COMBINE.get(reduction.combine, reduction.combine) if element_type is E.PRED else reduction.combine
    if opcode is O.ADD:
        call = f"tl.sum({text}, {axis}, keep_dims=True)"
    elif opcode in (O.MAXIMUM, O.MINIMUM) and not element_type.is_float:
        call = f"tl.{'max' if opcode is O.MAXIMUM else 'min'}({text}, {axis}, keep_dims=True)"
    elif opcode in (O.MAXIMUM, O.MINIMUM) and dialect is Dialect.PLAIN:
        return f"fm.{'largest' if opcode is O.MAXIMUM else 'smallest'}({text}, {axis})"
    else:
        return f"tl.reduce({text}, {axis}, fm.{_REDUCE[opcode]}, keep_dims=True)"
    # Narrow integers come back wider.
    return f"{call}.to({accumulated(element_type)})" if element_type.is_integer and element_type.bits < 32 else call
