"""What the shape rules share: the operation they judge, their error, and small checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from flagos_backend.ir.attributes import Attributes
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape, TupleShape

A = TypeVar("A")


class RuleBroken(Exception):
    """The message is the rule, with the numbers that break it. The verifier adds the place."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What a caller sees of a computation."""

    parameters: tuple[Shape, ...]
    result: Shape


@dataclass(frozen=True, slots=True)
class Operation:
    """An instruction reduced to what its shape depends on. ``declared`` is the shape it claims, None when it asks."""

    opcode: Opcode
    operands: tuple[Shape, ...]
    attributes: Attributes
    called: tuple[Signature, ...] = ()
    declared: Shape | None = None

    def attributes_as(self, kind: type[A]) -> A:
        if not isinstance(self.attributes, kind):
            broken(f"{self.opcode} carries {kind.__name__}, not {type(self.attributes).__name__}")
        return self.attributes

    def array(self, index: int) -> ArrayShape:
        """The shape of an operand that must be an array."""
        if index >= len(self.operands):
            broken(f"{self.opcode} takes at least {index + 1} operands, got {len(self.operands)}")
        shape = self.operands[index]
        if not isinstance(shape, ArrayShape) or shape.element_type is ElementType.TOKEN:
            broken(f"operand {index} must be an array, not {shape}")
        return shape

    def arrays(self) -> tuple[ArrayShape, ...]:
        return tuple(self.array(index) for index in range(len(self.operands)))

    def declared_array(self) -> ArrayShape:
        """The declared shape, for opcodes whose operands do not determine it."""
        if not isinstance(self.declared, ArrayShape) or self.declared.element_type is ElementType.TOKEN:
            broken(f"{self.opcode} needs a declared array shape, not {self.declared}")
        return self.declared

    def expect_operands(self, count: int) -> None:
        if len(self.operands) != count:
            broken(f"{self.opcode} takes {count} operands, got {len(self.operands)}")


# The shape that the instruction must have; raises RuleBroken.
Rule = Callable[[Operation], Shape]


def broken(rule: str) -> NoReturn:
    raise RuleBroken(rule)


def scalar(element_type: ElementType) -> ArrayShape:
    return ArrayShape(element_type)


def as_result(shapes: Sequence[Shape]) -> Shape:
    """The result of an operation with several: a tuple, unless there is only one."""
    return shapes[0] if len(shapes) == 1 else TupleShape(tuple(shapes))


def expect_scalar(shape: Shape, what: str) -> ElementType:
    if not isinstance(shape, ArrayShape) or shape.dims or shape.element_type is ElementType.TOKEN:
        broken(f"{what} must be a scalar, not {shape}")
    return shape.element_type


def expect_same_dims(shapes: Sequence[ArrayShape]) -> None:
    for shape in shapes[1:]:
        if shape.dims != shapes[0].dims:
            broken(f"operands must have equal dimensions, got {', '.join(map(str, shapes))}")


def expect_distinct(dims: Sequence[int], rank: int, what: str, *, increasing: bool = False) -> None:
    """Dimension numbers: in range, none twice, and sorted where the operation needs it."""
    for dimension in dims:
        if not 0 <= dimension < rank:
            broken(f"{what} {list(dims)} must lie in [0, {rank})")
    if len(set(dims)) != len(dims):
        broken(f"{what} {list(dims)} must be distinct")
    if increasing and list(dims) != sorted(dims):
        broken(f"{what} {list(dims)} must be increasing")


def expect_combiner(signature: Signature, types: Sequence[ElementType], what: str) -> tuple[ElementType, ...]:
    """A function of 2n scalars (n accumulated, n new) to n scalars; the element types of its results.

    Its types may be wider than ``types``: XLA reduces bf16 in f32 that way.
    """
    if len(signature.parameters) != 2 * len(types):
        broken(f"{what} must take {2 * len(types)} parameters, takes {len(signature.parameters)}")
    for parameter in signature.parameters:
        expect_scalar(parameter, f"a parameter of {what}")
    results = signature.result.elements if isinstance(signature.result, TupleShape) else (signature.result,)
    if len(results) != len(types) or (isinstance(signature.result, TupleShape) and len(types) == 1):
        broken(f"{what} must return {len(types)} scalars, returns {signature.result}")
    found = tuple(expect_scalar(result, f"a result of {what}") for result in results)
    accumulated = tuple(expect_scalar(parameter, what) for parameter in signature.parameters[: len(types)])
    if found != accumulated:
        broken(f"{what} must return the types that it accumulates, returns {signature.result}")
    for given, parameter in zip(types, signature.parameters[len(types) :], strict=True):
        taken = expect_scalar(parameter, what)
        if taken is not given and not (taken.is_float and given.is_float):
            broken(f"{what} takes {parameter}, the operand has {given.name.lower()}")
    return found
