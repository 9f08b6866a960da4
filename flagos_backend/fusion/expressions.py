"""What a region computes at each point, made from the instructions that no buffer holds. Used by fuse.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from flagos_backend.fusion.choices import Choices
from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes, IndexNumber
from flagos_backend.ir.elementwise import element_type
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.bounds import bounds_of
from flagos_backend.loop_ir.indexing import Indices, dims_of, gathered, movement_of, reshape_indices, shifted
from flagos_backend.loop_ir.literals import literal_of, number_of, uniform_literal
from flagos_backend.loop_ir.region import Apply, Expression, Index, Literal, Load, linear

# Where a value is needed.
Guard = Expression | None


class Expressions:
    """The expressions of one region, each made once.

    ``operands``: the flat ones of an instruction. ``buffers``: what is in memory by then, and in which buffer.
    ``part_at``: what an instruction is put together of at indices, and where in that they are. A ``guard`` tells where
    a value is needed, and its indices lie inside; None: everywhere.
    """

    def __init__(
        self,
        choices: Choices,
        operands: Callable[[Instruction], tuple[Instruction, ...]],
        buffers: Mapping[Instruction, Instruction],
        part_at: Callable[[Instruction, Indices], tuple[Instruction, Indices]],
    ) -> None:
        self.choices, self.rank = choices, len(choices.dims)
        self.operands, self.buffers, self.part_at = operands, buffers, part_at
        self.made: dict[tuple[Instruction, Indices, Guard], Expression] = {}
        self.clamped: dict[tuple[Expression, int, int], Expression] = {}
        self.wrapped: dict[tuple[Expression, int], Expression] = {}

    def of(self, instruction: Instruction, indices: Indices, guard: Guard = None) -> Expression:
        """The value of ``instruction`` at ``indices``: a load when it is a buffer, else its computation."""
        # Chains of what only moves elements may be longer than calls can be deep.
        passed = []
        while (found := self.made.get((instruction, indices, guard))) is None:
            passed.append((instruction, indices, guard))
            found = self._at_hand(instruction, indices, guard)
            if found is not None:
                break
            moved = self._moved(instruction, indices, guard)
            if moved is None:
                found = self.compute(instruction, indices, guard)
                break
            instruction, indices = moved
        for key in passed:
            self.made[key] = found
        return found

    def compute(self, instruction: Instruction, indices: Indices, guard: Guard = None) -> Expression:
        moved = self._moved(instruction, indices, guard)
        if moved is not None:
            return self.of(*moved, guard)
        if instruction.opcode is Opcode.RESHAPE:
            # A buffer is addressed by element number, which a reshape does not change.
            return self._load(instruction, self.buffers[self.operands(instruction)[0]], indices, guard)
        if instruction.opcode in (Opcode.CONCATENATE, Opcode.PAD):
            return self._choice(instruction, indices, guard)
        if instruction.opcode is Opcode.IOTA:
            return Index(typed(instruction), indices[instruction.attributes_as(DimensionAttributes).dimension])
        if instruction.opcode is Opcode.CONSTANT:
            return self._load(instruction, instruction, indices, guard)
        operands = []
        for operand in self.operands(instruction):  # by no generator, which would be one more call of a deep chain
            operands.append(self.of(operand, indices if dims_of(operand) else (), guard))
        if instruction.opcode is Opcode.COMPARE:
            compare = instruction.attributes_as(CompareAttributes)
            floating = (element_type(instruction.operands[0]) or ElementType.PRED).is_float
            order = compare.order if floating else ComparisonOrder.PARTIAL
            return Apply(ElementType.PRED, Opcode.COMPARE, tuple(operands), compare.direction.value, order)
        return Apply(typed(instruction), instruction.opcode, tuple(operands))

    def _at_hand(self, instruction: Instruction, indices: Indices, guard: Guard) -> Expression | None:
        """A number that is everywhere the same, or what is loaded from memory."""
        buffer = self.buffers.get(instruction)
        literal = uniform_literal(instruction)
        if literal is not None or buffer is None:
            return literal
        return self._load(instruction, buffer, indices, guard)

    def _moved(self, instruction: Instruction, indices: Indices, guard: Guard) -> tuple[Instruction, Indices] | None:
        """Where ``instruction`` has its elements from, if it only moves those of one value; None for a reshape of what
        is in memory."""
        movement = movement_of(instruction)
        if movement is not None:
            return self.operands(instruction)[0], movement(instruction, indices)
        if instruction.opcode is Opcode.DYNAMIC_SLICE:
            array, *starts = self.operands(instruction)
            return array, shifted(indices, dims_of(array), dims_of(instruction), self.starts(starts))
        if instruction.opcode is Opcode.GATHER:
            array, *indexes = self.operands(instruction)
            start = functools.partial(self._index_of, indexes, guard)
            return array, gathered(instruction, indices, self.rank, start)
        if instruction.opcode is not Opcode.RESHAPE:
            return None
        (operand,) = self.operands(instruction)
        if operand in self.buffers and uniform_literal(operand) is None:
            return None
        operand_indices = reshape_indices(indices, dims_of(instruction), dims_of(operand), self.rank)
        if operand_indices is None:
            raise AssertionError(f"{operand.name} should have become a buffer")
        return operand, operand_indices

    def _load(self, instruction: Instruction, buffer: Instruction, indices: Indices, guard: Guard) -> Load:
        index = linear(indices, dims_of(instruction), self.rank)
        return Load(typed(instruction), buffer, index, None if index.is_constant else guard)

    def _choice(self, instruction: Instruction, indices: Indices, guard: Guard) -> Expression:
        *parts, last = self.choices.of(instruction, indices)
        value = self.of(last.operand, last.indices, self.choices.both(guard, last.inside))
        for part in reversed(parts):
            assert part.chosen is not None
            own = self.of(part.operand, part.indices, self.choices.both(guard, part.inside))
            value = Apply(typed(instruction), Opcode.SELECT, (part.chosen, own, value))
        return value

    def _index_of(
        self, indexes: Sequence[Instruction], guard: Guard, number: IndexNumber, place: Indices, limit: int
    ) -> int | Expression:
        positions = indexes[number.operand - 1]
        found = reshape_indices(place, number.dims, dims_of(positions), self.rank)
        if found is not None:
            return self._start(self.of(*self.part_at(positions, found), guard), limit, number.wrap)
        index = linear(place, number.dims, self.rank)
        load = Load(typed(positions), self.buffers[positions], index, None if index.is_constant else guard)
        return self._start(load, limit, number.wrap)

    def starts(self, instructions: Sequence[Instruction]) -> Callable[[int, int], int | Expression]:
        """The starts of a window, as ``shifted`` takes them."""
        return lambda d, limit: self._start(self.of(instructions[d], ()), limit)

    def _start(self, value: Expression, limit: int, wrap: int = 0) -> int | Expression:
        """``value`` clamped to [0, ``limit``], as HLO clamps starts; first raised by ``wrap`` where it is negative."""
        if isinstance(value, Literal):
            number = int(number_of(value))
            return min(max(number + wrap if number < 0 else number, 0), limit)
        found = self.clamped.get((value, limit, wrap))
        if found is None:
            s64, key = ElementType.S64, (value, limit, wrap)
            least, greatest = bounds_of(value)
            if wrap and least < 0:
                value = self._wrapped(value, wrap)
            if value.element_type is ElementType.U64:  # past the largest S64 there is no converting first
                value = Apply(ElementType.U64, Opcode.MINIMUM, (value, literal_of(limit, ElementType.U64)))
            found = value if value.element_type is s64 else Apply(s64, Opcode.CONVERT, (value,))
            if least < 0 or greatest > limit:
                found = Apply(s64, Opcode.CLAMP, (literal_of(0, s64), found, literal_of(limit, s64)))
            self.clamped[key] = found
        return found

    def _wrapped(self, value: Expression, wrap: int) -> Expression:
        """``value``, and where it is negative ``value + wrap``; in its own type."""
        kind = value.element_type
        found = self.wrapped.get((value, wrap))
        if found is None:
            direction = Comparison.LT.value
            negative = Apply(ElementType.PRED, Opcode.COMPARE, (value, literal_of(0, kind)), direction)
            raised = Apply(kind, Opcode.ADD, (value, literal_of(wrap, kind)))
            found = self.wrapped[value, wrap] = Apply(kind, Opcode.SELECT, (negative, raised, value))
        return found


def typed(instruction: Instruction) -> ElementType:
    found = element_type(instruction)
    if found is None:
        raise TypeError(f"{instruction.name} is a tuple, not an array")
    return found
