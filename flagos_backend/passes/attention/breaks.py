"""What stands between a product and a softmax where that is none of an attention, for explain. For recognize.py."""

from __future__ import annotations

from collections.abc import Mapping

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.passes.attention.labels import dims_of
from flagos_backend.passes.attention.symbols import Logits, Symbol

# What makes other rows of logits than the product's.
_OTHER_ROWS = frozenset({Opcode.CONCATENATE, Opcode.PAD, Opcode.RESHAPE})


def note_break(broken: dict[Instruction, str], symbols: Mapping[Instruction, Symbol], instruction: Instruction) -> None:
    """Remembers the first ``instruction`` after a product that is none of a softmax's, and what follows it."""
    for operand in instruction.operands:
        if operand in broken and instruction.opcode is not Opcode.DOT:
            broken.setdefault(instruction, broken[operand])
        elif isinstance(symbols.get(operand), Logits) and (
            instruction.opcode in _OTHER_ROWS or dims_of(instruction) == dims_of(operand)
        ):
            broken[instruction] = f"{instruction.opcode} %{instruction.name} {_harm(instruction)}"


def _harm(instruction: Instruction) -> str:
    """What it does to logits."""
    if instruction.opcode is Opcode.TANH:
        return "caps logits that have a mask, a bias or a cap already"
    if instruction.opcode is Opcode.RESHAPE:
        return "gives the logits other dimensions"
    return "changes the logits"
