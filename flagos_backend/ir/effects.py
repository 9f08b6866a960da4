"""Which instructions do more than compute their value, and hence must stay, once each and in order."""

from __future__ import annotations

from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode

#: The target of a custom call that calls a function of the host.
HOST_CALLBACK = "flagos.host_callback"
COLLECTIVES = frozenset(
    {
        Opcode.ALL_GATHER,
        Opcode.ALL_REDUCE,
        Opcode.ALL_TO_ALL,
        Opcode.COLLECTIVE_BROADCAST,
        Opcode.COLLECTIVE_PERMUTE,
        Opcode.RAGGED_ALL_TO_ALL,
        Opcode.REDUCE_SCATTER,
    }
)


class Effects:
    """Answers for one module; remembers the answer for each computation."""

    def __init__(self) -> None:
        self._computations: dict[int, tuple[Computation, bool]] = {}

    def of(self, instruction: Instruction) -> bool:
        """rng draws from a hidden state, collectives meet other devices, custom calls say so themselves."""
        if instruction.called:
            return self._own(instruction) or any(self.of_computation(callee) for callee in instruction.called)
        return self._own(instruction)

    @staticmethod
    def _own(instruction: Instruction) -> bool:
        if instruction.opcode is Opcode.CUSTOM_CALL:
            return instruction.attributes_as(CustomCallAttributes).has_side_effect
        return instruction.opcode is Opcode.RNG or instruction.opcode in COLLECTIVES

    def of_computation(self, computation: Computation) -> bool:
        known = self._computations.get(id(computation))
        if known is None:
            known = (computation, any(self.of(instruction) for instruction in computation.instructions))
            self._computations[id(computation)] = known
        return known[1]

    def needed(self, computation: Computation) -> list[Instruction]:
        """The instructions that the root or an effect depends on, in order."""
        marked = {id(computation.root)}
        needed = []
        for instruction in reversed(computation.instructions):
            if id(instruction) in marked or self.of(instruction):
                marked.update(id(operand) for operand in instruction.operands)
                needed.append(instruction)
        return needed[::-1]
