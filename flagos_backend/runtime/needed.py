"""Which instructions of a program must run, and how many there may be. Used by build.py."""

from __future__ import annotations

from flagos_backend.errors import ProgramTooLarge
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.effects import COLLECTIVES

# Calls are inlined, and a few lines of nested calls can mean more instructions than any machine holds.
MAX_INSTRUCTIONS = 1 << 20


class Program:
    """What the builders of one plan and its nested plans share: how many instructions they made, and which must run
    though nobody uses their results (each computation is looked at once)."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}
        self._count = 0

    def count(self, instruction: Instruction) -> None:
        self._count += 1
        if self._count > MAX_INSTRUCTIONS:
            raise ProgramTooLarge.at(instruction, limit=MAX_INSTRUCTIONS)

    def has_side_effect(self, instruction: Instruction) -> bool:
        if instruction.opcode is Opcode.CUSTOM_CALL:
            return instruction.attributes_as(CustomCallAttributes).has_side_effect
        if instruction.opcode in COLLECTIVES:
            return True  # the other participants come to it
        return any(self.any_side_effect(called) for called in instruction.called)

    def any_side_effect(self, computation: Computation) -> bool:
        known = self._known.get(id(computation))
        if known is None:
            known = any(self.has_side_effect(instruction) for instruction in computation.instructions)
            self._known[id(computation)] = known
        return known

    def needed(self, computation: Computation) -> list[Instruction]:
        """The instructions that the root or a side effect depends on, in order."""
        marked = {id(computation.root)}
        needed = []
        for instruction in reversed(computation.instructions):
            if id(instruction) in marked or self.has_side_effect(instruction):
                marked.update(id(operand) for operand in instruction.operands)
                needed.append(instruction)
        return needed[::-1]
