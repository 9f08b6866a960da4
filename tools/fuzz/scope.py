"""One computation under random construction: the values so far, and operands of a wanted shape. Used by productions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from flagos_backend.ir.attributes import (
    NONE,
    Attributes,
    CompareAttributes,
    ConstantAttributes,
    DimensionAttributes,
)
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.constants import NUMPY_TYPES
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType, Shape
from tools.fuzz.tape import Tape

E = ElementType
Dims = tuple[int, ...]

MAX_ELEMENTS = 4096

FLOATS = (E.F32, E.F64, E.BF16, E.F16)
INTEGERS = (E.S32, E.U32, E.S8, E.U8, E.S64, E.U64, E.S16, E.U16)
COMPLEX = (E.C64, E.C128)
SMALL_INTEGERS = (E.S4, E.U4)
SMALL_FLOATS = (E.F8E4M3FN, E.F8E5M2, E.F8E4M3B11FNUZ, E.F8E4M3FNUZ, E.F8E5M2FNUZ, E.F8E4M3, E.F8E3M4)
ARITHMETIC = (*FLOATS, *INTEGERS, E.PRED, *COMPLEX)
# Weighted by repetition: what programs are made of comes up most.
COMMON = (E.F32, E.S32, E.F32, E.PRED, E.BF16, E.F64, E.F16, E.U32, *INTEGERS, *COMPLEX)
_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 0, 130)

NUMPY_DTYPE: dict[E, np.dtype[Any]] = {
    **NUMPY_TYPES,
    E.BF16: np.dtype(ml_dtypes.bfloat16),
    E.S4: np.dtype(ml_dtypes.int4),
    E.U4: np.dtype(ml_dtypes.uint4),
    E.F8E5M2: np.dtype(ml_dtypes.float8_e5m2),
    E.F8E4M3: np.dtype(ml_dtypes.float8_e4m3),
    E.F8E3M4: np.dtype(ml_dtypes.float8_e3m4),
    E.F8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
    E.F8E4M3B11FNUZ: np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    E.F8E4M3FNUZ: np.dtype(ml_dtypes.float8_e4m3fnuz),
    E.F8E5M2FNUZ: np.dtype(ml_dtypes.float8_e5m2fnuz),
}


def shape_of(value: Instruction) -> ArrayShape:
    """The shape of a value that is an array."""
    if not isinstance(value.shape, ArrayShape):
        raise TypeError(f"{value!r} is no array")
    return value.shape


def dims_of(value: Instruction) -> Dims:
    return shape_of(value).dims


def type_of(value: Instruction) -> ElementType:
    return shape_of(value).element_type


class Scope:
    """``values`` are the arrays that an operand may be; ``parent`` is None in the entry computation only."""

    def __init__(self, tape: Tape, name: str, parent: Scope | None = None) -> None:
        self.tape = tape
        self.builder = Builder(name)
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.values: list[Instruction] = []
        self.leaves: set[Instruction] = set()

    # ---- instructions ----

    def add(
        self,
        opcode: Opcode,
        operands: Sequence[Instruction] = (),
        attributes: Attributes = NONE,
        *,
        shape: Shape | None = None,
        called: Sequence[Computation] = (),
    ) -> Instruction:
        """A new instruction, which later ones may use where it is an array."""
        value = self.builder.add(opcode, operands, attributes, shape=shape, called=called)
        return self.keep(value) if isinstance(value.shape, ArrayShape) else value

    def keep(self, value: Instruction) -> Instruction:
        self.values.append(value)
        return value

    def constant(self, array: np.ndarray[Any, Any], element_type: ElementType) -> Instruction:
        data = np.ascontiguousarray(array).tobytes()
        return self.builder.add(
            Opcode.CONSTANT, (), ConstantAttributes(data), shape=ArrayShape(element_type, array.shape)
        )

    def scalar(self, value: complex, element_type: ElementType) -> Instruction:
        return self.constant(np.asarray(value).astype(NUMPY_DTYPE[element_type]), element_type)

    # ---- shapes ----

    def size(self) -> int:
        return self.tape.nearly_first(_SIZES)

    def dims(self, max_rank: int = 4, min_rank: int = 0, max_elements: int = MAX_ELEMENTS) -> Dims:
        rank = min_rank + self.tape.below(max_rank + 1 - min_rank)
        dims: list[int] = []
        for _ in range(rank):
            size = self.size()
            dims.append(size if prod(dims) * size <= max_elements else 1)
        return tuple(dims)

    def element_type(self, allowed: Sequence[ElementType] = COMMON) -> ElementType:
        return self.tape.nearly_first(allowed)

    # ---- operands ----

    def find(self, accepts: Callable[[ArrayShape], bool]) -> Instruction | None:
        """A value so far, the latest ones more often."""
        found = [value for value in reversed(self.values) if accepts(shape_of(value))]
        return self.tape.nearly_first(found) if found else None

    def operand(
        self,
        allowed: Sequence[ElementType] = COMMON,
        accepts: Callable[[Dims], bool] = lambda dims: True,
        fresh: Callable[[], Dims] | None = None,
    ) -> Instruction:
        """Any value of one of the types and of accepted dims; if there is none, a new leaf of dims from ``fresh``."""
        if not self.tape.chance(6):
            value = self.find(lambda shape: shape.element_type in allowed and accepts(shape.dims))
            if value is not None:
                return value
        return self.leaf(ArrayShape(self.element_type(allowed), self.dims() if fresh is None else fresh()))

    def like(self, shape: ArrayShape) -> Instruction:
        """A value of exactly this shape: one so far, one converted or broadcast to it, or a new leaf."""
        choice = self.tape.below(8)
        if choice <= 4:
            value = self.find(lambda found: found == shape)
            if value is not None:
                return value
        if choice == 5:
            value = self.find(lambda found: found.dims == shape.dims and _converts(found.element_type, shape))
            if value is not None:
                return self.builder.convert(value, shape.element_type)
        if choice >= 6:
            value = self.find(lambda found: found.element_type is shape.element_type and not found.dims)
            if value is not None:
                return self.builder.broadcast(value, shape.dims)
        return self.leaf(shape)

    def leaf(self, shape: ArrayShape) -> Instruction:
        """A parameter, which only the entry computation has, or a constant of any contents."""
        if self.parent is None and not self.tape.chance(4):
            value = self.builder.parameter(shape)
        elif (
            self.tape.chance(3) and shape.dims and shape.element_type in ARITHMETIC and shape.element_type is not E.PRED
        ):
            dimension = DimensionAttributes(self.tape.below(shape.rank))
            value = self.builder.add(Opcode.IOTA, (), dimension, shape=shape)
        else:
            scalar = self.scalar(self.number(shape.element_type), shape.element_type)
            value = self.builder.broadcast(scalar, shape.dims) if shape.dims else scalar
        self.leaves.add(value)
        return self.keep(value)

    def number(self, element_type: ElementType) -> complex:
        """A constant that the type holds."""
        if element_type is E.PRED:
            return self.tape.below(2)
        if element_type.is_unsigned:
            return self.tape.pick((0, 1, 2, 3, 7, 13))
        if element_type.is_integer:
            return self.tape.pick((0, 1, -1, 2, 3, -3, 7, -8))
        return self.tape.pick((0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 3.0, 0.25, 1.5))

    def index(self, limit: int) -> Instruction:
        """A scalar integer that is mostly in [0, limit): a start or a branch number."""
        kind = self.tape.pick((E.S32, E.S64, E.U32, E.S8, E.U8))
        value = self.find(lambda shape: shape.element_type is kind and not shape.dims)
        if value is not None and self.tape.below(2):
            return value
        return self.scalar(self.tape.below(min(limit + 2, 100)), kind)

    # ---- the end ----

    def unused(self) -> list[Instruction]:
        """Values that nobody took as an operand, leaves aside."""
        used = {operand for instruction in self.builder.build().instructions for operand in instruction.operands}
        return [v for v in self.values if v not in used and v not in self.leaves]


def canonical(scope: Scope, value: Instruction) -> Instruction:
    """``value`` with zeros where it is not finite, and no negative ones: the sign of a NaN or of a zero sum, which a
    total order sees, is nobody's promise."""
    shape = shape_of(value)
    if not shape.element_type.is_float:
        return value
    zero = scope.builder.broadcast(scope.scalar(0, shape.element_type), shape.dims)
    nonzero = scope.builder.add(Opcode.COMPARE, [value, zero], CompareAttributes(Comparison.NE))
    kept = scope.builder.add(Opcode.AND, [scope.builder.add(Opcode.IS_FINITE, [value]), nonzero])
    return scope.builder.add(Opcode.SELECT, [kept, value, zero])


def _converts(source: ElementType, shape: ArrayShape) -> bool:
    return (
        source in ARITHMETIC
        and shape.element_type in ARITHMETIC
        and (shape.element_type.is_complex or not source.is_complex)
    )
