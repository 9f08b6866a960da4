"""How many instructions one program may have once its calls are inlined."""

from __future__ import annotations

from flagos_backend.errors import ProgramTooLarge
from flagos_backend.ir.hlo import Instruction

# Calls are inlined, and a few lines of nested calls can mean more instructions than any machine holds.
MAX_INSTRUCTIONS = 1 << 20


class InstructionCount:
    """What everybody who inlines one program shares."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, instruction: Instruction) -> None:
        """Raises ProgramTooLarge at the first instruction too many."""
        self._count += 1
        if self._count > MAX_INSTRUCTIONS:
            raise ProgramTooLarge.at(instruction, limit=MAX_INSTRUCTIONS)
