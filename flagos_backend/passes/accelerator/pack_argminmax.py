"""Argmin and argmax, as argmax is written, become ordinary reductions, which accelerators fuse with all around them.

A value of up to 32 bits goes with its position into one integer, whose least one is what is looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flagos_backend.ir.attributes import (
    NONE,
    Attributes,
    CompareAttributes,
    ConstantAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    TupleIndexAttributes,
)
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.constants import scalar_bytes
from flagos_backend.ir.hlo import Computation, Instruction, Module
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.literals import identity_of
from flagos_backend.passes.argminmax import ArgMinMax, argminmax_of
from flagos_backend.passes.rewrite import Emitter, apply_rule, array_shape

E = ElementType
O = Opcode  # noqa: E741

_LEAST = -(1 << 31)
# The bits of infinity, at the upper end of 32. What is greater, but for the sign, is a NaN.
_INFINITY = {E.F16: 0x7C00 << 16, E.BF16: 0x7F80 << 16, E.F32: 0x7F800000}


def pack_argminmax(module: Module) -> Module:
    return apply_rule(module, _rule)


def _rule(instruction: Instruction, emitter: Emitter) -> Instruction | None:
    if instruction.opcode is O.GET_TUPLE_ELEMENT and instruction.operands[0].opcode is O.TUPLE:
        return instruction.operands[0].operands[instruction.attributes_as(TupleIndexAttributes).index]
    argminmax = argminmax_of(instruction)
    if argminmax is None:
        return None
    search = _Search(argminmax, instruction, emitter)
    value = search.value()
    position = search.packed_position() if argminmax.source.bits <= 32 else search.position_of(value)
    return emitter.emit(O.TUPLE, instruction.shape, (value, position), like=instruction)


@dataclass(frozen=True, slots=True)
class _Search:
    """What takes the place of ``reduce`` goes to ``emitter``."""

    argminmax: ArgMinMax
    reduce: Instruction
    emitter: Emitter

    @property
    def _array(self) -> Instruction:
        return self.reduce.operands[0]

    def value(self) -> Instruction:
        return self._reduction(self._array, O.MAXIMUM if self.argminmax.greatest else O.MINIMUM)

    def packed_position(self) -> Instruction:
        """Of the value only its order matters, in the upper bits: those of 0.0 and -0.0 are equal, and those of every
        NaN. The position is below, where there is room, or a second half, so that the first of equals is the least."""
        order, free = self._order(), 32 - min(self.argminmax.source.bits, 32)
        if self.argminmax.size <= 1 << free:
            least = self._reduction(self._emit(O.OR, [order, self._positions(E.S32)]), O.MINIMUM)
            return self._convert(self._emit(O.AND, [least, self._number((1 << free) - 1, least)]), self.argminmax.index)
        upper = self._convert(order, E.S64)
        upper = self._emit(O.SHIFT_LEFT, [upper, self._number(32, upper)])
        # Of an unsigned integer there is no sign to extend.
        key = self._emit(O.OR, [upper, self._convert(self._positions(E.U32), E.S64)])
        return self._convert(self._convert(self._reduction(key, O.MINIMUM), E.U32), self.argminmax.index)

    def position_of(self, value: Instruction) -> Instruction:
        """The first position of ``value``, which is the minimum or maximum, or of a NaN: another reduction that waits
        for it."""
        along = self.argminmax.dimension
        dims = array_shape(self._array).dims
        kept = DimensionsAttributes(tuple(d for d in range(len(dims)) if d != along))
        shape = ArrayShape(self.argminmax.source, dims)
        spread = self.emitter.emit(O.BROADCAST, shape, (value,), kept, like=self.reduce)
        found = self._compare(Comparison.EQ, self._array, spread)
        if self.argminmax.source.is_float:
            found = self._emit(O.OR, [found, self._compare(Comparison.NE, self._array, self._array)])
        positions = self._positions(E.S32)
        chosen = self._emit(O.SELECT, [found, positions, self._number((1 << 31) - 1, positions)], E.S32)
        return self._convert(self._reduction(chosen, O.MINIMUM), self.argminmax.index)

    def _order(self) -> Instruction:
        """32-bit integers, the less the sooner a value is taken; of narrow ones the lower bits are zeros."""
        source, greatest = self.argminmax.source, self.argminmax.greatest
        free = 32 - source.bits
        if not source.is_float:
            bits = self._upper(self._array)
            mask = -(1 << free) if greatest else 0
            mask ^= 0 if source.is_signed else _LEAST
            return self._emit(O.XOR, [bits, self._number(mask, bits)]) if mask else bits
        bits = self._upper(self._emit(O.BITCAST_CONVERT, [self._array], E.S32 if source is E.F32 else E.U16))
        # From sign and size to two's complement, with the other sign where the greatest is looked for.
        sign = self._emit(O.SHIFT_RIGHT_ARITHMETIC, [bits, self._number(31, bits)])
        size = self._emit(O.AND, [bits, self._number((1 << 31) - 1, bits)])
        flipped = self._emit(O.XOR, [size, sign])
        order = self._emit(O.SUBTRACT, [sign, flipped] if greatest else [flipped, sign])
        # NaNs are at both ends: what is beyond the upper one comes round to the lower one, and all of them are equal.
        beyond = _INFINITY[source] + (1 << free)
        order = self._emit(O.ADD, [order, self._number(-_LEAST - beyond, order)])
        return self._emit(O.MAXIMUM, [order, self._number(-_LEAST - 2 * beyond, order)])

    def _upper(self, value: Instruction) -> Instruction:
        """The bits of ``value`` in the upper ones of 32."""
        kind = array_shape(value).element_type
        if kind is E.U32:
            return self._emit(O.BITCAST_CONVERT, [value], E.S32)
        wide = self._convert(value, E.S32)
        return wide if kind.bits == 32 else self._emit(O.SHIFT_LEFT, [wide, self._number(32 - kind.bits, wide)])

    def _positions(self, kind: ElementType) -> Instruction:
        shape = ArrayShape(kind, array_shape(self._array).dims)
        return self.emitter.emit(O.IOTA, shape, (), DimensionAttributes(self.argminmax.dimension), like=self.reduce)

    def _reduction(self, values: Instruction, combine: Opcode) -> Instruction:
        kind, dims = array_shape(values).element_type, array_shape(values).dims
        along = self.argminmax.dimension
        data = ConstantAttributes(scalar_bytes(identity_of(combine, kind), kind))
        initial = self.emitter.emit(O.CONSTANT, ArrayShape(kind), (), data, like=self.reduce)
        shape = ArrayShape(kind, (*dims[:along], *dims[along + 1 :]))
        attributes, called = DimensionsAttributes((along,)), (_combiner(combine, kind),)
        return self.emitter.emit(O.REDUCE, shape, (values, initial), attributes, called, like=self.reduce)

    def _emit(
        self,
        opcode: Opcode,
        operands: Sequence[Instruction],
        kind: ElementType | None = None,
        attributes: Attributes = NONE,
    ) -> Instruction:
        """``kind``: of the result, if it is not that of the operands."""
        shape = array_shape(operands[0])
        shape = shape if kind is None else ArrayShape(kind, shape.dims)
        return self.emitter.emit(opcode, shape, operands, attributes, like=self.reduce)

    def _convert(self, value: Instruction, kind: ElementType) -> Instruction:
        return value if array_shape(value).element_type is kind else self._emit(O.CONVERT, [value], kind)

    def _compare(self, direction: Comparison, a: Instruction, b: Instruction) -> Instruction:
        return self._emit(O.COMPARE, [a, b], E.PRED, CompareAttributes(direction))

    def _number(self, number: int, like: Instruction) -> Instruction:
        """``number`` wherever ``like`` has an element."""
        shape = array_shape(like)
        data = ConstantAttributes(scalar_bytes(number, shape.element_type))
        scalar = self.emitter.emit(O.CONSTANT, ArrayShape(shape.element_type), (), data, like=self.reduce)
        return self.emitter.emit(O.BROADCAST, shape, (scalar,), DimensionsAttributes(()), like=self.reduce)


def _combiner(opcode: Opcode, kind: ElementType) -> Computation:
    builder = Builder(f"{opcode.value}_{kind.name.lower()}")
    a, b = (builder.parameter(ArrayShape(kind)) for _ in range(2))
    return builder.build(builder.add(opcode, [a, b]))
