"""The loop-nest IR: one region is one kernel. Emitters (native tiles for the host CPU, Triton) read nothing else.

A region walks ``dims``; at each point it evaluates a DAG of scalar expressions, whose leaves are loads through affine
index maps, and stores results. A reduction reduces some dimensions, and its value may be used again at each point.
Where an array starts may be known at run time only: a shift of the index, the same everywhere or, as in a gather, not.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import ComparisonOrder, Opcode
from flagos_backend.ir.types import ElementType


@dataclass(frozen=True, slots=True)
class Shift:
    """``factor * start``. ``start``: an S64 or S32 of no reduction that lies in [0, ``limit``], or where the guard of a
    load fails anywhere near. It may differ between points."""

    start: Expression
    limit: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Affine:
    """``offset + sum(coefficients[d] * index[d])`` over the dimensions of the region, and ``shifts``.

    Only where Policy.runtime_starts or Policy.reads_gather allows it are there shifts.
    """

    offset: int
    coefficients: tuple[int, ...]
    shifts: tuple[Shift, ...] = ()

    def __add__(self, other: Affine) -> Affine:
        pairs = zip(self.coefficients, other.coefficients, strict=True)
        return Affine(self.offset + other.offset, tuple(a + b for a, b in pairs), self.shifts + other.shifts)

    def scaled(self, factor: int, shift: int = 0) -> Affine:
        """``factor * self + shift``."""
        shifts = tuple(Shift(s.start, s.limit, s.factor * factor) for s in self.shifts)
        return Affine(self.offset * factor + shift, tuple(c * factor for c in self.coefficients), shifts)

    @property
    def dims(self) -> frozenset[int]:
        """The dimensions that it steps along, whatever the shifts do."""
        return frozenset(d for d, coefficient in enumerate(self.coefficients) if coefficient)

    @property
    def starts(self) -> tuple[Expression, ...]:
        return tuple(shift.start for shift in self.shifts)

    @property
    def is_constant(self) -> bool:
        return not any(self.coefficients) and not self.shifts


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
    """Element ``index`` of the buffer that holds ``source``, an instruction outside the region.

    Where ``guard``, a PRED of no reduction, fails, nothing is loaded: ``index`` may lie outside, and nobody needs the
    value. Only where Policy.chooses allows it are there guards.
    """

    element_type: ElementType
    source: Instruction
    index: Affine
    guard: Expression | None = None

    @property
    def operands(self) -> tuple[Expression, ...]:
        return self.index.starts if self.guard is None else (*self.index.starts, self.guard)


@dataclass(frozen=True, slots=True)
class Literal:
    """``data``: the bytes of one element."""

    element_type: ElementType
    data: bytes

    @property
    def operands(self) -> tuple[Expression, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Index:
    """An integer computed from the position, converted to ``element_type``."""

    element_type: ElementType
    value: Affine

    @property
    def operands(self) -> tuple[Expression, ...]:
        return self.value.starts


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """``opcode`` on scalars. ``element_type`` is the result's; for a comparison ``detail`` is its direction.

    Compared by identity, because a DAG compared (or printed) as a tree can take exponential time: whoever builds a
    region makes each distinct expression once.
    """

    element_type: ElementType
    opcode: Opcode
    operands: tuple[Expression, ...] = field(repr=False)
    detail: str = ""
    order: ComparisonOrder = ComparisonOrder.PARTIAL


@dataclass(frozen=True, slots=True, eq=False)
class Reduce:
    """``value`` reduced over ``dims`` of the region with ``combine`` (add, multiply, maximum, minimum, and, or, xor).

    It begins with ``initial``, the same at every point, and does not depend on ``dims``. Compared by identity.
    """

    element_type: ElementType
    combine: Opcode
    value: Expression = field(repr=False)
    initial: Expression = field(repr=False)
    dims: tuple[int, ...]

    @property
    def operands(self) -> tuple[Expression, ...]:
        return self.value, self.initial


Expression = Load | Literal | Index | Apply | Reduce


@dataclass(frozen=True, slots=True)
class Store:
    """``value`` goes to element ``index`` of the buffer that holds ``target``.

    ``index`` has coefficient 0 in a dimension of size over 1 only where ``value`` does not depend on that dimension.
    """

    target: Instruction
    value: Expression
    index: Affine


@dataclass(frozen=True)
class Region:
    dims: tuple[int, ...]
    stores: tuple[Store, ...]

    @property
    def rank(self) -> int:
        return len(self.dims)

    @functools.cached_property
    def reductions(self) -> tuple[Reduce, ...]:
        """Every distinct reduction, those that others need first."""
        return tuple(e for e in self.expressions() if isinstance(e, Reduce))

    @property
    def reduced(self) -> tuple[int, ...]:
        """The dimensions that some reduction reduces, in order."""
        return tuple(sorted({d for reduction in self.reductions for d in reduction.dims}))

    def roots(self) -> Iterator[Expression]:
        for store in self.stores:
            yield store.value
            yield from store.index.starts

    def expressions(self) -> tuple[Expression, ...]:
        """Every distinct expression, operands first."""
        return self._expressions

    @functools.cached_property
    def reach(self) -> dict[Expression, frozenset[int]]:
        """The dimensions that each expression varies along."""
        found: dict[Expression, frozenset[int]] = {}
        for expression in self.expressions():
            varying = frozenset[int]().union(*(found[operand] for operand in expression.operands))
            if isinstance(expression, Load | Index):
                varying |= (expression.index if isinstance(expression, Load) else expression.value).dims
            elif isinstance(expression, Reduce):
                varying -= frozenset(expression.dims)
            found[expression] = varying
        return found

    @functools.cached_property
    def uses(self) -> Counter[Expression]:
        """How often each expression is an operand of others, or a root."""
        uses = Counter(operand for expression in self.expressions() for operand in expression.operands)
        uses.update(self.roots())
        return uses

    def along(self, index: Affine) -> frozenset[int]:
        """The dimensions that the place at ``index`` varies along."""
        return index.dims.union(*(self.reach[start] for start in index.starts))

    @functools.cached_property
    def _expressions(self) -> tuple[Expression, ...]:
        return tuple(below(self.roots()))


def below(roots: Iterable[Expression], stop: Container[Expression] = ()) -> list[Expression]:
    """The distinct expressions that ``roots`` are made of, themselves included, operands first.

    What expressions in ``stop`` are made of is left out.
    """
    found: dict[Expression, None] = {}
    for root in roots:
        stack: list[tuple[Expression, bool]] = [(root, False)]
        while stack:
            expression, done = stack.pop()
            if expression in found:
                continue
            if done or not expression.operands or expression in stop:
                found[expression] = None
                continue
            stack.append((expression, True))
            stack.extend((operand, False) for operand in reversed(expression.operands))
    return list(found)
