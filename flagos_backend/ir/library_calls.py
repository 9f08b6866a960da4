"""Which instructions libraries compute on a host, and whether with several threads. Read by who emits the call and who
makes it."""

from __future__ import annotations

from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.cost import instruction_cost
from flagos_backend.ir.effects import COLLECTIVES, HOST_CALLBACK
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode

#: Of the libraries that PyTorch calls, which use threads however small the operands are.
_USE_THREADS = frozenset({Opcode.CHOLESKY, Opcode.CONVOLUTION, Opcode.DOT, Opcode.FFT, Opcode.TRIANGULAR_SOLVE})
#: Calls of fewer seconds, as cost.py estimates them, are over before another thread wakes.
_LONGEST_ALONE = 100e-6


def may_use_threads(instruction: Instruction) -> bool:
    """Whether the library that computes ``instruction`` may use more threads than the caller's, if it is let."""
    if isinstance(instruction.attributes, CustomCallAttributes):
        return instruction.attributes.target != HOST_CALLBACK
    if instruction.called and instruction.opcode not in COLLECTIVES:
        return True
    return instruction.opcode in _USE_THREADS


def runs_alone(instruction: Instruction) -> bool:
    """Whether it is kept to the caller's thread, as it is small. What ATen's own operators sum up depends on the
    threads: they have as many as in eager mode."""
    attributes = instruction.attributes
    if isinstance(attributes, CustomCallAttributes) and attributes.target.startswith("aten::"):
        return False
    return may_use_threads(instruction) and instruction_cost(instruction).seconds < _LONGEST_ALONE
