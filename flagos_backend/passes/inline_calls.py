"""Puts the body of each called computation in place of the call, within a bound on how much the program may grow."""

from __future__ import annotations

from flagos_backend.ir.attributes import ParameterAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.rewrite import Substitution, rewrite_computations

# Calls of calls can double at each level. Past this many times the program's size, and this many instructions, the
# rest of the calls stay calls.
MAX_GROWTH = 8
MAX_INSTRUCTIONS = 100_000


def inline_calls(module: Module) -> Module:
    size = sum(len(computation.instructions) for computation in module.computations())
    budget = max(size * MAX_GROWTH, MAX_INSTRUCTIONS)
    used = 0

    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        nonlocal used
        substitution = Substitution(replaced)
        instructions: list[Instruction] = []
        names: set[str] = set()
        for original in computation.instructions:
            instruction = substitution.apply(original)
            inlines = instruction.opcode is Opcode.CALL and used + len(instruction.called[0].instructions) <= budget
            if inlines:
                value = _inline(instruction, instructions, names)
                used += len(instruction.called[0].instructions)
            else:
                value = instruction
                instructions.append(instruction)
                names.add(instruction.name)
            substitution.record(original, value)
        if not substitution.values:
            return computation
        return Computation(computation.name, tuple(instructions), substitution.value(computation.root))

    return rewrite_computations(module, transform)


def _inline(call: Instruction, instructions: list[Instruction], names: set[str]) -> Instruction:
    """Appends copies of the callee's instructions on the call's operands; the value of its root.

    The framework names a callee's instructions relative to the call, so the call's own name goes before.
    """
    callee = call.called[0]
    scope = call.metadata.partition(" (")[0]
    values: dict[int, Instruction] = {}
    for instruction in callee.instructions:
        if instruction.opcode is Opcode.PARAMETER:
            values[id(instruction)] = call.operands[instruction.attributes_as(ParameterAttributes).number]
            continue
        copy = Instruction(
            instruction.opcode,
            instruction.shape,
            tuple([values[id(operand)] for operand in instruction.operands]),
            instruction.attributes,
            instruction.called,
            _fresh(instruction.name, names),
            f"{scope}/{instruction.metadata}" if scope and instruction.metadata else instruction.metadata,
        )
        values[id(instruction)] = copy
        instructions.append(copy)
    return values[id(callee.root)]


def _fresh(name: str, names: set[str]) -> str:
    """``name``, or it with the first free number behind it."""
    if name in names:
        base, number = name, len(names)
        while name in names:
            name = f"{base}.{number}"
            number += 1
    names.add(name)
    return name
