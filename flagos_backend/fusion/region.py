"""The loop-nest IR: one region is one kernel. Emitters (native tiles for the host CPU, Triton) read nothing else.

A region walks ``dims``; at each point it evaluates a DAG of scalar expressions, whose leaves are loads through affine
index maps. It then stores results, or folds the dimensions of ``folded`` with reductions and stores what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import ComparisonOrder, Opcode
from flagos_backend.ir.types import ElementType


@dataclass(frozen=True, slots=True)
class Affine:
    """``offset + sum(coefficients[d] * index[d])`` over the dimensions of the region."""

    offset: int
    coefficients: tuple[int, ...]

    def __add__(self, other: Affine) -> Affine:
        pairs = zip(self.coefficients, other.coefficients, strict=True)
        return Affine(self.offset + other.offset, tuple(a + b for a, b in pairs))

    def scaled(self, factor: int, shift: int = 0) -> Affine:
        """``factor * self + shift``."""
        return Affine(self.offset * factor + shift, tuple(c * factor for c in self.coefficients))

    @property
    def is_constant(self) -> bool:
        return not any(self.coefficients)


def axis(dimension: int, rank: int) -> Affine:
    """The index of one region dimension."""
    return Affine(0, tuple(int(d == dimension) for d in range(rank)))


def linear(indices: tuple[Affine, ...], dims: tuple[int, ...], rank: int) -> Affine:
    """The row-major element number in an array of ``dims`` at ``indices``."""
    position = Affine(0, (0,) * rank)
    stride = 1
    for index, size in zip(reversed(indices), reversed(dims), strict=True):
        position += index.scaled(stride)
        stride *= size
    return position


@dataclass(frozen=True, slots=True)
class Load:
    """Element ``index`` of the buffer that holds ``source``, an instruction outside the region."""

    element_type: ElementType
    source: Instruction
    index: Affine


@dataclass(frozen=True, slots=True)
class Literal:
    """``data``: the bytes of one element."""

    element_type: ElementType
    data: bytes


@dataclass(frozen=True, slots=True)
class Index:
    """An integer computed from the position, converted to ``element_type``."""

    element_type: ElementType
    value: Affine


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """``opcode`` on scalars. ``element_type`` is the result's; for a comparison ``detail`` is its direction.

    Compared by identity, because a DAG compared as a tree can take exponential time: whoever builds a region makes each
    distinct expression once.
    """

    element_type: ElementType
    opcode: Opcode
    operands: tuple[Expression, ...]
    detail: str = ""
    order: ComparisonOrder = ComparisonOrder.PARTIAL


Expression = Load | Literal | Index | Apply


@dataclass(frozen=True, slots=True)
class Store:
    """``value`` goes to element ``index`` of the buffer that holds ``target``."""

    target: Instruction
    value: Expression
    index: Affine


@dataclass(frozen=True, slots=True)
class Reduction:
    """``value`` folded with ``combine`` (add, multiply, maximum, minimum, and, or, xor) from scalar ``initial`` on.

    ``index`` has coefficient 0 in every folded dimension.
    """

    target: Instruction
    value: Expression
    combine: Opcode
    initial: Instruction
    index: Affine


@dataclass(frozen=True, slots=True)
class Region:
    """``folded``: the dimensions that the reductions fold; empty when there are only stores."""

    dims: tuple[int, ...]
    folded: tuple[int, ...] = ()
    stores: tuple[Store, ...] = ()
    reductions: tuple[Reduction, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.dims)

    def roots(self) -> Iterator[Expression]:
        for store in self.stores:
            yield store.value
        for reduction in self.reductions:
            yield reduction.value

    def expressions(self) -> list[Expression]:
        """Every distinct expression, operands first."""
        found: dict[Expression, None] = {}
        for root in self.roots():
            stack: list[tuple[Expression, bool]] = [(root, False)]
            while stack:
                expression, done = stack.pop()
                if expression in found:
                    continue
                if done or not isinstance(expression, Apply):
                    found[expression] = None
                    continue
                stack.append((expression, True))
                stack.extend((operand, False) for operand in reversed(expression.operands))
        return list(found)
