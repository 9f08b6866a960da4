"""Kernels that change the element type against stock XLA."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.errors import UnsupportedElementType
from flagos_backend.ir.types import ElementType
from programs import run_on_xla
from support.against_xla import assert_same, check, hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE, distance, random_values, special_values

E = ElementType
TYPES = tuple(e for e in NUMPY_DTYPE if e not in (E.F4E2M1FN, E.F8E8M0FNU))


def values_of(element_type: ElementType, rng: np.random.Generator) -> np.ndarray:
    return np.concatenate([special_values(element_type), random_values(element_type, 200, rng)])


@pytest.mark.parametrize("source", TYPES, ids=lambda t: t.name)
def test_convert_to_every_type(source: ElementType, rng: np.random.Generator) -> None:
    values = values_of(source, rng)
    count, name = len(values), source.name.lower()
    targets = [t for t in TYPES if not (source.is_complex and not t.is_complex)]
    lines = [f"r{i} = {t.name.lower()}[{count}] convert(x)" for i, t in enumerate(targets)]
    shapes = ", ".join(f"{t.name.lower()}[{count}]" for t in targets)
    results = ", ".join(f"r{i}" for i in range(len(targets)))
    hlo = hlo_of_text(
        f"ENTRY e {{ x = {name}[{count}] parameter(0)\n"
        + "\n".join(lines)
        + f"\nROOT t = ({shapes}) tuple({results}) }}"
    )
    outcomes = zip(targets, run_on_backend(hlo, [values]), run_on_xla(hlo, [values]), strict=True)
    for target, ours, theirs in outcomes:
        if (source, target) == (E.F64, E.F16):  # XLA rounds twice on CPUs without f16
            theirs = values.astype(np.float16)
        off = distance(ours, theirs)
        worst = int(np.argmax(off))
        assert off[worst] == 0, f"{source.name} {values[worst]} to {target.name}: {ours[worst]}, not {theirs[worst]}"


def test_convert_rounds_once_right_beside_ties(rng: np.random.Generator) -> None:
    """f64 to f16, whose ties float32 has no neighbours for that are as near. XLA rounds twice on CPUs without f16."""
    below = rng.integers(0, 0x7BFF, 2000, dtype=np.uint16).view(np.float16)
    above = (below.view(np.uint16) + np.uint16(1)).view(np.float16)
    ties = (below.astype(np.float64) + above.astype(np.float64)) / 2
    values = ties * rng.choice([-1, 1], len(ties)) * (1 + rng.choice([-1, 0, 1], len(ties)) * 2.0**-40)
    hlo = hlo_of_text(f"ENTRY e {{ x = f64[{len(values)}] parameter(0)\n ROOT r = f16[{len(values)}] convert(x) }}")
    (ours,) = run_on_backend(hlo, [values])
    np.testing.assert_array_equal(ours, values.astype(np.float16))


@pytest.mark.parametrize("source", [E.F8E8M0FNU, E.F4E2M1FN], ids=lambda t: t.name)
def test_convert_of_scale_types(source: ElementType) -> None:
    """Every code: XLA's own results for these two are not all right, ml_dtypes is the judge."""
    values = special_values(source)
    hlo = hlo_of_text(
        f"ENTRY e {{ x = {source.name.lower()}[{len(values)}] parameter(0)\n ROOT r = f32[{len(values)}] convert(x) }}"
    )
    np.testing.assert_array_equal(run_on_backend(hlo, [values])[0], values.astype(np.float32))


BITCASTS = [
    ("f32[3,4]", "s32[3,4]"),
    ("f32[3,4]", "u8[3,4,4]"),
    ("u8[3,4,4]", "f32[3,4]"),
    ("f64[5]", "u32[5,2]"),
    ("u16[2,4]", "u64[2]"),
    ("bf16[6]", "f16[6]"),
    ("f16[6]", "u16[6]"),
    ("f8e5m2[8]", "u8[8]"),
    ("f8e4m3fn[4,2]", "s16[4]"),
    ("s4[6]", "u4[6]"),
    ("u32[]", "f32[]"),
    ("f32[]", "u16[2]"),
    ("u16[2]", "f32[]"),
    ("f32[0,3]", "u8[0,3,4]"),
]


@pytest.mark.parametrize(("source", "target"), BITCASTS)
def test_bitcast_convert(source: str, target: str, rng: np.random.Generator) -> None:
    name, dims = source[:-1].split("[")
    shape = tuple(int(d) for d in dims.split(",") if d)
    values = random_values(E[name.upper()], int(np.prod(shape)), rng).reshape(shape)
    check(f"ENTRY e {{ x = {source} parameter(0)\n ROOT r = {target} bitcast-convert(x) }}", values)


def test_bitcast_convert_splits_a_byte_into_nibbles() -> None:
    hlo = hlo_of_text("ENTRY e { x = u8[3] parameter(0)\n ROOT r = s4[3,2] bitcast-convert(x) }")
    (ours,) = run_on_backend(hlo, [np.array([0x21, 0xF0, 0x78], np.uint8)])
    np.testing.assert_array_equal(ours.astype(np.int8), [[1, 2], [0, -1], [-8, 7]])
    hlo = hlo_of_text("ENTRY e { x = s4[3,2] parameter(0)\n ROOT r = u8[3] bitcast-convert(x) }")
    (again,) = run_on_backend(hlo, [ours])
    np.testing.assert_array_equal(again, [0x21, 0xF0, 0x78])


def test_bitcast_convert_of_a_transposed_operand(rng: np.random.Generator) -> None:
    text = """ENTRY e {
      x = f32[3,4] parameter(0)
      t = f32[4,3] transpose(x), dimensions={1,0}
      a = s32[4,3] bitcast-convert(t)
      b = u8[4,3,4] bitcast-convert(t)
      ROOT r = (s32[4,3], u8[4,3,4]) tuple(a, b) }"""
    check(text, rng.standard_normal((3, 4)).astype(np.float32))


@pytest.mark.parametrize("element_type", [E.F16, E.BF16, E.F32, E.F64], ids=lambda t: t.name)
@pytest.mark.parametrize(("exponent", "mantissa"), [(5, 10), (8, 7), (4, 3), (8, 23), (2, 1), (5, 2), (11, 20)])
def test_reduce_precision(element_type: ElementType, exponent: int, mantissa: int, rng: np.random.Generator) -> None:
    # Around the ends of the reduced range as well.
    values = np.concatenate([values_of(element_type, rng), 2.0 ** rng.integers(-14, 14, 100) * rng.uniform(1, 2, 100)])
    values = values.astype(NUMPY_DTYPE[element_type])
    array = f"{element_type.name.lower()}[{len(values)}]"
    hlo = hlo_of_text(
        f"ENTRY e {{ x = {array} parameter(0)\n"
        f"ROOT r = {array} reduce-precision(x), exponent_bits={exponent}, mantissa_bits={mantissa} }}"
    )
    ours, theirs = run_on_backend(hlo, [values])[0], run_on_xla(hlo, [values])[0]
    off = distance(ours, theirs)
    assert off.max() == 0, (values[off > 0], ours[off > 0], theirs[off > 0])


def test_stochastic_convert_rounds_up_as_often_as_the_fraction_says(rng: np.random.Generator) -> None:
    count = 20_000
    values = np.full(count, -2.25, np.float32)
    random = rng.integers(0, 2**32, count, dtype=np.uint32)
    text = f"""ENTRY e {{
      x = f32[{count}] parameter(0)
      u = u32[{count}] parameter(1)
      ROOT r = s8[{count}] stochastic-convert(x, u) }}"""
    (ours,) = run_on_backend(hlo_of_text(text), [values, random])
    assert set(np.unique(ours)) == {-3, -2}
    assert abs(np.mean(ours == -3) - 0.25) < 0.02
    np.testing.assert_array_equal(ours == -3, random < 2**30)


def test_stochastic_convert_saturates() -> None:
    text = "ENTRY e { x = f32[4] parameter(0)\n u = u32[4] parameter(1)\n ROOT r = s8[4] stochastic-convert(x, u) }"
    values = np.array([1e9, -1e9, np.nan, 127.0], np.float32)
    (ours,) = run_on_backend(hlo_of_text(text), [values, np.zeros(4, np.uint32)])
    np.testing.assert_array_equal(ours, np.array([127, -128, 0, 127], np.int8))


def test_unsupported_bitcast_is_refused_by_name(rng: np.random.Generator) -> None:
    from flagos_backend.compile.plan_builder import build_plan
    from flagos_backend.ir.attributes import ParameterAttributes
    from flagos_backend.ir.hlo import Computation, Instruction
    from flagos_backend.ir.opcode import Opcode
    from flagos_backend.ir.types import ArrayShape

    x = Instruction(Opcode.PARAMETER, ArrayShape(E.C64, (2,)), attributes=ParameterAttributes(0), name="x")
    root = Instruction(Opcode.BITCAST_CONVERT, ArrayShape(E.S64, (2,)), (x,), name="bits")
    with pytest.raises(UnsupportedElementType, match=r"C64 bitcast to S64.*bits"):
        build_plan(Computation("e", (x, root), root))


def test_same_storage_costs_nothing() -> None:
    text = "ENTRY e { x = s32[4] parameter(0)\n ROOT r = u32[4] convert(x) }"
    x = np.array([-1, 0, 1, -(2**31)], np.int32)
    (ours,) = run_on_backend(hlo_of_text(text), [x])
    assert_same(ours, x.view(np.uint32), None)
