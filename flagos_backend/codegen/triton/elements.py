"""How element types are held in a kernel, and how they go to memory and back.

16-bit floats are held as float32 that their type holds: each operation rounds its result, at the latest where it is
stored.
"""

from __future__ import annotations

import enum

from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.region import Apply, Expression

E = ElementType


class Dialect(enum.Enum):
    """Where elementary functions come from."""

    LIBDEVICE = enum.auto()  # the device library that Triton binds for the vendor
    PLAIN = enum.auto()  # the language and formulas.py alone


# What a value is inside a kernel. Types that regions only move keep the storage type of their buffer.
HELD: dict[ElementType, str] = {
    E.PRED: "tl.int1",
    **{t: f"tl.int{t.bits}" for t in (E.S8, E.S16, E.S32, E.S64)},
    **{t: f"tl.uint{t.bits}" for t in (E.U8, E.U16, E.U32, E.U64)},
    E.F16: "tl.float32",
    E.BF16: "tl.float32",
    E.F32: "tl.float32",
    E.F64: "tl.float64",
}
HALF = {E.F16: "tl.float16", E.BF16: "tl.bfloat16"}
HELD_AS_F32 = frozenset({E.F32, *HALF})
_ROUND = {
    Dialect.LIBDEVICE: {E.F16: "fm.as_f16", E.BF16: "fm.as_bf16"},
    Dialect.PLAIN: {E.F16: "fm.as_f16", E.BF16: "fm.as_bf16_by_bits"},
}
_AS_STORED = {E.U16: "tl.int16", E.U32: "tl.int32", E.U64: "tl.int64"}


def from_memory(text: str, element_type: ElementType, dialect: Dialect) -> str:
    """The loaded ``text`` as the type is held."""
    if element_type is E.BF16 and dialect is Dialect.PLAIN:
        return f"fm.bf16_bits_as_f32({text}.to(tl.uint16, bitcast=True))"
    if element_type in HALF:
        return f"{text}.to(tl.float32)"
    if element_type in _AS_STORED:
        return f"{text}.to({HELD[element_type]}, bitcast=True)"
    return text


def to_memory(text: str, element_type: ElementType, dialect: Dialect) -> str:
    """The inverse of from_memory."""
    if element_type is E.BF16 and dialect is Dialect.PLAIN:
        return f"fm.f32_as_bf16_bits({text}).to(tl.bfloat16, bitcast=True)"
    if element_type in HALF:
        return f"{text}.to({HALF[element_type]})"
    if element_type in _AS_STORED:
        return f"{text}.to({_AS_STORED[element_type]}, bitcast=True)"
    return text


def rounded(text: str, element_type: ElementType, dialect: Dialect) -> str:
    """A float32 rounded to what ``element_type`` holds."""
    return f"{_ROUND[dialect][element_type]}({text})" if element_type in HALF else text


def unconverted(expression: Expression) -> Expression:
    """What ``expression`` is converted from without a rounding."""
    while isinstance(expression, Apply) and expression.opcode is Opcode.CONVERT:
        (narrow,) = expression.operands
        if narrow.element_type not in HELD_AS_F32 or expression.element_type is not E.F32:
            break
        expression = narrow
    return expression
