"""The reference interpreter of loop nests, by nests whose values NumPy computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import Opcode
from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.nests import NestUndefined, evaluate, nothing
from flagos_backend.loop_ir.intrinsics import OPERANDS, SUBTRACTED, Intrinsic
from flagos_backend.loop_ir.parser import parse_nest, parse_nests
from flagos_backend.loop_ir.region import Load, Region
from support.nest_values import arrays
from support.random_nests import Motif, shared_divisor, short_rows_reduced, two_ended, two_sums
from support.regions import run_region

E = ElementType
Arrays = dict[str, np.ndarray]


def run(text: str, wide: bool = False, **before: np.ndarray) -> Arrays:
    """What the arrays of one nest hold after it, by name."""
    nest = parse_nest(text)
    named = {array.name: array for array in _arrays(nest)}
    held = evaluate([nest], {named[name]: torch.from_numpy(x) for name, x in before.items()}, wide)
    return {array.name: x.numpy() for array, x in held.items()}


def _arrays(nest: Region) -> list[Instruction]:
    return [e.source for e in nest.expressions() if isinstance(e, Load)] + [store.target for store in nest.stores]


def test_softmax(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6)).astype(np.float32)
    out = run(
        """
        nest [4, 6] (@x: f32[4,6], @y: f32[4,6]) {
          %0 = f32 load @x[6*d0 + d1]
          %1 = f32 constant(-inf)
          %2 = f32 reduce(%0, %1), dimensions={1}, combine=maximum
          %3 = f32 subtract(%0, %2)
          %4 = f32 exponential(%3), form="below"
          %5 = f32 constant(0.0)
          %6 = f32 reduce(%4, %5), dimensions={1}, combine=add
          %7 = f32 divide(%4, %6)
          store %7, @y[6*d0 + d1]
        }""",
        x=x.ravel(),
    )
    exponential = np.exp(x.astype(float) - x.max(1, keepdims=True))
    np.testing.assert_allclose(out["y"].reshape(4, 6), exponential / exponential.sum(1, keepdims=True), rtol=1e-6)


UPDATE = """
nest [3] (@at: s64[], @w: s32[30], @y: s32[30]) {
  %0 = s64 index[-d0 + 2]
  %1 = s64 constant(1)
  %2 = pred compare(%0, %1), direction=LT
  %3 = s64 load @at[0]
  %4 = s32 load @w[d0 - 2*start(%3, 9) + 18], if %2
  %5 = s32 constant(7)
  %6 = s32 select(%2, %4, %5)
  store %6, @y[d0 + start(%3, 27)]
}"""


@pytest.mark.parametrize("start", [0, 4, 9])
def test_starts_and_guards(start: int, rng: np.random.Generator) -> None:
    w, y = (rng.integers(-99, 99, 30).astype(np.int32) for _ in range(2))
    wanted = y.copy()
    wanted[start : start + 3] = [7, 7, w[2 - 2 * start + 18]]
    assert run(UPDATE, at=np.array([start]), w=w, y=y)["y"].tolist() == wanted.tolist()


def test_arguments_are_not_written_to() -> None:
    y = np.zeros(30, np.int32)
    run(UPDATE, at=np.array([0]), w=np.ones(30, np.int32), y=y)
    assert not y.any()


COPY = "nest [3] (@x: f32[9], @y: f32[5]) {\n  %0 = f32 load @x[2*d0 + 1]\n  store %0, @y[-d0 + 3]\n}"


def test_what_is_not_stored_to_keeps_its_value_or_has_none() -> None:
    x = np.arange(9, dtype=np.float32)
    assert run(COPY, x=x, y=np.full(5, 8, np.float32))["y"].tolist() == [8, 5, 3, 1, 8]
    np.testing.assert_array_equal(run(COPY, x=x)["y"], [np.nan, 5, 3, 1, np.nan])


def test_nests_run_one_after_another() -> None:
    doubled = (
        "nest [5] (@y: f32[5], @z: f32[5]) {\n  %0 = f32 load @y[d0]\n  %1 = f32 add(%0, %0)\n  store %1, @z[d0]\n}"
    )
    first, second = parse_nests(f"{COPY}\n{doubled}")
    (x,), (y,) = ([e.source for e in nest.expressions() if isinstance(e, Load)] for nest in (first, second))
    (store,) = first.stores
    joined = Region(first.dims, (type(store)(y, store.value, store.index),))
    held = evaluate([joined, second], {x: torch.arange(9.0)})
    assert held[second.stores[0].target][1:4].tolist() == [10, 6, 2]


def test_all_is_loaded_before_anything_is_stored() -> None:
    text = "nest [3] (@x: f32[4], @y: f32[4]) {\n  %0 = f32 load @x[d0]\n  store %0, @y[d0]\n  store %0, @x[d0 + 1]\n}"
    out = run(text, x=np.array([1, 2, 3, 4], np.float32))
    assert out["x"].tolist() == [1, 1, 2, 3] and out["y"].tolist()[:3] == [1, 2, 3]


def test_a_reduction_combines_each_point_and_the_initial_value_once(rng: np.random.Generator) -> None:
    text = """
    nest [2, 3, 5] (@x: s8[10], @first: s8[1], @y: s8[3]) {
      %0 = s8 load @x[5*d0 + d2]
      %1 = s8 load @first[0]
      %2 = s8 reduce(%0, %1), dimensions={0,2}, combine=add
      store %2, @y[d1]
    }"""
    x, first = rng.integers(-128, 128, 10).astype(np.int8), rng.integers(-128, 128, 1).astype(np.int8)
    wanted = (x.sum(dtype=np.int8) + first).astype(np.int8)
    assert run(text, x=x, first=first)["y"].tolist() == [wanted] * 3


def test_what_is_reduced_over_nothing_is_the_initial_value() -> None:
    text = """
    nest [2, 0] (@x: f32[0], @y: f32[2]) {
      %0 = f32 load @x[d0 + d1]
      %1 = f32 constant(3.5)
      %2 = f32 reduce(%0, %1), dimensions={1}, combine=add
      store %2, @y[d0]
    }"""
    assert run(text, x=np.zeros(0, np.float32))["y"].tolist() == [3.5, 3.5]


def test_without_points_nothing_is_stored() -> None:
    text = "nest [2, 0] (@y: f32[2]) {\n  %0 = f32 constant(3.5)\n  store %0, @y[d0]\n}"
    y = np.array([1, 2], np.float32)
    assert run(text, y=y)["y"].tolist() == [1, 2]


def test_reductions_of_16_bits_are_rounded_once() -> None:
    text = """
    nest [4096] (@x: f16[4096], @y: f16[]) {
      %0 = f16 load @x[d0]
      %1 = f16 constant(0.0)
      %2 = f16 reduce(%0, %1), dimensions={0}, combine=add
      store %2, @y[0]
    }"""
    x = np.full(4096, 0.1, np.float16)
    assert run(text, x=x)["y"][0] == np.float16(x.astype(float).sum())


def test_wide_values_are_not_rounded(rng: np.random.Generator) -> None:
    text = """
    nest [9] (@x: f32[9], @y: f16[9]) {
      %0 = f32 load @x[d0]
      %1 = f16 convert(%0)
      %2 = f16 multiply(%1, %1)
      %3 = s32 bitcast-convert(%0)
      %4 = f32 bitcast-convert(%3)
      %5 = f16 convert(%4)
      %6 = f16 add(%2, %5)
      store %6, @y[d0]
    }"""
    x = rng.standard_normal(9).astype(np.float32)
    exact = x.astype(float) ** 2 + x.astype(float)
    np.testing.assert_allclose(run(text, wide=True, x=x)["y"], exact, rtol=1e-15)
    half = x.astype(np.float16)
    np.testing.assert_array_equal(run(text, x=x)["y"], half * half + half)


def operation(line: str, kind: str = "f32") -> str:
    loads = "".join(f"  %{n} = {kind} load @{name}[d0]\n" for n, name in enumerate("abc") if f"%{n}" in line)
    used = ", ".join(f"@{name}: {kind}[64]" for n, name in enumerate("abc") if f"%{n}" in line)
    return f"nest [64] ({used}, @y: {kind}[64]) {{\n{loads}  %9 = {kind} {line}\n  store %9, @y[d0]\n}}"


def test_rounded_down(rng: np.random.Generator) -> None:
    a, b = (rng.integers(-(2**31), 2**31, 64).astype(np.int32) for _ in range(2))
    b[:32] = rng.choice([-9, -2, -1, 1, 2, 9], 32)
    b[b == 0] = 1
    a[0], b[0] = -(2**31), -1
    wide = a.astype(np.int64), b.astype(np.int64)
    out = run(operation('divide(%0, %1), form="floor"', "s32"), a=a, b=b)["y"]
    assert out.tolist() == (wide[0] // wide[1]).astype(np.int32).tolist()
    out = run(operation('remainder(%0, %1), form="floor"', "s32"), a=a, b=b)["y"]
    assert out.tolist() == (wide[0] % wide[1]).tolist()


def test_rotated(rng: np.random.Generator) -> None:
    a, b = rng.integers(0, 2**32, 64).astype(np.uint32), rng.integers(1, 32, 64).astype(np.uint32)
    bits = [f"{x:032b}" for x in a.tolist()]
    wanted = [int(x[n:] + x[:n], 2) for x, n in zip(bits, b.tolist(), strict=True)]
    out = run(operation('shift-left(%0, %1), form="rotate"', "u32"), a=a.view(np.int32), b=b.view(np.int32))["y"]
    assert out.view(np.uint32).tolist() == wanted


FORMS = {
    'log(%0), form="2"': lambda a, b, c: np.log2(a),
    'add(%0, %1), form="alone"': lambda a, b, c: a + b,
    'subtract(%0, %1), form="alone"': lambda a, b, c: a - b,
    'exponential(%0), form="term"': lambda a, b, c: np.exp(a),
    'sqrt(%0), form="near"': lambda a, b, c: np.sqrt(a),
    'log(%0), form="near"': lambda a, b, c: np.log2(1 - a * a),
    'divide(%0, %1), form="straight"': lambda a, b, c: a / b,
    'add(%0, %1, %2), form="multiply"': lambda a, b, c: a * b + c,
    'subtract(%0, %1, %2), form="add"': lambda a, b, c: (a + b) - c,
    'subtract(%0, %1, %2), form="add subtracted"': lambda a, b, c: c - (a + b),
}


@pytest.mark.parametrize("line", FORMS)
def test_forms(line: str, rng: np.random.Generator) -> None:
    a, b, c = rng.uniform(0.1, 0.9, (3, 64)).astype(np.float32)
    named = {name: x for n, (name, x) in enumerate(zip("abc", (a, b, c), strict=True)) if f"%{n}" in line}
    wanted = FORMS[line](*(x.astype(float) for x in (a, b, c)))
    np.testing.assert_allclose(run(operation(line), **named)["y"], wanted, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("form", OPERANDS, ids=lambda form: f"{form[0]}-{form[1]}")
def test_every_form_has_values(form: tuple[Opcode, str]) -> None:
    """Of operands that are what each form wants: a half, one, and its reciprocal."""
    opcode, detail = form
    whole = {*(Opcode.AND, Opcode.OR, Opcode.XOR, Opcode.SHIFT_LEFT, Opcode.REMAINDER)}
    first = detail.removesuffix(SUBTRACTED)
    bits = opcode in whole or detail == Intrinsic.FLOOR or first in {*whole, "shift-right-logical", Intrinsic.ROTATE}
    kind, one, half = ("s32", 1, 0) if bits else ("f32", 1.0, -0.5 if detail == Intrinsic.BELOW else 0.5)
    operands = ", ".join(("%0", "%1", "%1")[: OPERANDS[form]])
    text = f"""
    nest [] (@y: {kind}[]) {{
      %0 = {kind} constant({half})
      {f"%1 = {kind} constant({one})" if OPERANDS[form] > 1 else ""}
      %2 = {kind} {opcode}({operands}), form="{detail}"
      store %2, @y[0]
    }}"""
    assert np.isfinite(run(text)["y"]).all()


UNDEFINED = {
    "a start is not between 0 and 9": (UPDATE, {"at": np.array([10]), "w": np.zeros(30, np.int32)}),
    "%x is loaded and holds nothing": (COPY, {}),
    "is positive": (operation('exponential(%0), form="below"'), {"a": np.ones(64, np.float32)}),
    "is no reciprocal": (operation('divide(%0, %0, %1), form="corrected"'), dict.fromkeys("ab", np.full(64, 2, "f4"))),
    "not of 0 to 1 by 1": (operation('divide(%0, %0, %0), form="by sum"'), {"a": np.full(64, -1, np.float32)}),
    "divided by 0": (operation('divide(%0, %0), form="floor"', "s32"), {"a": np.zeros(64, np.int32)}),
    "a rotation is not by 1 to 31": (operation('shift-left(%0, %0), form="rotate"', "u32"), {"a": np.zeros(64, "i4")}),
    "two points store different values": (
        "nest [2] (@x: s64[2], @y: s64[1]) {\n  %0 = s64 load @x[d0]\n  store %0, @y[start(%0, 0)]\n}",
        {"x": np.zeros(2, np.int64)},
    ),
}


@pytest.mark.parametrize("reason", UNDEFINED)
def test_what_has_no_value_is_refused(reason: str) -> None:
    text, before = UNDEFINED[reason]
    if "two points" in reason:  # the same value at two points is one
        run(text, **before)
        text = text.replace("%0 = s64 load @x[d0]", "%1 = s64 load @x[d0]\n  %0 = s64 subtract(%1, %1)")
        text = text.replace("store %0", "%2 = s64 index[d0]\n  store %2")
    with pytest.raises(NestUndefined, match=reason):
        run(text, **before)


@pytest.mark.parametrize("kind", [t for t in ElementType if t is not E.TOKEN])
def test_nothing_is_no_number(kind: ElementType) -> None:
    value = nothing(kind)
    assert value.isnan() if value.is_floating_point() or value.is_complex() else value != 0


def _is_wide(nest: Region) -> bool:
    """Whether nothing of it has 16 bits, which each interpreter rounds at steps of its own."""
    loads = (e.element_type for e in nest.expressions() if isinstance(e, Load))
    return all(element_type.bytes >= 4 for element_type in loads)


@pytest.mark.parametrize("make", [two_ended, short_rows_reduced, two_sums, shared_divisor])
def test_numpy_agrees(make: Motif, rng: np.random.Generator) -> None:
    """Another interpreter, on whole grids of positions, of what NumPy has."""
    nest = next(nest for nest in iter(lambda: make(rng, plain=True), None) if _is_wide(nest))
    before = arrays([nest], rng)
    memory = {array: x.numpy().copy() for array, x in before.items()}
    run_region(nest, memory)
    held = evaluate([nest], before)
    for store in nest.stores:
        np.testing.assert_allclose(held[store.target].numpy(), memory[store.target], rtol=1e-4, atol=1e-4)
