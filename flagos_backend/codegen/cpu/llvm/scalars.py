"""One operation of a loop nest on scalars, as LLVM IR. Results are those of the tiles of native/cpu/kernels.inc: XLA's
semantics of integers, NaN, and conversions that saturate."""

from __future__ import annotations

from flagos_backend.codegen.cpu.llvm import functions
from flagos_backend.codegen.cpu.llvm.code import Function, NotCompilableError, value_type
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.literals import number_of
from flagos_backend.loop_ir.region import Apply, Literal

E = ElementType
Op = Opcode

_FLOATS = frozenset({E.F32, E.F64})
SIGNED = frozenset({E.S8, E.S16, E.S32, E.S64})
UNSIGNED = frozenset({E.U8, E.U16, E.U32, E.U64})
INTEGERS = SIGNED | UNSIGNED
# Each of their numbers is a float.
_EXACT_FLOATS = frozenset({E.F32, E.PRED, E.S8, E.U8, E.S16, E.U16})
_COMPUTED = _FLOATS | INTEGERS | {E.PRED}

_FLOAT_BINARY = {Op.ADD: "fadd", Op.SUBTRACT: "fsub", Op.MULTIPLY: "fmul", Op.DIVIDE: "fdiv", Op.REMAINDER: "frem"}
_INTEGER_BINARY = {
    Op.ADD: "add",
    Op.SUBTRACT: "sub",
    Op.MULTIPLY: "mul",
    Op.AND: "and",
    Op.OR: "or",
    Op.XOR: "xor",
}
_PRED_BINARY = {
    **dict.fromkeys((Op.ADD, Op.MAXIMUM, Op.OR), "or"),
    **dict.fromkeys((Op.MULTIPLY, Op.MINIMUM, Op.AND), "and"),
    **dict.fromkeys((Op.SUBTRACT, Op.XOR), "xor"),
}
_SHIFTS = {Op.SHIFT_LEFT: "shl", Op.SHIFT_RIGHT_LOGICAL: "lshr", Op.SHIFT_RIGHT_ARITHMETIC: "ashr"}
_ROUNDINGS = {
    Op.ABS: "fabs",
    Op.CEIL: "ceil",
    Op.FLOOR: "floor",
    Op.ROUND_EVEN: "rint",
    Op.ROUND_AFZ: "round",
    Op.SQRT: "sqrt",
}
_ORDERED = {
    Comparison.EQ: "oeq",
    Comparison.NE: "une",
    Comparison.GE: "oge",
    Comparison.GT: "ogt",
    Comparison.LE: "ole",
    Comparison.LT: "olt",
}


def literal(expression: Literal) -> str:
    """A constant, as LLVM writes one of its type."""
    element_type = expression.element_type
    if element_type is E.PRED:
        return "true" if expression.data != b"\0" else "false"
    if element_type in _FLOATS:
        return functions.float_constant(float(number_of(expression)))
    return str(int.from_bytes(expression.data, "little"))


def apply(code: Function, expression: Apply, operands: list[str]) -> str:
    """The value of ``expression``. Raises NotCompilableError."""
    types = [operand.element_type for operand in expression.operands]
    opcode = expression.opcode
    if opcode is Op.SELECT:
        held = value_type(expression.element_type)
        return code.value(f"select i1 {operands[0]}, {held} {operands[1]}, {held} {operands[2]}")
    if opcode is Op.BITCAST_CONVERT:
        return _bitcast(code, types[0], expression.element_type, operands[0])
    if opcode is Op.CONVERT:
        return convert(code, types[0], expression.element_type, operands[0])
    if E.BF16 in (*types, expression.element_type):
        return _of_bfloats(code, expression, types, operands)
    if not _COMPUTED.issuperset((*types, expression.element_type)):
        raise NotCompilableError(f"{opcode} of {types[0].name}")
    if opcode is Op.COMPARE:
        return _compare(code, expression, types[0], operands)
    if expression.detail:
        raise NotCompilableError(f"{opcode} in the form {expression.detail!r}")
    if opcode is Op.IS_FINITE:
        size = code.call(value_type(types[0]), f"llvm.fabs.f{8 * types[0].bytes}", (value_type(types[0]), operands[0]))
        return code.value(f"fcmp one {value_type(types[0])} {size}, 0x7FF0000000000000")
    return operation(code, opcode, types[-1], operands)


def operation(code: Function, opcode: Opcode, element_type: ElementType, operands: list[str]) -> str:
    """``opcode`` of operands of one type, which is its result's too. Raises NotCompilableError."""
    if element_type not in _COMPUTED:
        raise NotCompilableError(f"{opcode} of {element_type.name}")
    if element_type in _FLOATS:
        return _of_floats(code, opcode, element_type, operands)
    if element_type is E.PRED:
        return _of_predicates(code, opcode, operands)
    return _of_integers(code, opcode, element_type, operands)


def combine(code: Function, opcode: Opcode, element_type: ElementType, operands: list[str]) -> str:
    """One step of a reduction, whose terms come in any order."""
    if element_type in _FLOATS and opcode in (Op.ADD, Op.MULTIPLY):
        return code.value(f"{_FLOAT_BINARY[opcode]} reassoc {value_type(element_type)} {operands[0]}, {operands[1]}")
    if element_type in _FLOATS:
        if opcode not in (Op.MAXIMUM, Op.MINIMUM):
            raise NotCompilableError(f"a reduction of {element_type.name} by {opcode}")
        held = value_type(element_type)
        return code.call(held, f"llvm.{opcode}.f{8 * element_type.bytes}", *((held, o) for o in operands))
    return operation(code, opcode, element_type, operands)


# ---- 16-bit floats ----


def _of_bfloats(code: Function, expression: Apply, types: list[ElementType], operands: list[str]) -> str:
    """Computed in float32, and rounded once."""
    wide = tuple(Literal(E.F32 if t is E.BF16 else t, b"") for t in types)
    result_type = E.F32 if expression.element_type is E.BF16 else expression.element_type
    values = [_widened(code, v) if t is E.BF16 else v for v, t in zip(operands, types, strict=True)]
    computed = Apply(result_type, expression.opcode, wide, expression.detail, expression.order)
    value = apply(code, computed, values)
    return _narrowed(code, value) if expression.element_type is E.BF16 else value


def _widened(code: Function, x: str) -> str:
    """A BF16, which is held as an i16, as a float."""
    bits = code.value(f"shl i32 {code.value(f'zext i16 {x} to i32')}, 16")
    return code.value(f"bitcast i32 {bits} to float")


def _narrowed(code: Function, x: str) -> str:
    """Rounded to nearest even; a NaN is quiet."""
    bits = code.value(f"bitcast float {x} to i32")
    upper = code.value(f"lshr i32 {bits}, 16")
    odd = code.value(f"and i32 {upper}, 1")
    raised = code.value(f"add i32 {code.value(f'add i32 {bits}, 32767')}, {odd}")
    rounded = code.value(f"lshr i32 {raised}, 16")
    quiet = code.value(f"or i32 {upper}, 64")
    is_nan = code.value(f"fcmp uno float {x}, {x}")
    return code.value(f"trunc i32 {code.value(f'select i1 {is_nan}, i32 {quiet}, i32 {rounded}')} to i16")


# ---- floats ----


def _of_floats(code: Function, opcode: Opcode, element_type: ElementType, operands: list[str]) -> str:
    held, suffix = value_type(element_type), f"f{8 * element_type.bytes}"
    x = operands[0]
    if opcode in _FLOAT_BINARY:
        return code.value(f"{_FLOAT_BINARY[opcode]} {held} {x}, {operands[1]}")
    if opcode in _ROUNDINGS:
        return code.call(held, f"llvm.{_ROUNDINGS[opcode]}.{suffix}", (held, x))
    match opcode:
        case Op.NEGATE:
            return code.value(f"fneg {held} {x}")
        case Op.SIGN:
            one = code.call(held, f"llvm.copysign.{suffix}", (held, "1.0"), (held, x))
            none = code.value(f"fcmp ueq {held} {x}, 0.0")
            return code.value(f"select i1 {none}, {held} {x}, {held} {one}")
        case Op.MAXIMUM | Op.MINIMUM:
            return _min_max(code, held, "oge" if opcode is Op.MAXIMUM else "ole", x, operands[1])
        case Op.CLAMP:
            low, x, high = operands
            ordered = code.value(f"fcmp oge {held} {low}, {x}")
            above = code.value(f"select i1 {ordered}, {held} {low}, {held} {x}")
            unordered = code.value(f"fcmp uno {held} {low}, {low}")
            above = code.value(f"select i1 {unordered}, {held} {low}, {held} {above}")
            return _min_max(code, held, "ole", above, high)
    return functions.call(code, opcode, element_type, operands)


def _min_max(code: Function, held: str, order: str, x: str, y: str) -> str:
    first = code.value(f"fcmp {order} {held} {x}, {y}")
    is_nan = code.value(f"fcmp uno {held} {x}, {x}")
    takes = code.value(f"or i1 {first}, {is_nan}")
    return code.value(f"select i1 {takes}, {held} {x}, {held} {y}")


# ---- predicates and integers ----


def _of_predicates(code: Function, opcode: Opcode, operands: list[str]) -> str:
    if opcode is Op.NOT:
        return code.value(f"xor i1 {operands[0]}, true")
    if opcode not in _PRED_BINARY:
        raise NotCompilableError(f"{opcode} of PRED")
    return code.value(f"{_PRED_BINARY[opcode]} i1 {operands[0]}, {operands[1]}")


def _of_integers(code: Function, opcode: Opcode, element_type: ElementType, operands: list[str]) -> str:
    held, bits, signed = value_type(element_type), 8 * element_type.bytes, element_type in SIGNED
    x = operands[0]
    if opcode in _INTEGER_BINARY:
        return code.value(f"{_INTEGER_BINARY[opcode]} {held} {x}, {operands[1]}")
    if opcode in _SHIFTS:
        return _shift(code, opcode, held, bits, x, operands[1])
    sign = "s" if signed else "u"
    match opcode:
        case Op.NOT:
            return code.value(f"xor {held} {x}, -1")
        case Op.NEGATE:
            return code.value(f"sub {held} 0, {x}")
        case Op.ABS:
            return x if not signed else code.call(held, f"llvm.abs.i{bits}", (held, x), ("i1", "false"))
        case Op.SIGN:
            above = code.value(f"icmp {'sgt' if signed else 'ne'} {held} {x}, 0")
            positive = code.value(f"zext i1 {above} to {held}")
            if not signed:
                return positive
            below = code.value(f"icmp slt {held} {x}, 0")
            negative = code.value(f"zext i1 {below} to {held}")
            return code.value(f"sub {held} {positive}, {negative}")
        case Op.MAXIMUM | Op.MINIMUM:
            name = "max" if opcode is Op.MAXIMUM else "min"
            return code.call(held, f"llvm.{sign}{name}.i{bits}", (held, x), (held, operands[1]))
        case Op.CLAMP:
            low, x, high = operands
            above = code.call(held, f"llvm.{sign}max.i{bits}", (held, low), (held, x))
            return code.call(held, f"llvm.{sign}min.i{bits}", (held, above), (held, high))
        case Op.POPCNT:
            return code.call(held, f"llvm.ctpop.i{bits}", (held, x))
        case Op.CLZ:
            return code.call(held, f"llvm.ctlz.i{bits}", (held, x), ("i1", "false"))
        case Op.DIVIDE | Op.REMAINDER:
            return _divide(code, opcode, held, signed, x, operands[1])
    raise NotCompilableError(f"{opcode} of {element_type.name}")


def _shift(code: Function, opcode: Opcode, held: str, bits: int, x: str, amount: str) -> str:
    """Amounts that are no less than the width leave zero, or the sign."""
    inside = code.value(f"icmp ult {held} {amount}, {bits}")
    if opcode is Op.SHIFT_RIGHT_ARITHMETIC:
        amount = code.value(f"select i1 {inside}, {held} {amount}, {held} {bits - 1}")
        return code.value(f"ashr {held} {x}, {amount}")
    safe = code.value(f"select i1 {inside}, {held} {amount}, {held} 0")
    shifted = code.value(f"{_SHIFTS[opcode]} {held} {x}, {safe}")
    return code.value(f"select i1 {inside}, {held} {shifted}, {held} 0")


def _divide(code: Function, opcode: Opcode, held: str, signed: bool, x: str, y: str) -> str:
    """x / 0 is all ones, x % 0 is x; the quotient of the least number and -1 is itself, the remainder 0."""
    by_zero = code.value(f"icmp eq {held} {y}, 0")
    avoided = by_zero
    by_minus_one = ""
    if signed:
        by_minus_one = code.value(f"icmp eq {held} {y}, -1")
        avoided = code.value(f"or i1 {by_zero}, {by_minus_one}")
    safe = code.value(f"select i1 {avoided}, {held} 1, {held} {y}")
    sign = "s" if signed else "u"
    if opcode is Op.DIVIDE:
        result = code.value(f"{sign}div {held} {x}, {safe}")
        if signed:
            opposite = code.value(f"sub {held} 0, {x}")
            result = code.value(f"select i1 {by_minus_one}, {held} {opposite}, {held} {result}")
        return code.value(f"select i1 {by_zero}, {held} -1, {held} {result}")
    result = code.value(f"{sign}rem {held} {x}, {safe}")
    return code.value(f"select i1 {by_zero}, {held} {x}, {held} {result}")


# ---- comparisons and conversions ----


def _compare(code: Function, expression: Apply, element_type: ElementType, operands: list[str]) -> str:
    direction = Comparison(expression.detail)
    held = value_type(element_type)
    x, y = operands
    if element_type in _FLOATS:
        if expression.order is not ComparisonOrder.TOTAL:
            return code.value(f"fcmp {_ORDERED[direction]} {held} {x}, {y}")
        held = f"i{8 * element_type.bytes}"
        x, y = (_total(code, element_type, operand) for operand in operands)
    name = direction.value.lower()
    if name not in ("eq", "ne"):
        name = ("s" if element_type in SIGNED or element_type in _FLOATS else "u") + name
    return code.value(f"icmp {name} {held} {x}, {y}")


def _total(code: Function, element_type: ElementType, x: str) -> str:
    """An integer that is ordered as the float: -NaN < -inf < ... < -0 < +0 < ... < NaN."""
    bits = 8 * element_type.bytes
    number = code.value(f"bitcast {value_type(element_type)} {x} to i{bits}")
    negative = code.value(f"icmp slt i{bits} {number}, 0")
    mirrored = code.value(f"xor i{bits} {number}, {(1 << (bits - 1)) - 1}")
    return code.value(f"select i1 {negative}, i{bits} {mirrored}, i{bits} {number}")


def convert(code: Function, source: ElementType, target: ElementType, x: str) -> str:
    """Floats become integers that saturate, NaN becomes 0; PRED is whether a number is not 0."""
    if source is target:
        return x
    if source is E.BF16:
        return convert(code, E.F32, target, _widened(code, x))
    if target is E.BF16:
        if source not in _EXACT_FLOATS:
            raise NotCompilableError(f"{source.name} as BF16")  # it would be rounded twice
        return _narrowed(code, convert(code, source, E.F32, x))
    if not _COMPUTED.issuperset((source, target)):
        raise NotCompilableError(f"{source.name} as {target.name}")
    held, wanted = value_type(source), value_type(target)
    if target is E.PRED:
        return code.value(f"fcmp une {held} {x}, 0.0" if source in _FLOATS else f"icmp ne {held} {x}, 0")
    if source in _FLOATS:
        if target in _FLOATS:
            return code.value(f"{'fpext' if target is E.F64 else 'fptrunc'} {held} {x} to {wanted}")
        name = "fptosi" if target in SIGNED else "fptoui"
        return code.call(wanted, f"llvm.{name}.sat.{wanted}.f{8 * source.bytes}", (held, x))
    signed = source in SIGNED
    if target in _FLOATS:
        return code.value(f"{'sitofp' if signed else 'uitofp'} {held} {x} to {wanted}")
    if source is not E.PRED and source.bytes == target.bytes:
        return x
    if source is E.PRED or source.bytes < target.bytes:
        return code.value(f"{'sext' if signed else 'zext'} {held} {x} to {wanted}")
    return code.value(f"trunc {held} {x} to {wanted}")


def _bitcast(code: Function, source: ElementType, target: ElementType, x: str) -> str:
    if source.bytes != target.bytes:
        raise NotCompilableError("a bitcast that changes the width")
    if source is E.PRED:
        x = code.value(f"zext i1 {x} to i8")
    held = "i8" if source is E.PRED else value_type(source)
    if target is E.PRED:
        return code.value(f"icmp ne i8 {x}, 0")
    wanted = value_type(target)
    return x if held == wanted else code.value(f"bitcast {held} {x} to {wanted}")
