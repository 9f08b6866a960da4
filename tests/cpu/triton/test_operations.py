"""Every operation and element type that a region may hold, with special values."""

from __future__ import annotations

import numpy as np
import pytest

from cpu.triton.harness import Build, check, run_both
from flagos_backend.ir.attributes import CompareAttributes, DimensionAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.elementwise import ELEMENTWISE
from flagos_backend.ir.functions import FUNCTIONS, FUNCTIONS_OF_TWO
from flagos_backend.ir.hlo import Computation, Instruction
from flagos_backend.ir.opcode import Comparison, ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from support.numbers import NUMPY_DTYPE, distance, random_values, special_values

E = ElementType
O = Opcode  # noqa: E741

_TYPES = sorted(ELEMENTWISE[O.ADD])
_FUNCTIONS = set(FUNCTIONS)
_UNARY = _FUNCTIONS | {O.ABS, O.NEGATE, O.SIGN, O.NOT, O.POPCNT, O.CLZ, O.IS_FINITE}
_EXACT = {O.CEIL, O.FLOOR, O.ROUND_AFZ, O.ROUND_EVEN, O.IS_FINITE, O.REMAINDER, O.COPYSIGN}
_SHIFTS = {O.SHIFT_LEFT, O.SHIFT_RIGHT_ARITHMETIC, O.SHIFT_RIGHT_LOGICAL}
_TYPED_ELSEWHERE = {O.COMPARE, O.CONVERT, O.BITCAST_CONVERT}


def _cases() -> list[tuple[Opcode, ElementType]]:
    return [
        (opcode, element_type)
        for opcode, types in ELEMENTWISE.items()
        for element_type in sorted(types)
        if opcode not in _TYPED_ELSEWHERE and not (opcode in (O.ABS, O.SIGN) and element_type.is_unsigned)
    ]


def _arguments(
    opcode: Opcode, element_type: ElementType, rng: np.random.Generator
) -> list[tuple[ElementType, np.ndarray]]:
    """Special values against each other and random ones."""
    count = 1 if opcode in _UNARY else 3 if opcode in (O.CLAMP, O.SELECT) else 2
    values = np.concatenate([special_values(element_type), random_values(element_type, 400, rng)])
    arguments = [(element_type, np.roll(values, 7 * n)) for n in range(count)]
    if opcode is O.SELECT:
        arguments[0] = (E.PRED, rng.integers(0, 2, values.size).astype(bool))
    if opcode in _SHIFTS:
        amounts = rng.integers(0, element_type.bits + 3, values.size)
        arguments[1] = (element_type, amounts.astype(values.dtype))
    if (opcode, element_type) == (O.REMAINDER, E.F64):
        # A step for each bit of the quotient: the ends of the range would take seconds here.
        arguments = [
            (t, np.where(np.abs(v) > 1e9, v / 2.0**980, np.where(np.abs(v) < 1e-9, 0, v))) for t, v in arguments
        ]
    return arguments


def _tolerance(opcode: Opcode, element_type: ElementType) -> float:
    """In units of the last place: the elementary functions of both sides are within a few."""
    if opcode is O.POWER and element_type is E.F64:
        return 1000  # exp(y log x), with the relative error of y log x
    if opcode is O.ERFC and element_type is E.F64:
        return 8  # without a device library a quotient of polynomials times two exponentials
    if opcode in _EXACT or opcode not in _FUNCTIONS | set(FUNCTIONS_OF_TWO):
        return 0
    return 4 if element_type.bits >= 32 else 1


@pytest.mark.parametrize(("opcode", "element_type"), _cases(), ids=lambda p: getattr(p, "name", str(p)))
def test_operation(opcode: Opcode, element_type: ElementType, rng: np.random.Generator) -> None:
    check(
        lambda builder, *operands: builder.add(opcode, operands),
        _arguments(opcode, element_type, rng),
        _tolerance(opcode, element_type),
    )


@pytest.mark.parametrize("source", _TYPES, ids=lambda t: t.name)
def test_convert_and_bitcast(source: ElementType, rng: np.random.Generator) -> None:
    values = np.concatenate([special_values(source), random_values(source, 400, rng)])

    def build(builder: Builder, x: Instruction) -> Instruction:
        results = [builder.convert(x, target) for target in _TYPES]
        same_width = [t for t in _TYPES if t.bits == source.bits and E.PRED not in (t, source)]
        results += [
            builder.add(O.BITCAST_CONVERT, [x], shape=ArrayShape(target, values.shape)) for target in same_width
        ]
        return builder.tuple(results)

    check(build, [(source, values)])


@pytest.mark.parametrize("element_type", _TYPES, ids=lambda t: t.name)
def test_compare(element_type: ElementType, rng: np.random.Generator) -> None:
    values = np.concatenate([special_values(element_type), random_values(element_type, 400, rng)])
    others = np.roll(values, 1)
    others[::4] = values[::4]

    def build(builder: Builder, *operands: Instruction) -> Instruction:
        orders = tuple(ComparisonOrder) if element_type.is_float else (ComparisonOrder.PARTIAL,)
        kinds = [CompareAttributes(direction, order) for direction in Comparison for order in orders]
        return builder.tuple([builder.add(O.COMPARE, operands, kind) for kind in kinds])

    check(build, [(element_type, values), (element_type, others)])


_HALF_FLOATS = (E.BF16, E.F16)


@pytest.mark.parametrize("element_type", [t for t in _TYPES if t not in _HALF_FLOATS], ids=lambda t: t.name)
def test_each_operation_rounds_to_its_own_type(element_type: ElementType, rng: np.random.Generator) -> None:
    """x * y + y: neither contracted nor kept wider in between."""
    x, y = (random_values(element_type, 1500, rng) for _ in range(2))
    check(_times_plus, [(element_type, x), (element_type, y)])


@pytest.mark.parametrize("element_type", _HALF_FLOATS, ids=lambda t: t.name)
def test_half_floats_round_each_result(element_type: ElementType, rng: np.random.Generator) -> None:
    """x * y + y."""
    x, y = (random_values(element_type, 1500, rng) for _ in range(2))
    wide_x, wide_y = x.astype(np.float32), y.astype(np.float32)
    with np.errstate(all="ignore"):
        expected = ((wide_x * wide_y).astype(x.dtype).astype(np.float32) + wide_y).astype(x.dtype)
    (ours,), _, _ = run_both(_computation(_times_plus, element_type, (1500,), (1500,)), [x, y])
    assert not distance(ours, expected).any()


@pytest.mark.parametrize("element_type", _HALF_FLOATS, ids=lambda t: t.name)
def test_half_floats_jump_where_they_are_rounded(element_type: ElementType, rng: np.random.Generator) -> None:
    """A greatest element is equal to itself, though what it is compared with was not stored in between."""
    x, y = (random_values(element_type, 600, rng).reshape(20, 30) for _ in range(2))

    def build(builder: Builder, a: Instruction, b: Instruction) -> Instruction:
        total = builder.add(O.MULTIPLY, [a, b])
        stored = builder.add(O.FLOOR, [total])
        equal = builder.add(O.COMPARE, [total, total], CompareAttributes(Comparison.EQ, ComparisonOrder.PARTIAL))
        return builder.tuple([stored, equal])

    check(build, [(element_type, x), (element_type, y)])


def _times_plus(builder: Builder, a: Instruction, b: Instruction) -> Instruction:
    return builder.add(O.ADD, [builder.add(O.MULTIPLY, [a, b]), b])


def _computation(build: Build, element_type: ElementType, *dims: tuple[int, ...]) -> Computation:
    builder = Builder("entry")
    parameters = [builder.parameter(ArrayShape(element_type, d)) for d in dims]
    return builder.build(build(builder, *parameters))


@pytest.mark.parametrize("element_type", [t for t in _TYPES if t is not E.PRED], ids=lambda t: t.name)
def test_iota_and_constants(element_type: ElementType, rng: np.random.Generator) -> None:
    x = random_values(element_type, 1200, rng).reshape(6, 200)

    def build(builder: Builder, a: Instruction) -> Instruction:
        number = builder.add(O.IOTA, [], DimensionAttributes(1), shape=ArrayShape(element_type, (6, 200)))
        three = builder.broadcast(builder.scalar(3, element_type), (6, 200))
        return builder.add(O.MAXIMUM, [builder.add(O.ADD, [number, three]), a])

    check(build, [(element_type, x)])


@pytest.mark.parametrize("element_type", [E.S64, E.U64], ids=lambda t: t.name)
def test_positions_are_numbers_of_their_type(element_type: ElementType) -> None:
    """Squares of them pass 32 bits, though the positions themselves do not; so do bits of the one of one place."""
    x = np.full((1, 70000), 1 << 40, NUMPY_DTYPE[element_type])

    def build(builder: Builder, a: Instruction) -> Instruction:
        number, nothing = (
            builder.add(O.IOTA, [], DimensionAttributes(d), shape=ArrayShape(element_type, x.shape)) for d in (1, 0)
        )
        shifted = builder.add(O.SHIFT_RIGHT_LOGICAL, [a, nothing])
        return builder.add(O.ADD, [builder.add(O.MULTIPLY, [number, number]), shifted])

    check(build, [(element_type, x)])
