"""Kernels that move elements, against stock XLA, on every width of element."""

from __future__ import annotations

import numpy as np
import pytest

from flagos_backend.ir.types import ElementType
from flagos_backend.kernels.reference.registry import Run
from support.against_xla import check, hlo_of_text, run_on_backend
from support.numbers import NUMPY_DTYPE, random_values

E = ElementType
TYPES = (E.PRED, E.S4, E.S8, E.U16, E.S32, E.U64, E.F8E4M3FN, E.BF16, E.F32, E.C64, E.C128)


def array(element_type: ElementType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    return random_values(element_type, int(np.prod(shape)), rng).reshape(shape)


def text_of(name: str, operand: str, result: str, operation: str) -> str:
    return f"ENTRY e {{ x = {name}[{operand}] parameter(0)\n ROOT r = {name}[{result}] {operation} }}"


UNARY = [
    ((3, 4), "4,3", "transpose(x), dimensions={1,0}"),
    ((2, 3, 4), "4,2,3", "transpose(x), dimensions={2,0,1}"),
    ((2, 3, 4), "6,4", "reshape(x)"),
    ((6,), "2,3", "reshape(x)"),
    ((1,), "", "reshape(x)"),
    ((), "1,1", "reshape(x)"),
    ((0, 3), "3,0,2", "reshape(x)"),
    ((2, 3), "2,3", "reverse(x), dimensions={1}"),
    ((2, 3), "2,3", "reverse(x), dimensions={0,1}"),
    ((5,), "5", "reverse(x), dimensions={}"),
    ((3,), "2,3", "broadcast(x), dimensions={1}"),
    ((3,), "3,2", "broadcast(x), dimensions={0}"),
    ((), "2,3", "broadcast(x), dimensions={}"),
    ((2, 4), "2,3,4", "broadcast(x), dimensions={0,2}"),
    ((4, 2), "2,3,4", "broadcast(x), dimensions={2,0}"),
    ((2, 1), "2,1,5", "broadcast(x), dimensions={0,1}"),
    ((3,), "0,3", "broadcast(x), dimensions={1}"),
    ((6, 5), "3,2", "slice(x), slice={[0:6:2], [1:4:2]}"),
    ((6, 5), "2,5", "slice(x), slice={[3:5], [0:5]}"),
    ((6,), "0", "slice(x), slice={[2:2]}"),
    ((6,), "6", "copy(x)"),
]


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize(("operand", "result", "operation"), UNARY)
def test_one_operand(
    element_type: ElementType, operand: tuple[int, ...], result: str, operation: str, rng: np.random.Generator
) -> None:
    dims = ",".join(map(str, operand))
    check(text_of(element_type.name.lower(), dims, result, operation), array(element_type, operand, rng))


PADS = [
    ((3, 4), "6,7", "1_2x0_3"),
    ((3, 4), "5,10", "0_0_1x0_0_2"),
    ((5,), "2", "-2_-1"),
    ((5,), "9", "-1_1_1"),
    ((4,), "4", "-3_3"),
    ((4,), "0", "-2_-2"),
    ((0,), "3", "1_2"),
    ((2, 3), "1,5", "-2_1x-1_1_1"),
    ((7,), "9", "-2_-2_1"),
    ((3,), "3", "0_0"),
]


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize(("operand", "result", "padding"), PADS)
def test_pad(
    element_type: ElementType, operand: tuple[int, ...], result: str, padding: str, rng: np.random.Generator
) -> None:
    name, dims = element_type.name.lower(), ",".join(map(str, operand))
    text = f"""ENTRY e {{
      x = {name}[{dims}] parameter(0)
      v = {name}[] parameter(1)
      ROOT r = {name}[{result}] pad(x, v), padding={padding} }}"""
    check(text, array(element_type, operand, rng), array(element_type, (), rng))


@pytest.mark.parametrize("value", ["0", "-0.0"])
def test_pad_with_constant_zero_keeps_its_sign(value: str) -> None:
    text = (
        f"ENTRY e {{ x = f32[2] parameter(0)\n v = f32[] constant({value})\n ROOT r = f32[4] pad(x, v), padding=1_1 }}"
    )
    (ours,) = check(text, np.array([1, 2], np.float32))
    assert np.signbit(ours[0]) == (value == "-0.0")


@pytest.mark.parametrize("element_type", TYPES, ids=lambda t: t.name)
def test_concatenate(element_type: ElementType, rng: np.random.Generator) -> None:
    name = element_type.name.lower()
    text = f"""ENTRY e {{
      a = {name}[2,3] parameter(0)
      b = {name}[2,0] parameter(1)
      c = {name}[2,2] parameter(2)
      one = {name}[2,3] concatenate(a), dimensions={{0}}
      rows = {name}[4,3] concatenate(a, a), dimensions={{0}}
      columns = {name}[2,5] concatenate(a, b, c), dimensions={{1}}
      nothing = {name}[2,0] concatenate(b, b), dimensions={{1}}
      ROOT t = ({name}[2,3], {name}[4,3], {name}[2,5], {name}[2,0]) tuple(one, rows, columns, nothing) }}"""
    check(text, *(array(element_type, shape, rng) for shape in ((2, 3), (2, 0), (2, 2))))


@pytest.mark.parametrize(
    "element_type",
    [e for e in NUMPY_DTYPE if e not in (E.PRED, E.S2, E.U2, E.F8E8M0FNU, E.F4E2M1FN)],
    ids=lambda t: t.name,
)
def test_iota(element_type: ElementType) -> None:
    name = element_type.name.lower()
    size = 5 if element_type.bits < 8 else 300
    text = f"""ENTRY e {{
      a = {name}[{size}] iota(), iota_dimension=0
      b = {name}[2,{size},3] iota(), iota_dimension=1
      c = {name}[0,3] iota(), iota_dimension=1
      ROOT t = ({name}[{size}], {name}[2,{size},3], {name}[0,3]) tuple(a, b, c) }}"""
    check(text)


def test_get_dimension_size() -> None:
    text = "ENTRY e { x = f32[3,7] parameter(0)\n ROOT r = s32[] get-dimension-size(x), dimensions={1} }"
    (ours,) = run_on_backend(hlo_of_text(text), [np.zeros((3, 7), np.float32)])
    assert ours == 7


def test_device_numbers() -> None:
    text = "ENTRY e { p = u32[] partition-id()\n r = u32[] replica-id()\n ROOT t = (u32[], u32[]) tuple(p, r) }"
    partition, replica = run_on_backend(hlo_of_text(text), [], Run(replica_id=3, partition_id=5))
    assert (partition, replica) == (5, 3)


def test_map_applies_a_scalar_function(rng: np.random.Generator) -> None:
    text = """
    f { a = f32[] parameter(0)
        b = f32[] parameter(1)
        two = f32[] constant(2)
        m = f32[] multiply(a, two)
        ROOT s = f32[] subtract(m, b) }
    k { a = f32[] parameter(0)
        ROOT c = f32[] constant(7) }
    ENTRY e { x = f32[3,4] parameter(0)
      y = f32[3,4] parameter(1)
      m = f32[3,4] map(x, y), dimensions={0,1}, to_apply=f
      n = f32[3,4] map(x), dimensions={0,1}, to_apply=k
      ROOT t = (f32[3,4], f32[3,4]) tuple(m, n) }"""
    check(text, *(rng.standard_normal((3, 4)).astype(np.float32) for _ in range(2)))
