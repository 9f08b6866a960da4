"""The custom call ``flagos.strided_view``: an array that stands in memory with strides. Front ends emit it for
arguments that are no row-major arrays; fusion reads through it, kernels/reference/movement.py makes views of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from flagos_backend.errors import MalformedProgram
from flagos_backend.ir.attributes import CustomCallAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.config import is_size, parse_config
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape

TARGET = "flagos.strided_view"


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one, both included; 0 where there are none."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


@dataclass(frozen=True, slots=True)
class StridedView:
    """Element i of the result is element ``offset + sum(strides[d] * i[d])`` of a one-dimensional operand."""

    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, instruction: Instruction) -> Self | None:
        """None for any other instruction. Raises MalformedProgram for one that reaches outside of its operand."""
        attributes = instruction.attributes
        if not isinstance(attributes, CustomCallAttributes) or attributes.target != TARGET:
            return None
        try:
            config = parse_config(attributes.backend_config)
            view = cls(tuple(config.pop("strides")), config.pop("offset", 0))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _malformed(instruction, f"its backend config is not {{strides, offset}} ({error})") from error
        if config or not all(map(is_size, (*view.strides, view.offset))):
            raise _malformed(instruction, "its backend config is not {strides, offset} of natural numbers")
        view._check(instruction)
        return view

    def attributes(self) -> CustomCallAttributes:
        config = {"strides": list(self.strides), "offset": self.offset}
        return CustomCallAttributes(TARGET, json.dumps(config).encode())

    def _check(self, instruction: Instruction) -> None:
        shape = instruction.shape
        source = instruction.operands[0].shape if len(instruction.operands) == 1 else None
        if not isinstance(shape, ArrayShape) or not isinstance(source, ArrayShape) or source.rank != 1:
            raise _malformed(instruction, "it takes one array of one dimension and gives one array")
        if source.element_type is not shape.element_type or shape.rank != len(self.strides):
            raise _malformed(instruction, f"{source} with {len(self.strides)} strides makes no {shape}")
        if shape.num_elements and self.offset + span(shape.dims, self.strides) > source.num_elements:
            raise _malformed(instruction, f"it reaches beyond the {source.num_elements} elements of its operand")


def strided_view(builder: Builder, operand: Instruction, sizes: Sequence[int], view: StridedView) -> Instruction:
    """Emits the view of sizes ``sizes`` of a one-dimensional operand."""
    assert isinstance(operand.shape, ArrayShape)
    shape = ArrayShape(operand.shape.element_type, tuple(sizes))
    return builder.add(Opcode.CUSTOM_CALL, [operand], view.attributes(), shape=shape)


def _malformed(instruction: Instruction, fact: str) -> MalformedProgram:
    return MalformedProgram.at(instruction, fact=f"the custom call {TARGET} breaks its convention: {fact}")
