"""The instruction ``scan`` as instructions of the IR, which has none for it: a loop.
Part of the importer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flagos_backend.errors import MalformedProgram
from flagos_backend.ir.attributes import (
    CompareAttributes,
    DynamicSliceAttributes,
    WhileAttributes,
)
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape


def expand_scan(
    proto: Any, operands: Sequence[Instruction], body: Computation, shape: Shape, place: object
) -> Computation:
    """A computation of the scan's operands that returns its results.

    Operands: arrays, then one initial value for each carry. The body takes a slice of each array along the dimension,
    which it lacks, then the carries; it returns a slice of each output, then the carries. Raises MalformedProgram.
    """
    return _Scan(proto, operands, body, shape, place).loop()


class _Scan:
    def __init__(
        self, proto: Any, operands: Sequence[Instruction], body: Computation, shape: Shape, place: object
    ) -> None:
        self.place = place
        if len(proto.dimensions) != 1:
            raise self._malformed(f"it has {len(proto.dimensions)} dimensions, not one")
        self.dimension: int = proto.dimensions[0]
        self.reverse: bool = proto.is_reverse
        carries: int = proto.num_carries
        if not 0 <= carries <= len(operands):
            raise self._malformed(f"it has {carries} carries of {len(operands)} operands")
        if not isinstance(shape, TupleShape) or not carries <= len(shape.elements):
            raise self._malformed(f"it returns {shape}, not outputs and {carries} carries")
        self.operands, self.body, self.shape = tuple(operands), body, shape
        self.outputs = len(shape.elements) - carries
        self.inputs = len(operands) - carries
        self.carries = carries
        arrays = [operand.shape for operand in operands[: self.inputs]] + list(shape.elements[: self.outputs])
        self.size = self._size(arrays)
        taken = tuple(map(self._slice_of, arrays[: self.inputs])) + tuple(o.shape for o in operands[self.inputs :])
        made = tuple(map(self._slice_of, arrays[self.inputs :])) + tuple(shape.elements[self.outputs :])
        if taken[self.inputs :] != made[self.outputs :]:
            raise self._malformed("its initial values and its carries have different shapes")
        if tuple(parameter.shape for parameter in body.parameters) != taken or body.root.shape != TupleShape(made):
            expected = f"({', '.join(map(str, taken))}) -> {TupleShape(made)}"
            raise self._malformed(f"its computation is not {expected}")

    def _malformed(self, fact: str) -> MalformedProgram:
        return MalformedProgram(fact=fact, place=self.place)

    def _size(self, arrays: Sequence[Shape]) -> int:
        """How many steps there are: the size of each array along the dimension."""
        sizes = set()
        for array in arrays:
            if not isinstance(array, ArrayShape) or not 0 <= self.dimension < array.rank:
                raise self._malformed(f"{array} has no dimension {self.dimension}")
            sizes.add(array.dims[self.dimension])
        if len(sizes) != 1:
            raise self._malformed(f"its arrays have the sizes {sorted(sizes)} along dimension {self.dimension}")
        return sizes.pop()

    def _slice_of(self, shape: Shape) -> ArrayShape:
        assert isinstance(shape, ArrayShape)
        return ArrayShape(shape.element_type, shape.dims[: self.dimension] + shape.dims[self.dimension + 1 :])

    def loop(self) -> Computation:
        """A while loop over (index, inputs, outputs, carries), if it has a step."""
        builder = Builder("scan")
        operands = [builder.parameter(operand.shape) for operand in self.operands]
        empty = []
        for output in self.shape.elements[: self.outputs]:
            assert isinstance(output, ArrayShape)
            empty.append(builder.broadcast(builder.scalar(0, output.element_type), output.dims))
        inputs, carries = operands[: self.inputs], operands[self.inputs :]
        if self.size == 0:  # no slice to take, not even in a loop that does not run
            return builder.build(builder.tuple([*empty, *carries]))
        state = builder.tuple([builder.scalar(0, ElementType.S64), *inputs, *empty, *carries])
        called = [self._condition(state.shape), self._step(state.shape)]
        done = builder.add(Opcode.WHILE, [state], WhileAttributes(self.size), called=called)
        first = 1 + self.inputs
        elements = [builder.element(done, first + number) for number in range(len(self.shape.elements))]
        return builder.build(builder.tuple(elements))

    def _condition(self, state: Shape) -> Computation:
        builder = Builder("scan.condition")
        index = builder.element(builder.parameter(state), 0)
        size = builder.constant(np.int64(self.size))
        builder.add(Opcode.COMPARE, [index, size], CompareAttributes(Comparison.LT))
        return builder.build()

    def _step(self, state: Shape) -> Computation:
        assert isinstance(state, TupleShape)
        builder = Builder("scan.step")
        values = builder.parameter(state)
        index, *rest = [builder.element(values, number) for number in range(len(state.elements))]
        inputs, outputs = rest[: self.inputs], rest[self.inputs : self.inputs + self.outputs]
        carries = rest[self.inputs + self.outputs :]
        at = index
        if self.reverse:
            at = builder.add(Opcode.SUBTRACT, [builder.constant(np.int64(self.size - 1)), index])
        slices = [self._slice(builder, array, at) for array in inputs]
        call = builder.add(Opcode.CALL, [*slices, *carries], called=[self.body])
        made = [builder.element(call, number) for number in range(len(self.shape.elements))]
        written = [self._update(builder, o, s, at) for o, s in zip(outputs, made[: self.outputs], strict=True)]
        following = builder.add(Opcode.ADD, [index, builder.constant(np.int64(1))])
        return builder.build(builder.tuple([following, *inputs, *written, *made[self.outputs :]]))

    def _starts(self, builder: Builder, rank: int, at: Instruction) -> list[Instruction]:
        zero = builder.constant(np.int64(0))
        return [at if d == self.dimension else zero for d in range(rank)]

    def _slice(self, builder: Builder, array: Instruction, at: Instruction) -> Instruction:
        shape = array.shape
        assert isinstance(shape, ArrayShape)
        sizes = tuple(1 if d == self.dimension else size for d, size in enumerate(shape.dims))
        starts = self._starts(builder, shape.rank, at)
        block = builder.add(Opcode.DYNAMIC_SLICE, [array, *starts], DynamicSliceAttributes(sizes))
        return builder.reshape(block, self._slice_of(shape).dims)

    def _update(self, builder: Builder, array: Instruction, value: Instruction, at: Instruction) -> Instruction:
        shape = array.shape
        assert isinstance(shape, ArrayShape)
        sizes = tuple(1 if d == self.dimension else size for d, size in enumerate(shape.dims))
        starts = self._starts(builder, shape.rank, at)
        return builder.add(Opcode.DYNAMIC_UPDATE_SLICE, [array, builder.reshape(value, sizes), *starts])
