"""Algebraic identities that hold for every input, and shorter ways from values to their users."""

from __future__ import annotations

from flagos_backend.ir.attributes import TupleIndexAttributes, WhileAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import TupleShape
from flagos_backend.passes import simplify_arithmetic, simplify_indices, simplify_movement, simplify_sums
from flagos_backend.passes.rewrite import Emitter, Rule, apply_rule


def simplify(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    rule = _RULES.get(instruction.opcode)
    return None if rule is None else rule(instruction, emitter)


def _get_tuple_element(instruction: Instruction, _: Emitter) -> Instruction | None:
    source = instruction.operands[0]
    if source.opcode is not Opcode.TUPLE:
        return None
    return source.operands[instruction.attributes_as(TupleIndexAttributes).index]


def _tuple(instruction: Instruction, _: Emitter) -> Instruction | None:
    """A tuple of all elements of another, in order, is the other."""
    if not instruction.operands or instruction.operands[0].opcode is not Opcode.GET_TUPLE_ELEMENT:
        return None
    source = instruction.operands[0].operands[0]
    if not isinstance(source.shape, TupleShape) or len(source.shape.elements) != len(instruction.operands):
        return None
    for index, operand in enumerate(instruction.operands):
        if operand.opcode is not Opcode.GET_TUPLE_ELEMENT or operand.operands[0] is not source:
            return None
        if operand.attributes_as(TupleIndexAttributes).index != index:
            return None
    return source


def _while(instruction: Instruction, _: Emitter) -> Instruction | None:
    return instruction.operands[0] if instruction.attributes_as(WhileAttributes).trip_count == 0 else None


_RULES: dict[Opcode, Rule] = {
    **simplify_movement.RULES,
    **simplify_arithmetic.RULES,
    **simplify_indices.RULES,
    **simplify_sums.RULES,
    Opcode.GET_TUPLE_ELEMENT: _get_tuple_element,
    Opcode.TUPLE: _tuple,
    Opcode.WHILE: _while,
}
