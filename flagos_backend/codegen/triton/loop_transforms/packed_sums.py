"""Sums of 16-bit integers on NVIDIA's chips, each by itself: the assembler of CUDA 12.8, which is Triton 3.6's, adds
nothing to every second number of a packed sum where it knows low bits of the other one. Just before a region is written
down."""

from __future__ import annotations

from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.intrinsics import Intrinsic
from flagos_backend.loop_ir.region import Apply, Expression, Reduce, Region
from flagos_backend.loop_ir.rewriting import Moved, Pool, replaced

_NARROW = frozenset({ElementType.S16, ElementType.U16})
_PACKED = frozenset({Opcode.ADD, Opcode.SUBTRACT})


def without_packed_sums(region: Region) -> Region:
    """``region`` itself where no 16-bit integers are added. Reductions add up in 32 bits, and lose the upper ones
    after."""
    return replaced(region, {e for e in region.expressions() if _opcode(e) in _PACKED}, _alone)


def _alone(expression: Expression, moved: Moved, pool: Pool) -> Expression:
    def convert(narrow: Expression, element_type: ElementType) -> Expression:
        return pool.apply(Apply(element_type, Opcode.CONVERT, ()), (narrow,))

    operands = tuple(moved[operand] for operand in expression.operands)
    if isinstance(expression, Apply):
        return pool.apply(Apply(expression.element_type, expression.opcode, (), Intrinsic.ALONE), operands)
    assert isinstance(expression, Reduce)
    value, initial = (convert(operand, ElementType.S32) for operand in operands)
    wide = Reduce(ElementType.S32, expression.combine, value, initial, expression.dims)
    return convert(pool.reduce(wide, value, initial, expression.dims), expression.element_type)


def _opcode(expression: Expression) -> Opcode | None:
    """What combines 16-bit integers."""
    if expression.element_type not in _NARROW:
        return None
    if isinstance(expression, Apply):
        return expression.opcode
    return expression.combine if isinstance(expression, Reduce) else None
