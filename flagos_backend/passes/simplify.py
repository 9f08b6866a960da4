"""Algebraic identities that hold for every input, and shorter ways from values to their users."""

from __future__ import annotations

from flagos_backend.ir.attributes import DimensionsAttributes, TupleIndexAttributes, WhileAttributes
from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import TupleShape, leaves
from flagos_backend.passes import (
    simplify_arithmetic,
    simplify_indices,
    simplify_known_windows,
    simplify_movement,
    simplify_sums,
    simplify_updates,
)
from flagos_backend.passes.rewrite import Emitter, Rule, apply_rule, array_shape


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


def _first(opcode: Opcode, *rules: dict[Opcode, Rule]) -> Rule:
    """The first of several rules for ``opcode`` that changes something."""

    def rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
        for of in rules:
            found = of[opcode](instruction, emitter)
            if found is not None:
                return found
        return None

    return rule


def _reduce(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    """A reduction of no elements is what it begins with: no kernel has to tell where it may not read."""
    operands = instruction.operands
    if all(array_shape(operands[0]).dims):
        return simplify_sums.RULES[Opcode.REDUCE](instruction, emitter)
    parts = [
        emitter.emit(Opcode.BROADCAST, shape, (initial,), DimensionsAttributes(()), like=instruction)
        for shape, initial in zip(leaves(instruction.shape), operands[len(operands) // 2 :], strict=True)
    ]
    if not isinstance(instruction.shape, TupleShape):
        return parts[0]
    return emitter.emit(Opcode.TUPLE, instruction.shape, parts, like=instruction)


_RULES: dict[Opcode, Rule] = {
    **simplify_movement.RULES,
    **simplify_arithmetic.RULES,
    **simplify_indices.RULES,
    Opcode.REDUCE: _reduce,
    Opcode.SELECT: _first(Opcode.SELECT, simplify_arithmetic.RULES, simplify_updates.RULES),
    Opcode.GATHER: _first(Opcode.GATHER, simplify_known_windows.RULES, simplify_indices.RULES),
    Opcode.SLICE: _first(Opcode.SLICE, simplify_movement.RULES, simplify_known_windows.RULES),
    Opcode.GET_TUPLE_ELEMENT: _get_tuple_element,
    Opcode.TUPLE: _tuple,
    Opcode.WHILE: _while,
}
