"""reduce with every kind of reducer against stock XLA."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.opcode import Opcode as O
from flagos_backend.ir.types import ElementType
from programs import run_on_xla
from support.against_xla import check, hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE, random_values, special_values

E = ElementType
SHAPES = [
    ((4, 3), (0,)),
    ((4, 3), (1,)),
    ((4, 3), (0, 1)),
    ((2, 5, 3), (0, 2)),
    ((2, 5, 3), (1,)),
    ((0, 3), (0,)),
    ((3,), ()),
]
INTEGERS = (E.S4, E.S8, E.U8, E.S16, E.U16, E.S32, E.U32, E.S64, E.U64)


def reduce_text(
    name: str, operation: str, dims: tuple[int, ...], dimensions: tuple[int, ...], initial: str | None = None
) -> str:
    array = f"{name}[{','.join(map(str, dims))}]"
    result = f"{name}[{','.join(str(d) for i, d in enumerate(dims) if i not in dimensions)}]"
    start = f"constant({initial})" if initial is not None else "parameter(1)"
    return f"""
    f {{ a = {name}[] parameter(0)
        b = {name}[] parameter(1)
        ROOT r = {name}[] {operation}(a, b) }}
    ENTRY e {{
      x = {array} parameter(0)
      i = {name}[] {start}
      ROOT r = {result} reduce(x, i), dimensions={{{",".join(map(str, dimensions))}}}, to_apply=f }}"""


@pytest.mark.parametrize("element_type", INTEGERS, ids=lambda t: t.name)
@pytest.mark.parametrize("operation", [O.ADD, O.MULTIPLY, O.MAXIMUM, O.MINIMUM, O.AND, O.OR, O.XOR])
@pytest.mark.parametrize(("dims", "dimensions"), SHAPES)
def test_integers(
    element_type: E, operation: O, dims: tuple[int, ...], dimensions: tuple[int, ...], rng: np.random.Generator
) -> None:
    x = random_values(element_type, int(np.prod(dims)), rng).reshape(dims)
    text = reduce_text(element_type.name.lower(), operation, dims, dimensions)
    check(text, x, rng.choice(special_values(element_type), ()))


@pytest.mark.parametrize("operation", [O.AND, O.OR, O.XOR, O.ADD, O.MULTIPLY, O.MAXIMUM, O.MINIMUM])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize(("dims", "dimensions"), SHAPES)
def test_pred(
    operation: O, initial: bool, dims: tuple[int, ...], dimensions: tuple[int, ...], rng: np.random.Generator
) -> None:
    check(reduce_text("pred", operation, dims, dimensions), rng.integers(0, 2, dims).astype(bool), np.array(initial))


FLOATS = {E.F16: 1e-2, E.BF16: 2e-2, E.F32: 1e-6, E.F64: 1e-14, E.C64: 1e-6, E.C128: 1e-14, E.F8E4M3FN: 0.2}


FLOAT_REDUCERS = [
    pytest.param(element_type, operation, id=f"{element_type.name}-{operation}")
    for element_type in FLOATS
    for operation in (O.ADD, O.MULTIPLY, O.MAXIMUM, O.MINIMUM)
    if not (element_type.is_complex and operation in (O.MAXIMUM, O.MINIMUM))
]


@pytest.mark.parametrize(("element_type", "operation"), FLOAT_REDUCERS)
@pytest.mark.parametrize(("dims", "dimensions"), SHAPES)
def test_floats(
    element_type: E, operation: O, dims: tuple[int, ...], dimensions: tuple[int, ...], rng: np.random.Generator
) -> None:
    ordering = operation in (O.MAXIMUM, O.MINIMUM)
    values = rng.uniform(-2, 2, dims)
    if element_type.bytes == 1:
        # XLA rounds every partial result to three bits: of these numbers nearly all are exact, whatever the order.
        values = rng.choice([-1, -0.5, 0.5, 1], dims)
    x = values.astype(NUMPY_DTYPE[element_type])
    tolerance = None if ordering else FLOATS[element_type]
    text = reduce_text(element_type.name.lower(), operation, dims, dimensions)
    check(text, x, np.array(0.5).astype(x.dtype), tolerance=tolerance)


@pytest.mark.parametrize("element_type", [E.F16, E.BF16, E.F32, E.F64], ids=lambda t: t.name)
@pytest.mark.parametrize(("operation", "initial"), [(O.MAXIMUM, "-inf"), (O.MINIMUM, "inf"), (O.ADD, "0")])
def test_nan_and_infinity_win(element_type: E, operation: O, initial: str) -> None:
    x = np.array([[1, 2, np.nan], [np.inf, 1, 2], [-np.inf, 1, 2], [np.inf, -np.inf, 0], [1, 2, 3]])
    check(reduce_text(element_type.name.lower(), operation, (5, 3), (1,), initial), x.astype(NUMPY_DTYPE[element_type]))


def test_identity_initial_values_are_not_special(rng: np.random.Generator) -> None:
    """The value that changes nothing is left out of the computation; next to it there is one that is not."""
    x = rng.integers(-50, 50, (3, 5)).astype(np.int32)
    for operation, initials in {O.ADD: (0, 1), O.MULTIPLY: (1, 0, -1), O.AND: (-1, 0), O.OR: (0, 5)}.items():
        for initial in initials:
            check(reduce_text("s32", operation, (3, 5), (1,), str(initial)), x)


def test_sum_of_many_float32_is_as_accurate_as_xla(rng: np.random.Generator) -> None:
    x = rng.uniform(0, 1, (1 << 20, 2)).astype(np.float32)
    hlo = hlo_of_text(reduce_text("f32", O.ADD, x.shape, (0,), "0"))
    exact = x.astype(np.float64).sum(0)
    ours, theirs = (np.abs(run(hlo, [x])[0] - exact).max() for run in (run_on_backend, run_on_xla))
    assert ours <= max(theirs, 1e-6 * exact.max())


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_narrow_floats_accumulate_in_float32(name: str) -> None:
    """4096 ones and a half: in the narrow type the sum would stop at 256 (2048)."""
    dtype = NUMPY_DTYPE[E[name.upper()]]
    (ours,) = run_on_backend(hlo_of_text(reduce_text(name, O.ADD, (4096,), (0,), "0")), [np.ones(4096, dtype)])
    assert float(ours) == 4096


ARGMAX = """
f {{ v = {t}[] parameter(0)
  i = s32[] parameter(1)
  w = {t}[] parameter(2)
  j = s32[] parameter(3)
  gt = pred[] compare(v, w), direction=GT
  isnan = pred[] compare(v, v), direction=NE
  first = pred[] or(gt, isnan)
  eq = pred[] compare(v, w), direction=EQ
  lt = pred[] compare(i, j), direction=LT
  tie = pred[] and(eq, lt)
  takei = pred[] or(first, tie)
  rv = {t}[] select(first, v, w)
  ri = s32[] select(takei, i, j)
  ROOT r = ({t}[], s32[]) tuple(rv, ri) }}
ENTRY e {{
  x = {t}[{dims}] parameter(0)
  i = s32[{dims}] iota(), iota_dimension={dimension}
  low = {t}[] constant({low})
  zero = s32[] constant(0)
  ROOT r = ({t}[{kept}], s32[{kept}]) reduce(x, i, low, zero), dimensions={{{dimension}}}, to_apply=f }}"""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100])
def test_argmax(size: int, rng: np.random.Generator) -> None:
    x = rng.integers(-5, 5, (3, size, 2)).astype(np.float32)
    if size > 5:
        x[0, 4, 0] = np.nan
    text = ARGMAX.format(t="f32", dims=f"3,{size},2", kept="3,2", dimension=1, low="-inf")
    values, indices = run_on_backend(hlo_of_text(text), [x])
    np.testing.assert_array_equal(indices, np.argmax(x, 1))
    np.testing.assert_array_equal(values, np.max(x, 1))


def test_argmax_against_xla(rng: np.random.Generator) -> None:
    text = ARGMAX.format(t="s32", dims="4,9", kept="4", dimension=1, low="-2147483648")
    check(text, rng.integers(-3, 3, (4, 9)).astype(np.int32))


def test_reducer_keeps_the_order_of_elements(rng: np.random.Generator) -> None:
    """Composition of affine maps is associative but does not commute."""
    text = """
    f { a = f64[] parameter(0)
      b = f64[] parameter(1)
      c = f64[] parameter(2)
      d = f64[] parameter(3)
      ac = f64[] multiply(c, a)
      bc = f64[] multiply(c, b)
      s = f64[] add(bc, d)
      ROOT r = (f64[], f64[]) tuple(ac, s) }
    ENTRY e {
      x = f64[3,13] parameter(0)
      y = f64[3,13] parameter(1)
      one = f64[] constant(1)
      zero = f64[] constant(0)
      ROOT r = (f64[3], f64[3]) reduce(x, y, one, zero), dimensions={1}, to_apply=f }"""
    x, y = rng.uniform(0.5, 1.5, (2, 3, 13))
    check(text, x, y, tolerance=1e-12)


def test_reducer_with_a_constant_and_a_conditional(rng: np.random.Generator) -> None:
    text = """
    plus { p = (s32[], s32[]) parameter(0)
      a = s32[] get-tuple-element(p), index=0
      b = s32[] get-tuple-element(p), index=1
      ROOT s = s32[] add(a, b) }
    smaller { p = (s32[], s32[]) parameter(0)
      a = s32[] get-tuple-element(p), index=0
      b = s32[] get-tuple-element(p), index=1
      ROOT s = s32[] minimum(a, b) }
    f { a = s32[] parameter(0)
      b = s32[] parameter(1)
      t = (s32[], s32[]) tuple(a, b)
      limit = s32[] constant(50)
      s = s32[] add(a, b)
      small = pred[] compare(s, limit), direction=LT
      ROOT r = s32[] conditional(small, t, t), true_computation=plus, false_computation=smaller }
    ENTRY e {
      x = s32[5,2] parameter(0)
      i = s32[] constant(0)
      ROOT r = s32[5] reduce(x, i), dimensions={1}, to_apply=f }"""
    x = np.array([[10, 20], [40, 20], [60, 70], [0, 0], [-5, 49]], np.int32)
    (ours,) = run_on_backend(hlo_of_text(text), [x])
    np.testing.assert_array_equal(ours, [30, 20, 0, 0, 44])
