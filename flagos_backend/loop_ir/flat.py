"""Takes the tuples out of a computation: every value becomes a list of arrays, its leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from flagos_backend.ir.attributes import TupleIndexAttributes
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import Shape, TupleShape, leaves


@dataclass(frozen=True, slots=True)
class FlatComputation:
    """``instructions`` hold no tuple, get-tuple-element or parameter; ``leaves_of`` any value as arrays.

    The leaves of a tuple-shaped parameter or library call are get-tuple-elements made here, numbered by leaf.
    """

    parameters: tuple[Instruction, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Instruction, ...]
    leaves_of: dict[Instruction, tuple[Instruction, ...]] = field(repr=False)

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The flat operands of ``instruction``."""
        return tuple(leaf for operand in instruction.operands for leaf in self.leaves_of[operand])


def flatten(computation: Computation) -> FlatComputation:
    leaves_of: dict[Instruction, tuple[Instruction, ...]] = {}
    kept = []
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if opcode is Opcode.TUPLE or (
            opcode is Opcode.OPTIMIZATION_BARRIER and isinstance(instruction.shape, TupleShape)
        ):
            found = tuple(leaf for operand in instruction.operands for leaf in leaves_of[operand])
        elif opcode is Opcode.GET_TUPLE_ELEMENT:
            found = _elements(instruction, leaves_of[instruction.operands[0]])
        else:
            found = tuple(_own_leaves(instruction))
            if opcode is not Opcode.PARAMETER:
                kept.append(instruction)
        leaves_of[instruction] = found
    parameters = tuple(leaf for parameter in computation.parameters for leaf in leaves_of[parameter])
    return FlatComputation(parameters, tuple(kept), leaves_of[computation.root], leaves_of)


def _own_leaves(instruction: Instruction) -> Iterator[Instruction]:
    if not isinstance(instruction.shape, TupleShape):
        yield instruction
        return
    for number, shape in enumerate(leaves(instruction.shape)):
        attributes = TupleIndexAttributes(number)
        name = f"{instruction.name}.{number}"
        yield Instruction(Opcode.GET_TUPLE_ELEMENT, shape, (instruction,), attributes, name=name)


def _elements(instruction: Instruction, operand_leaves: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    shape: Shape = instruction.operands[0].shape
    if not isinstance(shape, TupleShape):
        raise TypeError(f"{instruction.name} takes an element of {shape}")
    index = instruction.attributes_as(TupleIndexAttributes).index
    sizes = [sum(1 for _ in leaves(element)) for element in shape.elements]
    first = sum(sizes[:index])
    return operand_leaves[first : first + sizes[index]]
