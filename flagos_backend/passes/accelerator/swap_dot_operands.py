"""A transpose of a dot that makes rows of columns is the dot of the operands in the other order: the array is written
once, as gradients of weights are wanted.

Before contracting_dims_minor.py, which lays out operands and leaves their order.
"""

from __future__ import annotations

from flagos_backend.ir.attributes import DimensionsAttributes, DotAttributes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import DotAlgorithm, Opcode
from flagos_backend.passes.rewrite import Replacement, array_shape, replace_each, rewrite_computations, users_of


def swap_dot_operands(module: Module) -> Module:
    return rewrite_computations(module, _swapped)


def _swapped(computation: Computation, replaced: dict[int, Computation]) -> Computation:
    users = users_of(computation)

    def find(instruction: Instruction) -> Replacement | None:
        if instruction.opcode is not Opcode.TRANSPOSE or instruction.operands[0].opcode is not Opcode.DOT:
            return None
        (dot,) = instruction.operands
        order = instruction.attributes_as(DimensionsAttributes).dimensions
        # Where the dot is needed as it is, another would cost more than the transpose.
        if dot is computation.root or len(users[id(dot)]) != 1 or order != _rows_last(dot):
            return None
        a = dot.attributes_as(DotAttributes)
        if a.algorithm is not DotAlgorithm.UNSET:
            return None
        attributes = DotAttributes(a.rhs_contracting, a.lhs_contracting, a.rhs_batch, a.lhs_batch, a.precision)
        made = Instruction(
            Opcode.DOT, instruction.shape, dot.operands[::-1], attributes, (), instruction.name, instruction.metadata
        )
        return made, [made]

    return replace_each(computation, replaced, find)


def _rows_last(dot: Instruction) -> tuple[int, ...]:
    """The order of dimensions in which those of the left operand come behind those of the right one."""
    attributes = dot.attributes_as(DotAttributes)
    batch, rank = len(attributes.lhs_batch), array_shape(dot).rank
    columns = array_shape(dot.operands[0]).rank - len(attributes.lhs_contracting)
    return (*range(batch), *range(columns, rank), *range(batch, columns))
