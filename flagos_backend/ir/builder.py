"""Builds computations instruction by instruction, with shapes inferred: for front ends, passes and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flagos_backend.errors import VerificationFailed
from flagos_backend.ir.attributes import (
    NONE,
    Attributes,
    ConstantAttributes,
    DimensionsAttributes,
    ParameterAttributes,
    TupleIndexAttributes,
)
from flagos_backend.ir.constants import element_type_of, scalar_bytes
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.inference import Operation, RuleBroken, infer_shape, signature_of
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape


class Builder:
    """One computation under construction. ``metadata`` of the builder marks every instruction added while it is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.metadata = ""
        self._instructions: list[Instruction] = []
        self._names: dict[str, int] = {}
        self._parameters = 0

    def add(
        self,
        opcode: Opcode,
        operands: Sequence[Instruction] = (),
        attributes: Attributes = NONE,
        *,
        shape: Shape | None = None,
        called: Sequence[Computation] = (),
        name: str = "",
    ) -> Instruction:
        """Appends an instruction. ``shape`` is needed where operands do not determine it: see SPEC.md's column.

        Raises VerificationFailed when the operands, attributes or ``shape`` break the opcode's rule.
        """
        operation = Operation(
            opcode,
            tuple(operand.shape for operand in operands),
            attributes,
            tuple(signature_of(computation) for computation in called),
            shape,
        )
        name = self._unique(name or opcode.value)
        try:
            inferred = infer_shape(operation)
        except RuleBroken as rule:
            shapes = ", ".join(map(str, operation.operands))
            raise VerificationFailed(rule=str(rule), place=f"%{name} = {shape or '?'} {opcode}({shapes})") from None
        instruction = Instruction(opcode, inferred, tuple(operands), attributes, tuple(called), name, self.metadata)
        if shape is not None and shape != inferred:
            raise VerificationFailed.at(instruction, rule=f"{opcode} of these operands does not make {shape}")
        self._instructions.append(instruction)
        return instruction

    def _unique(self, name: str) -> str:
        count = self._names[name] = self._names.get(name, 0) + 1
        return f"{name}.{count}"

    def parameter(self, shape: Shape, name: str = "parameter") -> Instruction:
        """The next parameter."""
        self._parameters += 1
        return self.add(Opcode.PARAMETER, (), ParameterAttributes(self._parameters - 1), shape=shape, name=name)

    def constant(self, value: np.ndarray[Any, Any] | np.generic) -> Instruction:
        """A constant of a native numpy type. Raises KeyError for any other."""
        array = np.asarray(value)
        shape = ArrayShape(element_type_of(array.dtype), array.shape)
        data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        return self.add(Opcode.CONSTANT, (), ConstantAttributes(data), shape=shape)

    def scalar(self, value: complex, element_type: ElementType) -> Instruction:
        """A scalar constant. Raises ValueError when ``element_type`` cannot hold ``value``."""
        data = scalar_bytes(value, element_type)
        return self.add(Opcode.CONSTANT, (), ConstantAttributes(data), shape=ArrayShape(element_type))

    def broadcast(self, operand: Instruction, dims: Sequence[int], dimensions: Sequence[int] = ()) -> Instruction:
        """``operand`` in an array of sizes ``dims``: its dimension i becomes ``dimensions[i]``."""
        if not isinstance(operand.shape, ArrayShape):
            raise TypeError(f"{operand!r} is no array")
        shape = ArrayShape(operand.shape.element_type, tuple(dims))
        return self.add(Opcode.BROADCAST, [operand], DimensionsAttributes(tuple(dimensions)), shape=shape)

    def reshape(self, operand: Instruction, dims: Sequence[int]) -> Instruction:
        if not isinstance(operand.shape, ArrayShape):
            raise TypeError(f"{operand!r} is no array")
        return self.add(Opcode.RESHAPE, [operand], shape=ArrayShape(operand.shape.element_type, tuple(dims)))

    def convert(self, operand: Instruction, element_type: ElementType) -> Instruction:
        if not isinstance(operand.shape, ArrayShape):
            raise TypeError(f"{operand!r} is no array")
        return self.add(Opcode.CONVERT, [operand], shape=ArrayShape(element_type, operand.shape.dims))

    def tuple(self, elements: Sequence[Instruction]) -> Instruction:
        return self.add(Opcode.TUPLE, elements)

    def element(self, operand: Instruction, index: int) -> Instruction:
        """One element of a tuple."""
        return self.add(Opcode.GET_TUPLE_ELEMENT, [operand], TupleIndexAttributes(index))

    def build(self, root: Instruction | None = None) -> Computation:
        """The computation; its root is the last instruction unless given. Raises ValueError when it is empty."""
        if not self._instructions:
            raise ValueError(f"computation {self.name!r} has no instruction")
        return Computation(self.name, tuple(self._instructions), root or self._instructions[-1])
