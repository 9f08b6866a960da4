"""Concatenates and pads as choices, point by point: which operand has an element, and where in it that is. For emitters
whose loads may have guards (Policy.chooses). Used by fuse.py and expressions.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from flagos_backend.fusion.recompute import CHEAP
from flagos_backend.ir.attributes import DimensionAttributes, PadAttributes
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.loop_ir.indexing import Indices, dims_of, movement_of, reshape_indices
from flagos_backend.loop_ir.literals import literal_of
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Shift
from flagos_backend.loop_ir.rewriting import Pool

# Of operations that are computed at all points of a choice, though only some need them.
MAX_LIGHT = 8
_CHOOSING = (Opcode.CONCATENATE, Opcode.PAD)

Operands = Callable[[Instruction], Sequence[Instruction]]


@dataclass(frozen=True, slots=True)
class Part:
    """Element ``indices`` of ``operand``, chosen where ``chosen`` holds and no part before it is; None: everywhere.
    Only where ``inside`` holds are the indices within the operand; None: wherever those of the whole are."""

    operand: Instruction
    indices: Indices
    chosen: Expression | None = None
    inside: Expression | None = None


class Choices:
    """Those of a region of ``dims``. ``operands``: the flat ones of an instruction. Makes each condition once."""

    def __init__(self, dims: tuple[int, ...], operands: Operands) -> None:
        self.dims, self.operands = dims, operands
        self._pool = Pool()

    def of(self, instruction: Instruction, indices: Indices) -> tuple[Part, ...]:
        """The parts of a concatenate or a pad, neither of them empty, that have elements at ``indices``."""
        if instruction.opcode is Opcode.PAD:
            return self._padded(instruction, indices)
        return self._concatenated(instruction, indices)

    def both(self, one: Expression | None, other: Expression | None) -> Expression | None:
        """Where both hold, of which None does everywhere."""
        if one is None or other is None or one is other:
            return other if one is None else one
        return self._apply(ElementType.PRED, Opcode.AND, one, other)

    # ---- Concatenates

    def _concatenated(self, instruction: Instruction, indices: Indices) -> tuple[Part, ...]:
        dimension = instruction.attributes_as(DimensionAttributes).dimension
        at = indices[dimension]
        lowest, highest = self._bounds(at, dims_of(instruction)[dimension])
        parts, first = [], 0
        for operand in self.operands(instruction):
            last = first + dims_of(operand)[dimension]
            if max(lowest, first) < min(highest + 1, last):
                there = tuple(i.scaled(1, -first) if d == dimension else i for d, i in enumerate(indices))
                from_first = self._compared(at, Comparison.GE, first) if lowest < first else None
                to_last = self._compared(at, Comparison.LT, last) if highest >= last else None
                parts.append(Part(operand, there, to_last, self.both(from_first, to_last)))
            first = last
        if len(parts) > 1 and common_source(instruction, self.operands) is not None:
            return (self._unified(parts),)
        return tuple(parts)

    def _unified(self, parts: Sequence[Part]) -> Part:
        """The one value that ``parts`` move elements of, at indices that are chosen instead of elements."""
        moved = [_moved(part.operand, part.indices, self.operands, len(self.dims)) for part in parts]
        source = moved[0][0]
        chosen = [part.chosen for part in parts]
        places = zip(*(indices for _, indices in moved), dims_of(source), strict=True)
        return Part(source, tuple(self._place(found, chosen, size) for *found, size in places))

    def _place(self, found: Sequence[Affine], chosen: Sequence[Expression | None], size: int) -> Affine:
        """The index among ``found`` that is chosen, in a dimension of ``size``."""
        first = found[0]
        if all(index == first for index in found):
            return first
        if all(replace(index, offset=first.offset) == first for index in found):
            least, most = min(i.offset for i in found), max(i.offset for i in found)
            offsets = [literal_of(index.offset - least, ElementType.S64) for index in found]
            return replace(first, offset=least) + self._start(self._chosen(offsets, chosen), most - least)
        values = [Index(ElementType.S64, index) for index in found]
        return self._start(self._chosen(values, chosen), size - 1)

    def _chosen(self, values: Sequence[Expression], chosen: Sequence[Expression | None]) -> Expression:
        *others, found = values
        for value, condition in zip(reversed(others), reversed(chosen[:-1]), strict=True):
            assert condition is not None
            if value is not found and value != found:
                found = self._apply(value.element_type, Opcode.SELECT, condition, value, found)
        return found

    # ---- Pads

    def _padded(self, instruction: Instruction, indices: Indices) -> tuple[Part, ...]:
        array, padding = self.operands(instruction)
        pad = instruction.attributes_as(PadAttributes)
        outside = (Part(padding, ()),)
        there = []
        inside: Expression | None = None
        sizes = zip(indices, dims_of(instruction), dims_of(array), pad.low, pad.interior, strict=True)
        for index, whole, size, low, interior in sizes:
            lowest, highest = self._bounds(index, whole)
            end = low + (size - 1) * (interior + 1) + 1
            if size == 0 or highest < low or lowest >= end:
                return outside
            if lowest < low:
                inside = self.both(inside, self._compared(index, Comparison.GE, low))
            if highest >= end:
                inside = self.both(inside, self._compared(index, Comparison.LT, end))
            found = self._spread(index.scaled(1, -low), interior + 1, size)
            if found is None:
                return outside
            place, held = found
            there.append(place)
            inside = self.both(inside, held)
        part = Part(array, tuple(there), inside, inside)
        return (part,) if inside is None else (part, *outside)

    def _spread(self, index: Affine, step: int, size: int) -> tuple[Affine, Expression | None] | None:
        """Which of ``size`` elements that stand ``step`` apart is at ``index``, and where one is. None: nowhere."""
        if step == 1:
            return index, None
        factors = (*index.coefficients, *(shift.factor for shift in index.shifts))
        if not any(factor % step for factor in factors):
            shifts = tuple(Shift(s.start, s.limit, s.factor // step) for s in index.shifts)
            exact = Affine(index.offset // step, tuple(c // step for c in index.coefficients), shifts)
            return None if index.offset % step else (exact, None)
        element_type = self._type_of(index, 0)
        value, divisor = Index(element_type, index), literal_of(step, element_type)
        rest = self._apply(element_type, Opcode.REMAINDER, value, divisor)
        held = self._apply(
            ElementType.PRED, Opcode.COMPARE, rest, literal_of(0, element_type), detail=Comparison.EQ.value
        )
        start = self._apply(element_type, Opcode.DIVIDE, value, divisor)
        if element_type is not ElementType.S64:
            start = self._apply(ElementType.S64, Opcode.CONVERT, start)
        return self._start(start, size - 1), held

    # ---- Indices

    def _start(self, start: Expression, limit: int) -> Affine:
        return Affine(0, (0,) * len(self.dims), (Shift(start, limit),))

    def _compared(self, index: Affine, comparison: Comparison, limit: int) -> Expression:
        limit -= index.offset
        element_type = self._type_of(index, limit)
        value = Index(element_type, replace(index, offset=0))
        return self._apply(
            ElementType.PRED, Opcode.COMPARE, value, literal_of(limit, element_type), detail=comparison.value
        )

    def _type_of(self, index: Affine, limit: int) -> ElementType:
        """What holds ``index`` and ``limit``."""
        most = max(abs(limit), *map(abs, self._reach(index)), *map(abs, self._reach(replace(index, offset=0))))
        return ElementType.S32 if most < 1 << 31 else ElementType.S64

    def _bounds(self, index: Affine, size: int) -> tuple[int, int]:
        """The least and the greatest value of ``index`` in a dimension of ``size`` where it lies in that."""
        lowest, highest = (min(max(found, 0), size - 1) for found in self._reach(index))
        return lowest, highest

    def _reach(self, index: Affine) -> tuple[int, int]:
        steps = [c * max(size - 1, 0) for c, size in zip(index.coefficients, self.dims, strict=True)]
        steps += [shift.factor * shift.limit for shift in index.shifts]
        return index.offset + sum(s for s in steps if s < 0), index.offset + sum(s for s in steps if s > 0)

    def _apply(self, element_type: ElementType, opcode: Opcode, *operands: Expression, detail: str = "") -> Expression:
        return self._pool.apply(Apply(element_type, opcode, (), detail), operands)


def common_source(concatenate: Instruction, operands: Operands) -> Instruction | None:
    """What all operands of ``concatenate`` that have elements do nothing but move elements of: as in a roll. None where
    there is no such, or one operand alone."""
    rank = len(dims_of(concatenate))
    origin = (Affine(0, (0,) * rank),) * rank
    sources = [_moved(o, origin, operands, rank)[0] for o in operands(concatenate) if 0 not in dims_of(o)]
    return sources[0] if len(sources) > 1 and all(a is b for a, b in pairwise(sources)) else None


def light_operations(
    value: Instruction, operands: Operands, stands: Callable[[Instruction], bool]
) -> list[Instruction] | None:
    """The few cheap operations that ``value`` is made of; None where it takes more, or others. ``stands``: whether a
    value that is no movement is loaded rather than computed."""
    found: list[Instruction] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        is_movement = value.opcode in (Opcode.RESHAPE, Opcode.DYNAMIC_SLICE) or movement_of(value) is not None
        if value.opcode is Opcode.IOTA or (not is_movement and stands(value)):
            continue
        if not is_movement:
            if len(found) == MAX_LIGHT or (value.opcode not in CHEAP and value.opcode not in _CHOOSING):
                return None
            found.append(value)
        waiting += operands(value)[:1] if value.opcode is Opcode.DYNAMIC_SLICE else operands(value)
    return found


def _moved(value: Instruction, indices: Indices, operands: Operands, rank: int) -> tuple[Instruction, Indices]:
    """What ``value`` moves elements of, and where in it the element at ``indices`` stands. ``rank``: of indices."""
    while value.opcode is Opcode.RESHAPE or movement_of(value) is not None:
        (operand,) = operands(value)
        movement = movement_of(value)
        found = (
            reshape_indices(indices, dims_of(value), dims_of(operand), rank)
            if movement is None
            else movement(value, indices)
        )
        if found is None:
            break
        value, indices = operand, found
    return value, indices
