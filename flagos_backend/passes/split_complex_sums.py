"""Sums of complex numbers of two float32 become two sums of floats, one of the real and one of the imaginary parts:
loop nests compute with complex numbers, and reduce floats. Both sums read the same elements, so that they become one
nest.
"""

from __future__ import annotations

from flagos_backend.ir.hlo import Instruction, Module
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.one_hot import adds
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape, sum_of


def split_complex_sums(module: Module) -> Module:
    """``module`` without a reduce of one C64 operand that adds."""
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is not Opcode.REDUCE or len(instruction.operands) != 2 or not adds(instruction.called[0]):
        return None
    if array_shape(instruction).element_type is not ElementType.C64:
        return None
    combiner = (sum_of(ElementType.F32),)
    sums = []
    for component in (Opcode.REAL, Opcode.IMAG):
        operands = [
            emitter.emit(component, _floats(operand), (operand,), like=instruction) for operand in instruction.operands
        ]
        sums.append(
            emitter.emit(
                Opcode.REDUCE, _floats(instruction), operands, instruction.attributes, combiner, like=instruction
            )
        )
    return emitter.emit(Opcode.COMPLEX, instruction.shape, sums, like=instruction)


def _floats(value: Instruction) -> ArrayShape:
    return ArrayShape(ElementType.F32, array_shape(value).dims)
