"""A ragged dot as a loop over windows of rows: which rows a window has and whose they are, and the product of one.

Used by expand_ragged_dots.py, which chooses the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flagos_backend.ir.attributes import (
    CompareAttributes,
    DimensionAttributes,
    DimensionsAttributes,
    DotAttributes,
    DynamicSliceAttributes,
    WhileAttributes,
)
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.constants import NUMPY_TYPES
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.ragged_dots import RaggedDot, Role
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.passes.rewrite import array_shape, sum_of

E = ElementType
# A count of rows below it fits S32, however many groups claim all of them.
_FITS = 1 << 31


@dataclass(frozen=True, slots=True)
class Windows:
    """``count`` windows of ``rows`` each. Those of all rows are one for each group; a mask tells whose row is whose.
    ``unrolled``: written one after another, which windows of all rows may be."""

    rows: int
    count: int
    unrolled: bool = False


@dataclass(frozen=True, slots=True)
class _Tables:
    """For each window, along the last dimension: its group (None: its number), and the rows of that group in it, from
    ``lower`` to below ``upper``. Before it the dimensions that have groups of their own."""

    group: Instruction | None
    lower: Instruction
    upper: Instruction


def expansion(ragged: RaggedDot, windows: Windows) -> Computation:
    """A computation of the three operands of a ragged dot that computes it."""
    builder = Builder("ragged_dot")
    lhs, rhs, sizes = (builder.parameter(shape) for shape in (ragged.lhs, ragged.rhs, ragged.sizes))
    if not ragged.groups or not ragged.result.num_elements or not ragged.length:
        return builder.build(_zeros(builder, ragged.result))
    writer = _Writer(ragged, windows)
    if ragged.role is Role.BATCH:
        return builder.build(writer.batch(builder, lhs, rhs, sizes))
    tables = writer.tables(builder, sizes)
    if windows.unrolled:
        return builder.build(writer.unrolled(builder, lhs, rhs, tables))
    return builder.build(writer.loop(builder, lhs, rhs, tables))


class _Writer:
    def __init__(self, ragged: RaggedDot, windows: Windows) -> None:
        self.ragged, self.windows = ragged, windows
        self.is_whole = windows.rows == ragged.length
        most = ragged.groups * (ragged.length + windows.rows)
        self.index_type = E.S32 if most < _FITS else E.S64
        # What several windows add up is rounded to the result's type once.
        self.adds = ragged.role is Role.CONTRACTING and not self.is_whole
        made = ragged.result.element_type
        self.element_type = E.F32 if self.adds and made.is_float and made.bits < E.F32.bits else made

    # ---- Which rows are whose ----

    def bounds(self, builder: Builder, sizes: Instruction) -> tuple[Instruction, Instruction]:
        """[prefix..., groups]: where groups begin and end, never beyond the dimension."""
        dims = self.ragged.sizes.dims
        wide = builder.convert(sizes, E.S64)
        zero, length = (builder.scalar(number, E.S64) for number in (0, self.ragged.length))
        rows = builder.convert(builder.add(Opcode.CLAMP, [zero, wide, length]), self.index_type)
        ends = self.running_sums(builder, rows)
        most = builder.broadcast(builder.scalar(self.ragged.length, self.index_type), dims)
        begins = builder.add(Opcode.SUBTRACT, [ends, rows])
        return builder.add(Opcode.MINIMUM, [begins, most]), builder.add(Opcode.MINIMUM, [ends, most])

    def running_sums(self, builder: Builder, numbers: Instruction) -> Instruction:
        """Along the last dimension, each with itself."""
        dims = array_shape(numbers).dims
        square = (*dims, dims[-1])
        spread = builder.broadcast(numbers, square, (*range(len(dims) - 1), len(dims)))
        to, of = (self.iota(builder, square, axis) for axis in (len(dims) - 1, len(dims)))
        counts = builder.add(Opcode.COMPARE, [of, to], CompareAttributes(Comparison.LE))
        return self.sum_last(builder, builder.add(Opcode.SELECT, [counts, spread, _zeros_like(builder, spread)]))

    def sum_last(self, builder: Builder, numbers: Instruction) -> Instruction:
        shape = array_shape(numbers)
        return builder.add(
            Opcode.REDUCE,
            [numbers, builder.scalar(0, shape.element_type)],
            DimensionsAttributes((shape.rank - 1,)),
            called=[sum_of(shape.element_type)],
        )

    def iota(self, builder: Builder, dims: Sequence[int], axis: int) -> Instruction:
        shape = ArrayShape(self.index_type, tuple(dims))
        return builder.add(Opcode.IOTA, (), DimensionAttributes(axis), shape=shape)

    def tables(self, builder: Builder, sizes: Instruction) -> _Tables:
        lower, upper = self.bounds(builder, sizes)
        if self.is_whole:
            return _Tables(None, lower, upper)
        groups = self.ragged.groups

        def everywhere(number: int) -> Instruction:
            return builder.broadcast(builder.scalar(number, self.index_type), (groups,))

        rows = builder.add(Opcode.SUBTRACT, [upper, lower])
        filled = builder.add(Opcode.ADD, [rows, everywhere(self.windows.rows - 1)])
        counts = builder.add(Opcode.DIVIDE, [filled, everywhere(self.windows.rows)])
        last = self.running_sums(builder, counts)
        first = builder.add(Opcode.SUBTRACT, [last, counts])
        # [windows, groups]: a window belongs to one group, or to none.
        dims = (self.windows.count, groups)
        window, group = (self.iota(builder, dims, axis) for axis in (0, 1))
        at_first, at_last, at_lower, at_upper = (
            builder.broadcast(numbers, dims, (1,)) for numbers in (first, last, lower, upper)
        )
        begun = builder.add(Opcode.COMPARE, [window, at_first], CompareAttributes(Comparison.GE))
        going_on = builder.add(Opcode.COMPARE, [window, at_last], CompareAttributes(Comparison.LT))
        is_member = builder.add(Opcode.AND, [begun, going_on])
        size = builder.broadcast(builder.scalar(self.windows.rows, self.index_type), dims)
        number = builder.add(Opcode.SUBTRACT, [window, at_first])
        begin = builder.add(Opcode.ADD, [at_lower, builder.add(Opcode.MULTIPLY, [number, size])])
        end = builder.add(Opcode.MINIMUM, [at_upper, builder.add(Opcode.ADD, [begin, size])])
        none = _zeros_like(builder, window)
        found = (
            self.sum_last(builder, builder.add(Opcode.SELECT, [is_member, numbers, none]))
            for numbers in (group, begin, end)
        )
        return _Tables(*found)

    # ---- One window ----

    def window(
        self, builder: Builder, array: Instruction, dimension: int, start: Instruction, size: int
    ) -> Instruction:
        shape = array_shape(array)
        zero = builder.scalar(0, self.index_type)
        starts = [start if d == dimension else zero for d in range(shape.rank)]
        sizes = tuple(size if d == dimension else extent for d, extent in enumerate(shape.dims))
        return builder.add(Opcode.DYNAMIC_SLICE, [array, *starts], DynamicSliceAttributes(sizes))

    def entry(self, builder: Builder, array: Instruction, dimension: int, at: Instruction) -> Instruction:
        """``array`` at ``at`` of a dimension, without that dimension."""
        slab = self.window(builder, array, dimension, at, 1)
        dims = array_shape(slab).dims
        return builder.reshape(slab, dims[:dimension] + dims[dimension + 1 :])

    def update(
        self, builder: Builder, array: Instruction, value: Instruction, dimension: int, start: Instruction
    ) -> Instruction:
        zero = builder.scalar(0, self.index_type)
        starts = [start if d == dimension else zero for d in range(array_shape(array).rank)]
        return builder.add(Opcode.DYNAMIC_UPDATE_SLICE, [array, value, *starts])

    def is_inside(
        self,
        builder: Builder,
        dims: Sequence[int],
        axis: int,
        prefix: Sequence[int],
        start: Instruction | None,
        bounds: tuple[Instruction | None, Instruction],
    ) -> Instruction:
        """Which elements of an array of ``dims``, whose ``axis`` begins at row ``start``, are within ``bounds``, whose
        dimensions are the array's ``prefix``."""
        row = self.iota(builder, dims, axis)
        if start is not None:
            row = builder.add(Opcode.ADD, [row, builder.broadcast(start, dims)])
        lower, upper = (None if bound is None else builder.broadcast(bound, dims, prefix) for bound in bounds)
        assert upper is not None
        ends = builder.add(Opcode.COMPARE, [row, upper], CompareAttributes(Comparison.LT))
        if lower is None:
            return ends
        begins = builder.add(Opcode.COMPARE, [row, lower], CompareAttributes(Comparison.GE))
        return builder.add(Opcode.AND, [begins, ends])

    def masked(self, builder: Builder, array: Instruction, inside: Instruction) -> Instruction:
        return builder.add(Opcode.SELECT, [inside, array, _zeros_like(builder, array)])

    def dot(
        self, builder: Builder, lhs: Instruction, rhs: Instruction, attributes: DotAttributes, result: ElementType
    ) -> Instruction:
        a, b = array_shape(lhs), array_shape(rhs)
        kept = [a.dims[d] for d in attributes.lhs_batch]
        kept += [n for d, n in enumerate(a.dims) if d not in (*attributes.lhs_batch, *attributes.lhs_contracting)]
        kept += [n for d, n in enumerate(b.dims) if d not in (*attributes.rhs_batch, *attributes.rhs_contracting)]
        return builder.add(Opcode.DOT, [lhs, rhs], attributes, shape=ArrayShape(result, tuple(kept)))

    def product(
        self,
        builder: Builder,
        operands: tuple[Instruction, Instruction],
        group: Instruction,
        start: Instruction | None,
        bounds: tuple[Instruction, Instruction],
    ) -> tuple[Instruction, Callable[[Instruction], Instruction]]:
        """What a window makes, and how it is put where there is something already."""
        ragged = self.ragged
        lhs, rhs = operands
        if start is not None:
            lhs = self.window(builder, lhs, ragged.dimension, start, self.windows.rows)
        if ragged.role is Role.CONTRACTING:
            if start is not None:
                rhs = self.window(builder, rhs, ragged.other, start, self.windows.rows)
            value = self.contracted(builder, lhs, rhs, start, bounds)
            return value, lambda old: builder.add(Opcode.ADD, [old, value]) if self.adds else value
        one = self.without_group()
        matrix = self.entry(builder, rhs, ragged.group, group)
        value = self.dot(builder, lhs, matrix, one, ragged.result.element_type)
        dims = array_shape(value).dims
        inside = self.is_inside(builder, dims, self.axis, self.result_prefix, start, bounds)
        return value, lambda old: builder.add(Opcode.SELECT, [inside, value, old])

    def contracted(
        self,
        builder: Builder,
        lhs: Instruction,
        rhs: Instruction,
        start: Instruction | None,
        bounds: tuple[Instruction, Instruction],
    ) -> Instruction:
        """Both sides are masked, so that nothing of another group comes in as zero times infinity."""
        ragged = self.ragged
        partner = dict(
            zip(
                (*ragged.dot.lhs_batch, *ragged.dot.lhs_contracting),
                (*ragged.dot.rhs_batch, *ragged.dot.rhs_contracting),
                strict=True,
            )
        )
        other_prefix = tuple(partner[d] for d in ragged.prefix)
        sides = []
        for array, axis, prefix in ((lhs, ragged.dimension, ragged.prefix), (rhs, ragged.other, other_prefix)):
            inside = self.is_inside(builder, array_shape(array).dims, axis, prefix, start, bounds)
            sides.append(self.masked(builder, array, inside))
        return self.dot(builder, sides[0], sides[1], ragged.dot, self.element_type)

    def without_group(self) -> DotAttributes:
        """The dot of one group's matrix, whose dimension of groups is gone."""
        ragged, dot = self.ragged, self.ragged.dot

        def kept(dims: Sequence[int]) -> tuple[int, ...]:
            return tuple(d - (d > ragged.group) for d in dims)

        return DotAttributes(
            dot.lhs_contracting,
            kept(dot.rhs_contracting),
            dot.lhs_batch,
            kept(dot.rhs_batch),
            dot.precision,
            dot.algorithm,
        )

    @property
    def axis(self) -> int:
        """The result's dimension of rows, where these are free."""
        return (*self.ragged.dot.lhs_batch, *self.ragged.free).index(self.ragged.dimension)

    @property
    def result_prefix(self) -> tuple[int, ...]:
        order = (*self.ragged.dot.lhs_batch, *self.ragged.free)
        return tuple(order.index(d) for d in self.ragged.prefix)

    # ---- All windows ----

    def batch(self, builder: Builder, lhs: Instruction, rhs: Instruction, sizes: Instruction) -> Instruction:
        """Elements behind the last group are zeros."""
        ragged = self.ragged
        _, upper = self.bounds(builder, sizes)
        last = builder.scalar(ragged.groups - 1, self.index_type)
        end = self.entry(builder, upper, len(ragged.prefix), last)
        inside = self.is_inside(builder, ragged.lhs.dims, ragged.dimension, ragged.prefix, None, (None, end))
        return self.dot(builder, self.masked(builder, lhs, inside), rhs, ragged.dot, ragged.result.element_type)

    def unrolled(self, builder: Builder, lhs: Instruction, rhs: Instruction, tables: _Tables) -> Instruction:
        ragged = self.ragged
        parts, total = [], _zeros(builder, ragged.result)
        for number in range(self.windows.count):
            at = builder.scalar(number, self.index_type)
            bounds = self.bounds_of(builder, tables, at)
            value, put = self.product(builder, (lhs, rhs), at, None, bounds)
            if ragged.role is Role.CONTRACTING:
                parts.append(builder.reshape(value, (1, *array_shape(value).dims)))
            else:
                total = put(total)
        if ragged.role is Role.CONTRACTING:
            return builder.add(Opcode.CONCATENATE, parts, DimensionAttributes(0))
        return total

    def bounds_of(self, builder: Builder, tables: _Tables, at: Instruction) -> tuple[Instruction, Instruction]:
        axis = array_shape(tables.lower).rank - 1
        return self.entry(builder, tables.lower, axis, at), self.entry(builder, tables.upper, axis, at)

    def loop(self, builder: Builder, lhs: Instruction, rhs: Instruction, tables: _Tables) -> Instruction:
        result = ArrayShape(self.element_type, self.ragged.result.dims)
        group = [] if tables.group is None else [tables.group]
        first = builder.scalar(0, self.index_type)
        state = builder.tuple([first, lhs, rhs, _zeros(builder, result), tables.lower, tables.upper, *group])
        called = [self.condition(state), self.step(state)]
        done = builder.add(Opcode.WHILE, [state], WhileAttributes(self.windows.count), called=called)
        made = builder.element(done, 3)
        return made if result == self.ragged.result else builder.convert(made, self.ragged.result.element_type)

    def condition(self, state: Instruction) -> Computation:
        builder = Builder("ragged_dot.condition")
        index = builder.element(builder.parameter(state.shape), 0)
        count = builder.scalar(self.windows.count, self.index_type)
        builder.add(Opcode.COMPARE, [index, count], CompareAttributes(Comparison.LT))
        return builder.build()

    def step(self, state: Instruction) -> Computation:
        builder = Builder("ragged_dot.step")
        values = builder.parameter(state.shape)
        index, lhs, rhs, total, lower, upper, *given = (
            builder.element(values, number) for number in range(len(state.operands))
        )
        tables = _Tables(given[0] if given else None, lower, upper)
        bounds = self.bounds_of(builder, tables, index)
        group, start = index, None
        if tables.group is not None:
            group = self.entry(builder, tables.group, 0, index)
            last = builder.scalar(self.ragged.length - self.windows.rows, self.index_type)
            start = builder.add(Opcode.MINIMUM, [bounds[0], last])
        value, put = self.product(builder, (lhs, rhs), group, start, bounds)
        if self.ragged.role is Role.CONTRACTING:
            old = self.entry(builder, total, 0, group) if self.adds else value
            made = put(old)
            slab = builder.reshape(made, (1, *array_shape(made).dims))
            total = self.update(builder, total, slab, 0, group)
        elif start is None:
            total = put(total)
        else:
            old = self.window(builder, total, self.axis, start, self.windows.rows)
            total = self.update(builder, total, put(old), self.axis, start)
        following = builder.add(Opcode.ADD, [index, builder.scalar(1, self.index_type)])
        return builder.build(builder.tuple([following, lhs, rhs, total, lower, upper, *given]))


def _zeros(builder: Builder, shape: ArrayShape) -> Instruction:
    if shape.element_type in NUMPY_TYPES or shape.element_type is E.BF16:
        zero = builder.scalar(0, shape.element_type)
    else:  # It has no literals.
        zero = builder.convert(builder.scalar(0, E.F32), shape.element_type)
    return builder.broadcast(zero, shape.dims)


def _zeros_like(builder: Builder, array: Instruction) -> Instruction:
    return _zeros(builder, array_shape(array))
