"""Products of integers that were converted to wider ones, as products of what they were before: fewer bytes to read,
and faster instructions. They come out the same, because sums are computed modulo 2^32 either way.

A pass of what emitter.py emits.
"""

from __future__ import annotations

from dataclasses import replace

from flagos_backend.codegen.cpu.lower.dot import INTEGERS, is_product_operand
from flagos_backend.ir.elementwise import element_type
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.indexing import dims_of, row_major
from flagos_backend.passes.rewrite import Emitter, apply_rule


def with_narrow_products(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(dot: Instruction, emitter: Emitter) -> Instruction | None:
    result = element_type(dot)
    if dot.opcode is not Opcode.DOT or result not in INTEGERS:
        return None
    operands = tuple(o.operands[0] if _can_be_read_before(o, result) else o for o in dot.operands)
    if operands == dot.operands or not {*map(element_type, operands)} <= INTEGERS:
        return None
    narrow = replace(dot, operands=operands)
    # Library calls take operands of one type.
    if not all(is_product_operand(narrow, n, row_major(o, dims_of(o))) for n, o in enumerate(operands)):
        return None
    return emitter.put(narrow)


def _can_be_read_before(operand: Instruction, result: ElementType) -> bool:
    """Whether a conversion leaves values as they are, or as they are in the bits that the result has."""
    to = element_type(operand)
    if operand.opcode is not Opcode.CONVERT or to is None:
        return False
    before = element_type(operand.operands[0])
    if before not in INTEGERS or before.bits >= to.bits:
        return False
    return to.bits >= result.bits or to.is_signed or before.is_unsigned
