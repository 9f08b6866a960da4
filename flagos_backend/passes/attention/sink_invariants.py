"""Recomputes inside a loop what its state carries unchanged though it is made of nothing but constants and iotas.

A mask that JAX hoisted out of a scan becomes recognizable in the body again, and the state need not carry it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from flagos_backend.ir.attributes import ConstantAttributes, TupleIndexAttributes
from flagos_backend.ir.effects import COLLECTIVES
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, TupleShape
from flagos_backend.passes.rewrite import Substitution, index_in, rewrite_computations, with_operands

# Enough for a mask of positions; more would no longer be free to compute again.
_MAX_INSTRUCTIONS = 24
_NOT_SUNK = COLLECTIVES | {Opcode.PARAMETER, Opcode.CUSTOM_CALL, Opcode.RNG, Opcode.RNG_BIT_GENERATOR, Opcode.DOT}
# What the state carries in the place of an array that is computed in the body.
_NOTHING = ArrayShape(ElementType.PRED)


def sink_invariants(module: Module) -> Module:
    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        substitution = Substitution(replaced)
        users = _users(computation)
        instructions = []
        for instruction in computation.instructions:
            better = substitution.apply(instruction)
            if better.opcode is Opcode.WHILE and _only_elements_used(users[instruction]):
                sunk = _Sinking.of(better)
                if sunk is not None:
                    new, loop, kept = sunk.rewritten()
                    instructions += new
                    substitution.record(instruction, loop)
                    for user in users[instruction]:
                        index = user.attributes_as(TupleIndexAttributes).index
                        if index in kept:
                            substitution.record(user, kept[index])
                    continue
            if substitution.value(instruction) is not instruction:
                continue  # an element of a loop that is known outside of it
            instructions.append(better)
            substitution.record(instruction, better)
        if not substitution.values:
            return computation
        return Computation(computation.name, tuple(instructions), substitution.value(computation.root))

    return rewrite_computations(module, transform)


def _users(computation: Computation) -> dict[Instruction, list[Instruction]]:
    users: dict[Instruction, list[Instruction]] = defaultdict(list)
    for instruction in computation.instructions:
        for operand in instruction.operands:
            users[operand].append(instruction)
    users[computation.root].append(computation.root)
    return users


def _only_elements_used(users: list[Instruction]) -> bool:
    return all(user.opcode is Opcode.GET_TUPLE_ELEMENT for user in users)


@dataclass(frozen=True, slots=True)
class _Sinking:
    """A loop, and for some elements of its state the instructions that compute them from nothing, the last one last."""

    loop: Instruction
    expressions: dict[int, list[Instruction]]

    @classmethod
    def of(cls, loop: Instruction) -> _Sinking | None:
        initial, (condition, body) = loop.operands[0], loop.called
        if initial.opcode is not Opcode.TUPLE or body.root.opcode is not Opcode.TUPLE:
            return None
        for computation in (condition, body):
            if not _only_elements_used(_users(computation)[computation.parameters[0]]):
                return None
        read = {index_in(i, condition.parameters[0]) for i in condition.instructions}
        found = {}
        for index, (before, after) in enumerate(zip(initial.operands, body.root.operands, strict=True)):
            expression = _constant_expression(before)
            if expression is not None and index_in(after, body.parameters[0]) == index and index not in read:
                found[index] = expression
        return cls(loop, found) if found else None

    def rewritten(self) -> tuple[list[Instruction], Instruction, dict[int, Instruction]]:
        """New instructions, the loop among them as the second value, and what is known of its elements outside."""
        loop = self.loop
        initial, (condition, body) = loop.operands[0], loop.called
        assert isinstance(loop.shape, TupleShape)
        shapes = tuple(_NOTHING if i in self.expressions else s for i, s in enumerate(loop.shape.elements))
        shape = TupleShape(shapes)
        nothing = Instruction(Opcode.CONSTANT, _NOTHING, (), ConstantAttributes(bytes(1)), name=f"{loop.name}.nothing")
        operands = tuple(nothing if i in self.expressions else o for i, o in enumerate(initial.operands))
        start = Instruction(Opcode.TUPLE, shape, operands, name=initial.name, metadata=initial.metadata)
        called = (self._on_state(condition, shape), self._on_state(body, shape))
        made = Instruction(loop.opcode, shape, (start,), loop.attributes, called, loop.name, loop.metadata)
        kept = {index: initial.operands[index] for index in self.expressions}
        return [nothing, start, made], made, kept

    def _on_state(self, computation: Computation, shape: TupleShape) -> Computation:
        """Condition or body on the smaller state, which computes the rest itself."""
        (old,) = computation.parameters
        state = Instruction(Opcode.PARAMETER, shape, (), old.attributes, name=old.name, metadata=old.metadata)
        values: dict[Instruction, Instruction] = {old: state}
        instructions = [state]
        sunk = self._copies(instructions)
        root = computation.root
        for instruction in computation.instructions:
            index = index_in(instruction, old)
            if instruction is old:
                continue
            if index in self.expressions:
                values[instruction] = sunk[index]
                continue
            if instruction is root and isinstance(root.shape, TupleShape):
                made = self._root(root, values, state, instructions)
            else:
                made = with_operands(instruction, tuple(values[o] for o in instruction.operands), instruction.called)
            values[instruction] = made
            instructions.append(made)
        return Computation(computation.name, tuple(instructions), values[root])

    def _copies(self, instructions: list[Instruction]) -> dict[int, Instruction]:
        """Appends the expressions; the value of each element."""
        copies: dict[Instruction, Instruction] = {}
        for expression in self.expressions.values():
            for instruction in expression:
                if instruction not in copies:
                    copies[instruction] = with_operands(instruction, tuple(copies[o] for o in instruction.operands), ())
                    instructions.append(copies[instruction])
        return {index: copies[expression[-1]] for index, expression in self.expressions.items()}

    def _root(
        self,
        root: Instruction,
        values: dict[Instruction, Instruction],
        state: Instruction,
        instructions: list[Instruction],
    ) -> Instruction:
        operands = []
        for index, operand in enumerate(root.operands):
            if index in self.expressions:
                attributes = TupleIndexAttributes(index)
                name = f"{root.name}.nothing.{index}"
                operands.append(Instruction(Opcode.GET_TUPLE_ELEMENT, _NOTHING, (state,), attributes, name=name))
                instructions.append(operands[-1])
            else:
                operands.append(values[operand])
        return Instruction(Opcode.TUPLE, state.shape, tuple(operands), name=root.name, metadata=root.metadata)


def _constant_expression(root: Instruction) -> list[Instruction] | None:
    """The instructions that ``root`` is made of, operands first; None when it needs a parameter or too many."""
    order: dict[Instruction, None] = {}
    stack = [(root, False)]
    while stack:
        instruction, ready = stack.pop()
        if ready:
            order[instruction] = None
        elif instruction not in order:
            if instruction.opcode in _NOT_SUNK or instruction.called or isinstance(instruction.shape, TupleShape):
                return None
            if len(order) + len(stack) > 2 * _MAX_INSTRUCTIONS:
                return None
            stack.append((instruction, True))
            stack += [(operand, False) for operand in instruction.operands]
    return list(order) if len(order) <= _MAX_INSTRUCTIONS else None
