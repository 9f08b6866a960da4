"""What a ragged-dot is made of: which dimension falls into groups, and what the groups' sizes belong to.

Read by passes/expand_ragged_dots.py, and by the kernels that compute one whole.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flagos_backend.ir.attributes import Dims, DotAttributes, RaggedDotAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.types import ArrayShape, ElementType

# Rows of a grouped product begin at multiples of as many bytes.
_ALIGNMENT = 16
_MULTIPLE = _ALIGNMENT // ElementType.BF16.bytes


class Role(enum.Enum):
    """What the ragged dimension of the left operand is to the dot."""

    FREE = "free"
    CONTRACTING = "contracting"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class RaggedDot:
    """``dimension``: the ragged one of the left operand, of ``length``. ``prefix``: dimensions of the left operand that
    have groups of their own, in the order of the sizes' dimensions. ``group``: the right operand's dimension of
    ``groups``, -1 but where the ragged dimension is free. ``other``: the right operand's dimension that goes with the
    ragged one, -1 where that is free."""

    role: Role
    dot: DotAttributes
    lhs: ArrayShape
    rhs: ArrayShape
    sizes: ArrayShape
    result: ArrayShape
    dimension: int
    prefix: Dims
    group: int
    other: int

    @property
    def length(self) -> int:
        return self.lhs.dims[self.dimension]

    @property
    def groups(self) -> int:
        return self.sizes.dims[-1]

    @property
    def free(self) -> Dims:
        """The left operand's dimensions that are the result's after the batch."""
        return tuple(d for d in range(self.lhs.rank) if d not in (*self.dot.lhs_batch, *self.dot.lhs_contracting))


def ragged_dot_of(instruction: Instruction) -> RaggedDot:
    attributes = instruction.attributes_as(RaggedDotAttributes)
    dot = attributes.dot
    lhs, rhs, sizes, result = (value.shape for value in (*instruction.operands, instruction))
    assert isinstance(lhs, ArrayShape)
    assert isinstance(rhs, ArrayShape)
    assert isinstance(sizes, ArrayShape)
    assert isinstance(result, ArrayShape)
    (dimension,) = attributes.lhs_ragged
    free = tuple(d for d in range(lhs.rank) if d not in (*dot.lhs_batch, *dot.lhs_contracting))
    group, other = -1, -1
    if dimension in dot.lhs_batch:
        role, outer = Role.BATCH, dot.lhs_batch
        other = dot.rhs_batch[outer.index(dimension)]
    elif dimension in dot.lhs_contracting:
        role, outer = Role.CONTRACTING, (*dot.lhs_batch, *dot.lhs_contracting)
        other = dot.rhs_contracting[dot.lhs_contracting.index(dimension)]
    else:
        role, outer = Role.FREE, (*dot.lhs_batch, *free)
        (group,) = attributes.rhs_group
    before = outer[: outer.index(dimension)]
    prefix = before[len(before) - (sizes.rank - 1) :]
    return RaggedDot(role, dot, lhs, rhs, sizes, result, dimension, prefix, group, other)


def why_not_grouped(instruction: Instruction) -> str:
    """Why no library's grouped product of matrices of BF16 computes it, or ""."""
    ragged = ragged_dot_of(instruction)
    dot, arrays = ragged.dot, (ragged.lhs, ragged.rhs, ragged.result)
    if any(shape.element_type is not ElementType.BF16 for shape in arrays):
        return "its operands and its result are not all bf16"
    if dot.lhs_batch or ragged.sizes.rank != 1 or ragged.lhs.rank != 2 or len(dot.lhs_contracting) != 1:
        return "it is no grouped product of matrices"
    if any(shape.num_elements == 0 for shape in (*arrays, ragged.sizes)):
        return "there is nothing to compute"
    if ragged.groups == 1:
        return "its one group is a product of matrices"
    if ragged.role is Role.CONTRACTING:
        # A group begins anywhere along this dimension, where rows of the others have to begin.
        if ragged.rhs.rank != 2 or (*dot.lhs_contracting, *dot.rhs_contracting) != (0, 0):
            return "groups do not begin where rows do"
    elif ragged.rhs.rank != 3 or ragged.group == 2:
        return "it is no grouped product of matrices"
    minor = (ragged.lhs.dims[-1], ragged.rhs.dims[-1])
    return "" if all(size % _MULTIPLE == 0 for size in minor) else f"rows are no multiples of {_MULTIPLE} elements"
