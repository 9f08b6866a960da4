"""Rows of which one element is chosen, as programs write it: where the position is equal to a label."""

from __future__ import annotations

from dataclasses import dataclass

from flagos_backend.ir.attributes import (
    NONE,
    Attributes,
    CompareAttributes,
    ConstantAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    GatherAttributes,
)
from flagos_backend.ir.constants import is_splat_of, scalar_bytes
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import Emitter, array_shape

#: What rows are added up in.
ADDABLE = frozenset({ElementType.F16, ElementType.BF16, ElementType.F32, ElementType.F64})
_POSITIONS = frozenset({ElementType.S32, ElementType.S64})


def adds(computation: Computation) -> bool:
    """Whether a combiner is a sum of its two parameters."""
    root = computation.root
    return (
        root.opcode is Opcode.ADD
        and root.operands[0] is not root.operands[1]
        and all(operand.opcode is Opcode.PARAMETER for operand in root.operands)
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows along ``dim`` of arrays of ``dims``. What is made instead goes to ``emitter``, named as ``like`` is."""

    dim: int
    dims: tuple[int, ...]
    emitter: Emitter
    like: Instruction

    @property
    def size(self) -> int:
        return self.dims[self.dim]

    def is_multiple(self, value: Instruction) -> bool:
        """Whether ``value`` is made of a one-hot row by what leaves zeros zeros."""
        while array_shape(value).element_type in (*ADDABLE, ElementType.PRED):
            if value.opcode is Opcode.SELECT:
                hit, chosen, other = value.operands
                return self.is_one_hot(hit) and self.is_even(chosen) and self.is_zero(other)
            if value.opcode not in (Opcode.CONVERT, Opcode.NEGATE, Opcode.MULTIPLY):
                return self.is_one_hot(value)
            uneven = [operand for operand in value.operands if not self.is_even(operand)]
            if len(uneven) != 1:
                return False
            (value,) = uneven
        return False

    def is_one_hot(self, value: Instruction) -> bool:
        """Whether truth values ``value`` are those of a one-hot row, or of some of its rows, and no others."""
        return self._comparison(value) is not None

    def sole(self, value: Instruction, *, hit: bool) -> Instruction:
        """``value`` where the position is the label, if that is a position (``hit``), or elsewhere; without ``dim``."""
        steps = []
        while (labels := self._compared(value)) is None:
            steps.append(value)
            value = next(operand for operand in value.operands if not self.is_even(operand))
        found = self._hits(labels) if hit else self._constant(0, ElementType.PRED)
        for step in reversed(steps):
            operands = [self.without(operand) if self.is_even(operand) else found for operand in step.operands]
            found = self._emit(step.opcode, array_shape(step).element_type, operands)
        return found

    def is_even(self, value: Instruction) -> bool:
        """Whether ``value`` does not vary along the row, to be seen at once."""
        return value.opcode is Opcode.BROADCAST and self.dim not in _dims(value)

    def is_zero(self, value: Instruction) -> bool:
        """Whether ``value`` is the zero of a scalar, repeated."""
        zero = scalar_bytes(0, array_shape(value).element_type)
        return value.opcode is Opcode.BROADCAST and is_splat_of(value.operands[0], zero)

    def labels(self, value: Instruction) -> Instruction:
        """Of a one-hot row the label, without ``dim``."""
        comparison = self._comparison(value)
        labels = None if comparison is None else self._compared(comparison)
        assert labels is not None, "asked of what is no one-hot row"
        return self.without(labels)

    def gather(self, source: Instruction, labels: Instruction) -> Instruction:
        """The elements of ``source`` at ``labels``, the nearest where that is no position. Goes to no emitter."""
        others = tuple(d for d in range(len(self.dims)) if d != self.dim)
        attributes = GatherAttributes(
            offset_dims=(),
            collapsed_slice_dims=(self.dim,),
            start_index_map=(self.dim,),
            index_vector_dim=len(others),
            slice_sizes=(1,) * len(self.dims),
            operand_batching_dims=others,
            start_indices_batching_dims=tuple(range(len(others))),
        )
        shape = ArrayShape(array_shape(source).element_type, array_shape(labels).dims)
        return Instruction(Opcode.GATHER, shape, (source, labels), attributes, (), self.like.name, self.like.metadata)

    def _comparison(self, value: Instruction) -> Instruction | None:
        """That of positions with labels, which a one-hot row is made of."""
        while value.opcode is Opcode.AND:
            uneven = [operand for operand in value.operands if not self.is_even(operand)]
            if len(uneven) != 1:
                return None
            (value,) = uneven
        return value if self._compared(value) is not None else None

    def _compared(self, value: Instruction) -> Instruction | None:
        """What is compared with the position: the label of each row, repeated along it."""
        if value.opcode is not Opcode.COMPARE or value.attributes_as(CompareAttributes).direction is not Comparison.EQ:
            return None
        for labels, positions in (value.operands, value.operands[::-1]):
            if self.is_even(labels) and self._is_position(positions):
                return labels
        return None

    def _is_position(self, value: Instruction) -> bool:
        if array_shape(value).element_type not in _POSITIONS:
            return False
        along = self.dim
        if value.opcode is Opcode.BROADCAST:
            if along not in _dims(value):
                return False
            along, value = _dims(value).index(along), value.operands[0]
        return value.opcode is Opcode.IOTA and value.attributes_as(DimensionAttributes).dimension == along

    # ---- Without the dimension of the row

    def _emit(
        self, opcode: Opcode, element_type: ElementType, operands: list[Instruction], attributes: Attributes = NONE
    ) -> Instruction:
        dims = self.dims[: self.dim] + self.dims[self.dim + 1 :]
        return self.emitter.emit(opcode, ArrayShape(element_type, dims), operands, attributes, like=self.like)

    def without(self, value: Instruction) -> Instruction:
        dims = DimensionsAttributes(tuple(d - (d > self.dim) for d in _dims(value)))
        return self._emit(Opcode.BROADCAST, array_shape(value).element_type, [value.operands[0]], dims)

    def _hits(self, labels: Instruction) -> Instruction:
        element_type = array_shape(labels).element_type
        label = self.without(labels)
        first, end = (self._constant(number, element_type) for number in (0, self.size))
        begun = self._emit(Opcode.COMPARE, ElementType.PRED, [label, first], CompareAttributes(Comparison.GE))
        ended = self._emit(Opcode.COMPARE, ElementType.PRED, [label, end], CompareAttributes(Comparison.LT))
        return self._emit(Opcode.AND, ElementType.PRED, [begun, ended])

    def _constant(self, number: int, element_type: ElementType) -> Instruction:
        data = ConstantAttributes(scalar_bytes(number, element_type))
        scalar = self.emitter.emit(Opcode.CONSTANT, ArrayShape(element_type), (), data, like=self.like)
        return self._emit(Opcode.BROADCAST, element_type, [scalar], DimensionsAttributes(()))


def _dims(broadcast: Instruction) -> tuple[int, ...]:
    return broadcast.attributes_as(DimensionsAttributes).dimensions
