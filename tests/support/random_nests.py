"""Random loop nests on which each transform acts, and faults that a transform could make in a nest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Protocol, TypeVar

import numpy as np

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.literals import identity_of, literal_of
from flagos_backend.loop_ir.region import Affine, Apply, Expression, Index, Literal, Load, Reduce, Region, Shift, Store

E = ElementType
O = Opcode  # noqa: E741
T = TypeVar("T")
_ARITHMETIC = (O.ADD, O.SUBTRACT, O.MULTIPLY, O.MAXIMUM, O.MINIMUM)


class Builder:
    """Makes one nest over ``dims``. ``kind``: the type of what it computes unless another is asked for.

    ``plain``: nothing but what a transform needs, and each operation shows in the results.
    """

    def __init__(
        self, rng: np.random.Generator, dims: Sequence[int], kind: ElementType = E.F32, plain: bool = False
    ) -> None:
        self.rng = rng
        self.plain = plain
        self.dims = tuple(dims)
        self.kind = kind
        self.stores: list[Store] = []
        self._arrays = 0

    def one_of(self, *choices: T) -> T:
        return choices[self.rng.integers(len(choices))]

    def place(self, order: Sequence[int], offset: int = 0) -> Affine:
        """Row major in an array whose dimensions are those of ``order``, outermost first."""
        coefficients = [0] * len(self.dims)
        step = 1
        for d in reversed(order):
            coefficients[d] = step
            step *= self.dims[d]
        return Affine(offset, tuple(coefficients))

    def load(self, order: Sequence[int] | None = None, kind: ElementType | None = None) -> Load:
        """Of an array of its own, a few elements behind its start."""
        order = range(len(self.dims)) if order is None else order
        offset = int(self.rng.integers(4))
        array = self._array("in", kind or self.kind, offset + prod(self.dims[d] for d in order) + 3)
        return Load(kind or self.kind, array, self.place(order, offset))

    def store(self, value: Expression, order: Sequence[int] | None = None) -> None:
        order = range(len(self.dims)) if order is None else order
        array = self._array("out", value.element_type, prod(self.dims[d] for d in order) + 2)
        self.stores.append(Store(array, value, self.place(order, 1)))

    def number(self, value: float, kind: ElementType | None = None) -> Literal:
        return literal_of(value, kind or self.kind)

    def apply(self, opcode: Opcode, *operands: Expression, kind: ElementType | None = None, detail: str = "") -> Apply:
        return Apply(kind or self.kind, opcode, operands, detail)

    def reduce(self, combine: Opcode, value: Expression, *dims: int) -> Reduce:
        initial = self.number(identity_of(combine, value.element_type), value.element_type)
        return Reduce(value.element_type, combine, value, initial, dims)

    def grown(self, value: Expression, order: Sequence[int] | None = None) -> Expression:
        """``value`` behind none to three random operations; itself in a plain nest."""
        for _ in range(0 if self.plain else self.rng.integers(4)):
            other = self.load(order) if self.rng.random() < 0.5 else self.number(int(self.rng.integers(1, 5)))
            if self.rng.random() < 0.2:
                less = self.apply(O.COMPARE, value, other, kind=E.PRED, detail=str(self.one_of(*Comparison)))
                value = self.apply(O.SELECT, less, other, value)
            else:
                operands = (value, other) if self.rng.random() < 0.5 else (other, value)
                value = self.apply(self.one_of(*_ARITHMETIC), *operands)
        return value

    def nest(self) -> Region:
        return Region(self.dims, tuple(self.stores))

    def _array(self, role: str, kind: ElementType, count: int) -> Instruction:
        self._arrays += 1
        return Instruction(O.PARAMETER, ArrayShape(kind, (count,)), name=f"{role}.{self._arrays}")


Rng = np.random.Generator


class Motif(Protocol):
    def __call__(self, rng: Rng, plain: bool = False) -> Region: ...


def _size(rng: Rng, least: int, most: int) -> int:
    return int(rng.integers(least, most + 1))


def _float(rng: Rng) -> E:
    return (E.F16, E.BF16, E.F32, E.F64)[_size(rng, 0, 3)]


def _short_float(rng: Rng) -> E:
    return (E.F16, E.BF16, E.F32)[_size(rng, 0, 2)]


def _any_combine(b: Builder) -> Opcode:
    """A product of many numbers says little of each."""
    return O.ADD if b.plain else b.one_of(O.ADD, O.MAXIMUM, O.MINIMUM)


def long_rows(rng: Rng, plain: bool = False) -> Region:
    b = Builder(
        rng, (_size(rng, 1, 2), (1 << 17) + _size(rng, 0, 999)), (E.F32, E.S32, E.F64)[_size(rng, 0, 2)], plain=plain
    )
    total = b.reduce(_any_combine(b), b.grown(b.load(), (1,)), 1)
    b.store(b.grown(total, (0,)), (0,))
    return b.nest()


def two_ended(rng: Rng, plain: bool = False) -> Region:
    """An array [outer, kept, inner], reduced over both ends."""
    b = Builder(
        rng,
        (_size(rng, 2, 9), _size(rng, 10, 40), _size(rng, 20, 60)),
        (E.F32, E.S64, E.BF16)[_size(rng, 0, 2)],
        plain=plain,
    )
    b.store(b.reduce(_any_combine(b), b.grown(b.load((1, 0, 2))), 1, 2), (0,))
    return b.nest()


def short_rows_to_columns(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 64, 90), _size(rng, 2, 12)), (E.F32, E.F16, E.U32)[_size(rng, 0, 2)], plain=plain)
    b.store(b.reduce(_any_combine(b), b.grown(b.load((1, 0)), (1,)), 1), (0,))
    return b.nest()


def short_rows(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (256 * _size(rng, 2, 4), _size(rng, 2, 9)), (E.F32, E.BF16, E.S32)[_size(rng, 0, 2)], plain=plain)
    b.store(b.grown(b.apply(O.ADD, b.load(), b.load((1,)))))
    return b.nest()


def short_rows_reduced(rng: Rng, plain: bool = False) -> Region:
    kind = (E.F32, E.F16, E.S32)[_size(rng, 0, 2)]
    b = Builder(rng, (256 * _size(rng, 2, 4), _size(rng, 2, 9)), kind, plain=plain)
    value = b.apply(O.SUBTRACT, b.load(), b.load((1,)))
    b.store(b.reduce(_any_combine(b), value, 0), (1,))
    return b.nest()


def logarithm(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 2, 9)), (E.F32, E.F64)[_size(rng, 0, 1)], plain=plain)
    log = b.apply(O.LOG, b.grown(b.load()))
    two = np.log(2.0) if b.kind is E.F64 else np.float32(np.log(2.0))
    inverse = 1 / np.log(2.0) if b.kind is E.F64 else np.float32(1 / np.log(2.0))
    divided = rng.random() < 0.5
    b.store(b.apply(O.DIVIDE, log, b.number(float(two))) if divided else b.apply(O.MULTIPLY, log, b.number(inverse)))
    return b.nest()


def logistic(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 2, 9)), _float(rng), plain=plain)
    one = b.number(1.0)
    below = b.apply(O.ADD, b.apply(O.EXP, b.apply(O.NEGATE, b.grown(b.load()))), one)
    b.store(b.apply(O.DIVIDE, one, below))
    return b.nest()


def sixteen_bits(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 2, 9)), (E.F16, E.BF16)[_size(rng, 0, 1)], plain=plain)
    product = b.apply(O.MULTIPLY, b.load(), b.load((1,)))
    b.store(b.apply(O.SUBTRACT, b.apply(O.TANH, product), b.load((0,))))
    return b.nest()


def floored(rng: Rng, plain: bool = False) -> Region:
    """x // n or x % n, as frameworks write them with quotients that are truncated."""
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 5, 20)), (E.S32, E.S64)[_size(rng, 0, 1)], plain=plain)
    x, n = b.load(), b.number(int(b.one_of(-7, -2, 2, 3, 10)))
    zero, one = b.number(0), b.number(1)
    rest = b.apply(O.REMAINDER, x, n)
    inexact = b.apply(O.COMPARE, rest, zero, kind=E.PRED, detail="NE")
    if rng.random() < 0.5:
        quotient = b.apply(O.DIVIDE, x, n)
        sign = b.number(-1 if _value(n) < 0 else 1)
        differs = b.apply(O.COMPARE, b.apply(O.SIGN, x), sign, kind=E.PRED, detail="NE")
        corrected, truncated = b.apply(O.SUBTRACT, quotient, one), quotient
    else:
        below = b.apply(O.COMPARE, rest, zero, kind=E.PRED, detail="LT")
        is_negative = Literal(E.PRED, b"\1" if _value(n) < 0 else b"\0")
        differs = b.apply(O.COMPARE, below, is_negative, kind=E.PRED, detail="NE")
        corrected, truncated = b.apply(O.ADD, rest, n), rest
    b.store(b.apply(O.SELECT, b.apply(O.AND, inexact, differs, kind=E.PRED), corrected, truncated))
    return b.nest()


def _value(literal: Literal) -> int:
    return int.from_bytes(literal.data, "little", signed=True)


def rotation(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 2, 9)), (E.U32, E.U64)[_size(rng, 0, 1)], plain=plain)
    x, amount = b.apply(O.XOR, b.load(), b.load((1,))), _size(rng, 1, b.kind.bits - 1)
    left = b.apply(O.SHIFT_LEFT, x, b.number(amount))
    right = b.apply(O.SHIFT_RIGHT_LOGICAL, x, b.number(b.kind.bits - amount))
    b.store(b.apply(b.one_of(O.OR, O.XOR, O.ADD), left, right))
    return b.nest()


def pair(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 2, 9)), (E.F32, E.F64, E.U32, E.U64)[_size(rng, 0, 3)], plain=plain)
    first, second = ((O.MULTIPLY, O.SUBTRACT), (O.SUBTRACT, O.ADD)) if b.kind.is_float else ((O.XOR, O.ADD),) * 2
    joined = b.apply(b.one_of(*first), b.load(), b.load((1,)))
    operands = (joined, b.load((0,)))
    b.store(b.apply(b.one_of(*second), *(operands if rng.random() < 0.5 else operands[::-1])))
    return b.nest()


def gathered_pair(rng: Rng, plain: bool = False) -> Region:
    """Rows that begin where the data says, and elements that are chosen where a guard holds."""
    b = Builder(rng, (_size(rng, 40, 60), _size(rng, 3, 9)), (E.F32, E.U32)[_size(rng, 0, 1)], plain=plain)
    limit = _size(rng, 3, 6)
    start = b.apply(O.CLAMP, b.number(0, E.S64), b.load((0,), E.S64), b.number(limit, E.S64), kind=E.S64)
    rows = b.load()
    shape = ArrayShape(b.kind, (prod(b.dims) + limit + 3,))
    window = Instruction(O.PARAMETER, shape, name="window")
    moved = replace(rows, source=window, index=replace(rows.index, offset=0, shifts=(Shift(start, limit),)))
    column = Index(E.S64, Affine(0, (0, 1)))
    guard = b.apply(O.COMPARE, column, b.number(1, E.S64), kind=E.PRED, detail="GE")
    before = Load(b.kind, b.load().source, b.place((0, 1), -1), guard)
    chosen = b.apply(O.SELECT, guard, before, b.number(3))
    first = O.MULTIPLY if b.kind.is_float else O.XOR
    b.store(b.apply(O.ADD, b.apply(first, b.grown(moved), chosen), rows))
    return b.nest()


def gathered(rng: Rng, plain: bool = False) -> Region:
    """Elements whose row and column the data says, of types in which all of its numbers are."""
    b = Builder(rng, (_size(rng, 3, 9), _size(rng, 3, 9)), (E.F32, E.S16, E.F64)[_size(rng, 0, 2)], plain=plain)
    rows, columns = _size(rng, 3, 9), _size(rng, 3, 9)
    shifts = []
    for limit, factor in ((rows - 1, columns), (columns - 2, 1)):
        # The lower end of a clamp does not matter to numbers that are never negative.
        number: Expression = b.load(kind=(E.S32, E.S64, E.U8, E.U32)[_size(rng, 0, 1 if plain else 3)])
        if number.element_type is not E.S64:
            number = b.apply(O.CONVERT, number, kind=E.S64)
        start: Expression = b.apply(O.CLAMP, b.number(0, E.S64), number, b.number(limit - 1, E.S64), kind=E.S64)
        # A start is clamped itself: only behind a sum does the lower end of its number's clamp matter.
        if plain or rng.random() < 0.5:
            start = b.apply(O.ADD, b.number(1, E.S64), start, kind=E.S64)
        shifts.append(Shift(start, limit, factor))
    table = Instruction(O.PARAMETER, ArrayShape(b.kind, (rows * columns + b.dims[1],)), name="table")
    window = Load(b.kind, table, Affine(1, (0, 1), tuple(shifts)))
    b.store(b.apply(O.ADD, b.grown(window), b.load()))
    return b.nest()


def seamed(rng: Rng, plain: bool = False) -> Region:
    """A row that is put together of two, padded on both sides, and rolled along the other dimension."""
    kind = (E.F32, E.S16, E.PRED, E.C64)[_size(rng, 0, 0 if plain else 3)]
    b = Builder(rng, (_size(rng, 2, 6), _size(rng, 4, 9)), kind, plain=plain)
    rows, columns = b.dims
    row, column = (Index(E.S32, Affine(0, tuple(int(d == at) for d in range(2)))) for at in range(2))
    first, last, step = 1, _size(rng, 2, columns - 1), _size(rng, 1, rows - 1)
    # Rows begin with one element of padding, and are read backwards where that is drawn.
    mirrored = rng.random() < 0.5
    if mirrored:
        column = Index(E.S32, Affine(columns - 1, (0, -1)))
    begins = b.apply(O.COMPARE, column, b.number(first, E.S32), kind=E.PRED, detail="GE")
    ends = b.apply(O.COMPARE, column, b.number(last, E.S32), kind=E.PRED, detail="LT")
    turned = b.apply(O.COMPARE, row, b.number(step, E.S32), kind=E.PRED, detail="LT")
    above, beneath = b.number(rows - step, E.S64), b.number(0, E.S64)
    start = b.apply(O.SELECT, turned, above, beneath, kind=E.S64)
    behind = replace(column.value, offset=column.value.offset - first)
    table = Instruction(O.PARAMETER, ArrayShape(kind, (rows * columns,)), name="table")
    # Rows below the seam stand ``step`` further up.
    place = Affine(
        behind.offset - step * columns, (columns, behind.coefficients[1]), (Shift(start, rows - step, columns),)
    )
    offset = Apply(E.S64, O.SELECT, (turned, b.number(step, E.S64), beneath))
    place = replace(place, shifts=(*place.shifts, Shift(offset, step, columns)))
    inside = b.apply(O.AND, begins, ends, kind=E.PRED)
    rolled = Load(kind, table, place, inside)
    other = Load(
        kind,
        b.load().source,
        b.place((0, 1)),
        b.apply(O.COMPARE, column, b.number(last, E.S32), kind=E.PRED, detail="GE"),
    )
    padding = Load(kind, b.load().source, Affine(0, (0, 0)))
    b.store(b.apply(O.SELECT, inside, rolled, b.apply(O.SELECT, ends, padding, other)))
    return b.nest()


def channels(rng: Rng, plain: bool = False) -> Region:
    """Pixels that the data says, each of a few channels, weighed by what all of these have in common."""
    b = Builder(rng, (_size(rng, 64, 90), _size(rng, 2, 4)), (E.F32, E.F64)[_size(rng, 0, 1)], plain=plain)
    pixels, channels = b.dims
    near, off, back = (b.load((0,), E.S32) for _ in range(3))
    number = b.apply(O.SUBTRACT, b.apply(O.ADD, near, off, kind=E.S32), back, kind=E.S32)
    start = b.apply(
        O.CLAMP, b.number(0, E.S64), b.apply(O.CONVERT, number, kind=E.S64), b.number(pixels - 1, E.S64), kind=E.S64
    )
    table = Instruction(O.PARAMETER, ArrayShape(b.kind, (pixels * channels,)), name="table")
    sample = Load(b.kind, table, Affine(0, (0, 1), (Shift(start, pixels - 1, channels),)))
    weight = b.apply(O.SUBTRACT, b.load((0,)), b.apply(O.MULTIPLY, b.load((0,)), b.load((0,))))
    b.store(b.apply(O.MULTIPLY, sample, weight))
    return b.nest()


def half_power(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 2, 9)), E.F32, plain=plain)
    b.store(b.apply(O.POWER, b.grown(b.load()), b.number((-1.5, -0.5, 1.5)[_size(rng, 0, 2)])))
    return b.nest()


def two_sums(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 2, 99)), _float(rng), plain=plain)
    sums = (b.reduce(O.ADD, b.grown(b.load()), 1), b.reduce(O.ADD, b.load(), 1))
    b.store(b.apply(O.MULTIPLY, b.load(), b.apply(O.ADD, *sums)))
    return b.nest()


def shared_divisor(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 16, 40)), _short_float(rng), plain=plain)
    b.store(b.apply(O.DIVIDE, b.grown(b.load()), b.load((0,))))
    return b.nest()


def power_of_two(rng: Rng, plain: bool = False) -> Region:
    """As a divisor, where its reciprocal may not be a number of the type."""
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 16, 40)), _short_float(rng), plain=plain)
    b.store(b.apply(O.DIVIDE, b.grown(b.load()), b.number(2.0 ** int(rng.integers(-17, 15)))))
    return b.nest()


def softmax(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 16, 40)), _short_float(rng), plain=plain)
    x = b.grown(b.load())
    exponential = b.apply(O.EXP, b.apply(O.SUBTRACT, x, b.reduce(O.MAXIMUM, x, 1)))
    b.store(b.apply(O.DIVIDE, exponential, b.reduce(O.ADD, exponential, 1)))
    return b.nest()


def narrow_sums(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 2, 40)), (E.S16, E.U16)[_size(rng, 0, 1)], plain=plain)
    b.store(b.reduce(O.ADD, b.apply(b.one_of(O.ADD, O.SUBTRACT), b.load(), b.load((1,))), 1), (0,))
    return b.nest()


def quotient_of_a_row(rng: Rng, plain: bool = False) -> Region:
    b = Builder(rng, (_size(rng, 2, 9), _size(rng, 2, 15)), _short_float(rng), plain=plain)
    mean = b.apply(O.DIVIDE, b.reduce(O.ADD, b.load(), 1), b.load((0,)))
    b.store(b.apply(O.SUBTRACT, b.load(), mean))
    return b.nest()


def inverse_error_function(rng: Rng, plain: bool = False) -> Region:
    """A piecewise polynomial of two pieces, of the logarithm or of its root."""
    b = Builder(rng, (_size(rng, 20, 40), _size(rng, 2, 9)), plain=plain)
    x = b.apply(O.TANH, b.load())
    log = b.apply(O.NEGATE, b.apply(O.LOG1P, b.apply(O.MULTIPLY, x, b.apply(O.NEGATE, x))))
    near = b.apply(O.COMPARE, log, b.number(1.0), kind=E.PRED, detail="LT")
    root = b.apply(O.SUBTRACT, b.apply(O.SQRT, log), b.number(3.0))
    argument = b.apply(O.SELECT, near, b.apply(O.SUBTRACT, log, b.number(2.5)), root)
    value: Expression = b.apply(O.SELECT, near, *(b.number(float(np.float32(c))) for c in rng.uniform(-1, 1, 2)))
    for _ in range(_size(rng, 2, 4)):
        pair = (b.number(float(np.float32(c))) for c in rng.uniform(-1, 1, 2))
        value = b.apply(O.ADD, b.apply(O.MULTIPLY, value, argument), b.apply(O.SELECT, near, *pair))
    b.store(b.apply(O.MULTIPLY, value, x))
    return b.nest()


#: By transform: nests that it changes, whatever the random choices.
MOTIFS: dict[str, tuple[Motif, ...]] = {
    "split_at_seams": (seamed, gathered_pair),
    "unroll_channels": (channels,),
    "flatten_addresses": (gathered,),
    "split_long_reductions": (long_rows,),
    "split_two_ended_reductions": (two_ended,),
    "transpose_short_reductions": (short_rows_to_columns,),
    "unroll_short_rows": (short_rows, short_rows_reduced),
    "log2": (logarithm,),
    "logistic": (logistic,),
    "excess_precision": (sixteen_bits,),
    "floor_division": (floored,),
    "rotate": (rotation,),
    "join_operations": (pair, gathered_pair),
    "half_powers": (half_power,),
    "join_sums": (two_sums,),
    "shared_reciprocals": (shared_divisor, power_of_two),
    "exp_below_maximum": (softmax,),
    "unpacked_16_bit_sums": (narrow_sums,),
    "straight_quotients": (quotient_of_a_row,),
    "near_arguments": (inverse_error_function,),
    "select_after_polynomials": (inverse_error_function,),
}
