"""Common subexpression elimination: of equal pure instructions the first stays, and so of equal computations."""

from __future__ import annotations

from collections.abc import Hashable

from flagos_backend.ir.effects import Effects
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.rewrite import Substitution, rewrite_computations

# A barrier or token exists to be distinct; parameters are distinct by number.
_KEPT = frozenset({Opcode.PARAMETER, Opcode.OPTIMIZATION_BARRIER, Opcode.AFTER_ALL})


def eliminate_common_subexpressions(module: Module) -> Module:
    effects = Effects()
    canonical: dict[Hashable, Computation] = {}

    def transform(computation: Computation, replaced: dict[int, Computation]) -> Computation:
        substitution = Substitution(replaced)
        first: dict[Hashable, Instruction] = {}
        instructions = []
        for original in computation.instructions:
            instruction = substitution.apply(original)
            if instruction.opcode not in _KEPT and not effects.of(instruction):
                found = first.setdefault(_key(instruction), instruction)
                if found is not instruction:
                    substitution.record(original, found)
                    continue
            instructions.append(instruction)
            substitution.record(original, instruction)
        if substitution.values:
            root = substitution.value(computation.root)
            computation = Computation(computation.name, tuple(instructions), root)
        return canonical.setdefault(_fingerprint(computation), computation)

    return rewrite_computations(module, transform)


def _key(instruction: Instruction) -> Hashable:
    return (
        instruction.opcode,
        tuple([id(operand) for operand in instruction.operands]),
        instruction.attributes,
        instruction.shape,
        tuple([id(callee) for callee in instruction.called]),
    )


def _fingerprint(computation: Computation) -> Hashable:
    """Equal for computations that are the same but for names; callees are already canonical."""
    position = {id(instruction): index for index, instruction in enumerate(computation.instructions)}
    body = tuple(
        (
            instruction.opcode,
            tuple([position[id(operand)] for operand in instruction.operands]),
            instruction.attributes,
            instruction.shape,
            tuple([id(callee) for callee in instruction.called]),
        )
        for instruction in computation.instructions
    )
    return body, position[id(computation.root)]
