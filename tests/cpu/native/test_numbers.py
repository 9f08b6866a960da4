"""Operations with numbers, of which no tile is filled: the bits of the same operations between arrays, in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from flagos_backend.ir.attributes import NONE, CompareAttributes, DimensionsAttributes
from flagos_backend.ir.builder import Builder
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Comparison, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from plugin_abi.host import Context
from support.native_modules import assert_same_bits, compile_module, make
from support.native_modules import run as run_one
from support.paired_functions import BITS, SHIFTS
from support.paired_functions import FUNCTIONS as PAIRED

E = ElementType
_SIZE = 2603  # several tiles, and no multiple of a vector
_FUNCTIONS: dict[Opcode, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    **PAIRED,
    Opcode.MAXIMUM: np.maximum,
    Opcode.MINIMUM: np.minimum,
    Opcode.DIVIDE: np.divide,
}
_COMPARISONS = {
    Comparison.EQ: np.equal,
    Comparison.NE: np.not_equal,
    Comparison.GE: np.greater_equal,
    Comparison.GT: np.greater,
    Comparison.LE: np.less_equal,
    Comparison.LT: np.less,
}
_TYPES = [E.F32, E.F64, E.S32, E.S64, E.U32, E.U64, E.BF16]
_ARITHMETIC = (Opcode.ADD, Opcode.SUBTRACT, Opcode.MULTIPLY)
_BOUNDS = (Opcode.MAXIMUM, Opcode.MINIMUM)
# Quotients of integers by one number are in test_pairs.py.
_OPERATIONS = [
    *((operation, t) for operation in (*_ARITHMETIC, *_BOUNDS, *_COMPARISONS) for t in _TYPES),
    *((operation, t) for operation in (Opcode.AND, Opcode.OR, Opcode.XOR) for t in _TYPES if t.is_integer),
    *((operation, t) for operation in SHIFTS for t in (E.U32, E.U64)),
    *((Opcode.DIVIDE, t) for t in _TYPES if not t.is_integer),
]
_PAIRS = [
    *((t, first, second) for t in (E.F32, E.F64, E.U32) for first in _ARITHMETIC for second in _ARITHMETIC),
    *((t, first, second) for t in (E.U32, E.U64) for first in (*BITS, *SHIFTS) for second in BITS),
]


def _operands(builder: Builder, element_type: E, numbers: Sequence[bool]) -> list[Instruction]:
    """Parameters, of which those that are numbers are broadcast."""
    shape = ArrayShape(element_type, (_SIZE,))
    operands = []
    for is_number in numbers:
        operand = builder.parameter(ArrayShape(element_type, () if is_number else (_SIZE,)))
        if is_number:
            operand = builder.add(Opcode.BROADCAST, [operand], DimensionsAttributes(()), shape=shape)
        operands.append(operand)
    return operands


def _values(element_type: E, numbers: Sequence[bool], rng: np.random.Generator) -> list[np.ndarray]:
    arrays = [np.roll(make(element_type, rng, _SIZE), 5 * i) for i in range(len(numbers))]
    return [rng.choice(x[:40]) if is_number else x for x, is_number in zip(arrays, numbers, strict=True)]


@pytest.mark.parametrize("numbers", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(("operation", "element_type"), _OPERATIONS, ids=lambda p: getattr(p, "name", str(p)))
def test_operation(
    operation: Opcode | Comparison, element_type: E, numbers: Sequence[bool], context: Context, rng: np.random.Generator
) -> None:
    builder = Builder("entry")
    operands = _operands(builder, element_type, numbers)
    if isinstance(operation, Comparison):
        root = builder.add(Opcode.COMPARE, operands, CompareAttributes(operation))
        function = _COMPARISONS[operation]
    else:
        root = builder.add(operation, operands, NONE)
        function = _FUNCTIONS[operation]
    executable, _ = compile_module(context, builder, root)
    for _ in range(4):
        values = _values(element_type, numbers, rng)
        with np.errstate(all="ignore"):
            expected = np.broadcast_to(function(*values), _SIZE)
        ours = run_one(context, executable, values)
        if operation in _BOUNDS:  # of two zeros either
            np.testing.assert_array_equal(ours.astype(np.float64), expected.astype(np.float64))
        else:
            assert_same_bits(ours, expected)


@pytest.mark.parametrize("numbers", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize(("element_type", "first", "second"), _PAIRS, ids=lambda p: getattr(p, "name", str(p)))
def test_pair(
    element_type: E,
    first: Opcode,
    second: Opcode,
    numbers: Sequence[bool],
    context: Context,
    rng: np.random.Generator,
) -> None:
    """Both the first of two operations as the left operand of the second, and as the right one."""
    values = _values(element_type, numbers, rng)
    for swapped in (False, True):
        builder = Builder("entry")
        a, b, c = _operands(builder, element_type, numbers)
        inner = builder.add(first, [a, b])
        executable, _ = compile_module(context, builder, builder.add(second, [c, inner] if swapped else [inner, c]))
        with np.errstate(all="ignore"):
            between = _FUNCTIONS[first](values[0], values[1])
            operands = (values[2], between) if swapped else (between, values[2])
            expected = np.broadcast_to(_FUNCTIONS[second](*operands), _SIZE)
        assert_same_bits(run_one(context, executable, values), expected)


@pytest.mark.parametrize("numbers", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("second", [None, *BITS], ids=str)
@pytest.mark.parametrize("element_type", [E.U32, E.U64], ids=lambda t: t.name)
def test_rotation(
    element_type: E, second: Opcode | None, numbers: Sequence[bool], context: Context, rng: np.random.Generator
) -> None:
    values = _values(element_type, numbers, rng)
    builder = Builder("entry")
    x, y = _operands(builder, element_type, numbers)
    shifted = []
    for opcode, amount in zip(SHIFTS, (13, element_type.bits - 13), strict=True):
        constant = builder.constant(values[0].dtype.type(amount))
        amounts = builder.add(Opcode.BROADCAST, [constant], DimensionsAttributes(()), shape=x.shape)
        shifted.append(builder.add(opcode, [x, amounts]))
    root = builder.add(Opcode.OR, shifted)
    expected = (values[0] << values[0].dtype.type(13)) | (values[0] >> values[0].dtype.type(element_type.bits - 13))
    if second is not None:
        root = builder.add(second, [root, y])
        with np.errstate(all="ignore"):
            expected = _FUNCTIONS[second](expected, values[1])
    executable, _ = compile_module(context, builder, root)
    np.testing.assert_array_equal(run_one(context, executable, values), np.broadcast_to(expected, _SIZE))


@pytest.mark.parametrize("columns", [1, 15, 64, 1000, 5003])
@pytest.mark.parametrize("also_as_tile", [False, True])
def test_what_a_row_has_once(also_as_tile: bool, columns: int, context: Context, rng: np.random.Generator) -> None:
    """A row's greatest element as a number, and also by an operation that reads a tile of it."""
    x = rng.standard_normal((7, columns)).astype(np.float32)
    last = "atan2(shifted, tops)" if also_as_tile else "multiply(shifted, shifted)"
    text = f"""
greatest {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] maximum(a, b)
}}
ENTRY main {{
  x = f32[7,{columns}] parameter(0)
  least = f32[] constant(-inf)
  top = f32[7] reduce(x, least), dimensions={{1}}, to_apply=greatest
  tops = f32[7,{columns}] broadcast(top), dimensions={{0}}
  shifted = f32[7,{columns}] subtract(x, tops)
  ROOT y = f32[7,{columns}] {last}
}}"""
    with compile(context, text) as executable:
        ours = get(run(executable, put(context.devices[0].default_memory, x))[0])
    tops = x.max(1, keepdims=True)
    shifted = x - tops
    np.testing.assert_allclose(ours, np.arctan2(shifted, tops) if also_as_tile else shifted * shifted, rtol=1e-6)


@pytest.mark.parametrize("columns", [1, 100, _SIZE])
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize(("operation", "element_type"), _OPERATIONS, ids=lambda p: getattr(p, "name", str(p)))
def test_numbers_of_rows(
    operation: Opcode | Comparison,
    element_type: E,
    position: int,
    columns: int,
    context: Context,
    rng: np.random.Generator,
) -> None:
    """A number for each row of a table, as operand number ``position``."""
    rows = 17
    builder = Builder("entry")
    shape = ArrayShape(element_type, (rows, columns))
    table, numbers = (builder.parameter(ArrayShape(element_type, dims)) for dims in (shape.dims, (rows,)))
    operands = [table, table]
    operands[position] = builder.add(Opcode.BROADCAST, [numbers], DimensionsAttributes((0,)), shape=shape)
    is_comparison = isinstance(operation, Comparison)
    attributes = CompareAttributes(operation) if isinstance(operation, Comparison) else NONE
    root = builder.add(Opcode.COMPARE if is_comparison else operation, operands, attributes)
    executable, _ = compile_module(context, builder, root)
    values = rng.permutation(make(element_type, rng, rows * columns)).reshape(rows, columns)
    of_rows = rng.choice(values.reshape(-1), rows)
    arrays = [values, values]
    arrays[position] = np.broadcast_to(of_rows[:, None], values.shape)
    function = _COMPARISONS[operation] if isinstance(operation, Comparison) else _FUNCTIONS[operation]
    with np.errstate(all="ignore"):
        expected = function(*arrays)
    ours = run_one(context, executable, [values, of_rows])
    if operation in _BOUNDS:  # of two zeros either
        np.testing.assert_array_equal(ours.astype(np.float64), expected.astype(np.float64))
    else:
        assert_same_bits(ours, expected)


def test_quotients_and_choices_by_numbers_of_rows(context: Context, rng: np.random.Generator) -> None:
    """Divisors of a row are told apart from those of the next, also where a number fills a tile as a result."""
    rows, columns = 37, 1500
    builder = Builder("entry")
    shape = ArrayShape(E.S32, (rows, columns))
    table, numbers = (builder.parameter(ArrayShape(E.S32, dims)) for dims in (shape.dims, (rows,)))
    divisors = builder.add(Opcode.BROADCAST, [numbers], DimensionsAttributes((0,)), shape=shape)
    quotients, remainders = (builder.add(op, [table, divisors], NONE) for op in (Opcode.DIVIDE, Opcode.REMAINDER))
    smaller = builder.add(Opcode.COMPARE, [quotients, remainders], CompareAttributes(Comparison.LT))
    executable, _ = compile_module(context, builder, builder.add(Opcode.SELECT, [smaller, divisors, quotients], NONE))
    x, by = rng.integers(-(2**31), 2**31, (rows, columns)), rng.integers(1, 1000, rows) * rng.choice([-1, 1], rows)
    quotient = np.sign(x) * np.sign(by[:, None]) * (np.abs(x) // np.abs(by[:, None]))
    expected = np.where(quotient < x - quotient * by[:, None], by[:, None], quotient).astype(np.int32)
    ours = run_one(context, executable, [x.astype(np.int32), by.astype(np.int32)])
    np.testing.assert_array_equal(ours, expected)
