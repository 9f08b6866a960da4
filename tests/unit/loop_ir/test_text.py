"""Loop nests as text: what is printed parses to an equal nest, and what is no nest is refused with its place."""

import re

import numpy as np
import pytest

from flagos_backend.devices.target import SIMULATED
from flagos_backend.errors import FlagosBackendError, LoopNestTextInvalid
from flagos_backend.ir.hlo import Instruction
from flagos_backend.ir.opcode import ComparisonOrder, Opcode
from flagos_backend.ir.types import ArrayShape, ElementType
from flagos_backend.loop_ir.intrinsics import OPERANDS
from flagos_backend.loop_ir.parser import parse_nest, parse_nests
from flagos_backend.loop_ir.printer import print_literal, print_nest, print_nests
from flagos_backend.loop_ir.region import Affine, Apply, Index, Literal, Load, Region, Shift, Store
from hlo_texts import HLO_TEXTS
from support.nests import cpu_nests, round_trips, same_nest, triton_nests

E = ElementType
SOFTMAX = """\
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
}"""
UPDATE = """\
nest [3] (@at: s64[], @w: f16[30], @w.1: f16[30]) {
  %0 = s64 index[-d0 + 2]
  %1 = s64 constant(1)
  %2 = pred compare(%0, %1), direction=LT, order=TOTAL
  %3 = s64 load @at[0]
  %4 = f16 load @w[d0 - 2*start(%3, 9) + 18], if %2
  %5 = f16 constant(0xfe01)
  %6 = f16 select(%2, %4, %5)
  store %6, @w.1[d0 + start(%3, 27)]
}"""


def test_every_nest_of_the_texts_round_trips() -> None:
    """Those of the other programs, and what transforms make of them: unit/codegen/cpu/test_pipelines.py."""
    count = 0
    for text in HLO_TEXTS.values():
        hlo = text.hlo()
        try:
            nests = [*cpu_nests(hlo), *triton_nests(hlo, SIMULATED)]
        except FlagosBackendError:  # what no target compiles has no nests
            continue
        for nest in nests:
            round_trips(nest)
        count += len(nests)
    assert count > 30


@pytest.mark.parametrize("text", [SOFTMAX, UPDATE])
def test_text_prints_as_it_was_written(text: str) -> None:
    assert print_nest(parse_nest(text)) == text


def test_several_nests_and_comments() -> None:
    nests = parse_nests(f"// one\n{SOFTMAX}\n\n{UPDATE} // two\n")
    assert print_nests(nests) == f"{SOFTMAX}\n\n{UPDATE}"
    assert parse_nests("// nothing\n") == ()


def test_text_means_what_it_says() -> None:
    nest = parse_nest(UPDATE)
    (store,) = nest.stores
    assert nest.dims == (3,) and store.target.name == "w.1" and store.target.shape == ArrayShape(E.F16, (30,))
    at = Load(E.S64, next(e.source for e in nest.expressions() if isinstance(e, Load)), Affine(0, (0,)))
    assert store.index == Affine(0, (1,), (Shift(at, 27),))
    select = store.value
    assert isinstance(select, Apply) and select.opcode is Opcode.SELECT
    compare, load, other = select.operands
    assert isinstance(compare, Apply) and (compare.detail, compare.order) == ("LT", ComparisonOrder.TOTAL)
    assert compare.operands == (Index(E.S64, Affine(2, (-1,))), Literal(E.S64, (1).to_bytes(8, "little")))
    assert isinstance(load, Load) and load.index == Affine(18, (1,), (Shift(at, 9, -2),)) and load.guard is compare
    assert other == Literal(E.F16, b"\x01\xfe")


def test_operations_of_their_own_stay_apart() -> None:
    text = """\
nest [2] (@x: f32[2], @y: f32[2]) {
  %0 = f32 load @x[d0]
  %1 = f32 negate(%0)
  %2 = f32 negate(%0)
  %3 = f32 add(%1, %2)
  store %3, @y[d0]
}"""
    assert print_nest(parse_nest(text)) == text
    shared = parse_nest(text.replace("add(%1, %2)", "add(%1, %1)").replace("  %2 = f32 negate(%0)\n", ""))
    assert not same_nest(parse_nest(text), shared)


@pytest.mark.parametrize("name", ["x", "", "a b", 'quo"te', "new\nline", "ünï", "back\\slash", "a@", '"', "1.2-x"])
def test_any_name_of_an_array(name: str) -> None:
    x = Instruction(Opcode.PARAMETER, ArrayShape(E.F32, (2,)), name=name)
    y, z = (Instruction(Opcode.PARAMETER, ArrayShape(E.F32, (2,)), name=n) for n in (name, f"{name}.1"))
    value = Load(E.F32, x, Affine(0, (1,)))
    nest = Region((2,), (Store(y, value, Affine(0, (1,))), Store(z, value, Affine(0, (1,)))))
    round_trips(nest)
    assert any(e.source.name == name for e in parse_nest(print_nest(nest)).expressions() if isinstance(e, Load))


@pytest.mark.parametrize("form", OPERANDS, ids=lambda form: f"{form[0]}-{form[1]}")
def test_every_intrinsic_round_trips(form: tuple[Opcode, str]) -> None:
    x = Instruction(Opcode.PARAMETER, ArrayShape(E.F32, (2,)), name="x")
    load = Load(E.F32, x, Affine(0, (1,)))
    value = Apply(E.F32, form[0], (load,) * OPERANDS[form], form[1])
    round_trips(Region((2,), (Store(x, value, Affine(0, (1,))),)))


@pytest.mark.parametrize("kind", [t for t in ElementType if t is not E.TOKEN])
def test_literals_of_any_bytes_round_trip(kind: ElementType, rng: np.random.Generator) -> None:
    target = Instruction(Opcode.PARAMETER, ArrayShape(kind), name="x")
    patterns = [bytes(kind.bytes), b"\xff" * kind.bytes, *(rng.bytes(kind.bytes) for _ in range(300))]
    for data in patterns:
        literal = Literal(kind, data)
        (store,) = parse_nest(print_nest(Region((), (Store(target, literal, Affine(0, ())),)))).stores
        assert store.value == literal


def test_literals_are_numbers_where_they_can_be() -> None:
    texts = {
        (E.F32, np.float32(0.1).tobytes()): "0.1",
        (E.F64, np.float64(1e300).tobytes()): "1e+300",
        (E.F16, np.float16(-np.inf).tobytes()): "-inf",
        (E.BF16, b"\x80\x3f"): "1.0",
        (E.F32, np.float32(np.nan).tobytes()): "nan",
        (E.F32, b"\x01\x00\xc0\x7f"): "0x7fc00001",
        (E.S8, b"\x80"): "-128",
        (E.PRED, b"\1"): "true",
        (E.C64, np.complex64(1).tobytes()): "0x000000003f800000",
    }
    assert {key: print_literal(Literal(*key)) for key in texts} == texts


WRONG = {
    "nests [2] () {}": (1, 1, "'nest' is wanted, not nests"),
    "nest [4, -6] () {}": (1, 10, "an integer is wanted"),
    "nest [2] (@x: f33[2]) {}": (1, 15, "there is no element type f33"),
    "nest [2] (@x: f32[2], @x: f32[2]) {}": (1, 23, "two buffers @x"),
    "nest [] () {\n  %0 = f32 add(%1, %1)\n}": (2, 16, "%1 is not defined above"),
    "nest [] () {\n  %0 = f32 constant(1.0)\n  %0 = f32 constant(1.0)\n}": (3, 3, "%0 is defined twice"),
    "nest [] () {\n  %0 = f32 constant(1.0)\n}": (2, 3, "nothing uses %0"),
    "nest [] () {\n  %0 = s8 constant(128)\n}": (2, 20, "128 is no s8"),
    "nest [] () {\n  %0 = bf16 constant(1.1)\n}": (2, 22, "1.1 is no bf16"),
    "nest [] () {\n  %0 = f16 constant(1e9)\n}": (2, 21, "1e9 is no f16"),
    "nest [] () {\n  %0 = f32 constant(0x7f)\n}": (2, 21, "0x7f is no f32"),
    "nest [] () {\n  %0 = pred constant(1)\n}": (2, 22, "1 is no pred"),
    "nest [] () {\n  %0 = f32 constant(": (2, 21, "')' is wanted, not the end"),
    "nest [] () {\n  %0 = f32 adds()\n}": (2, 12, "there is no operation adds"),
    "nest [] () {\n  %0 = f32 load @x[0]\n}": (2, 17, "the nest has no buffer @x"),
    "nest [2] (@x: f32[2]) {\n  %0 = f32 load @x[d1]\n}": (2, 20, "the nest has no dimension d1"),
    "nest [2] (@x: f32[2]) {\n  %0 = f32 load @x[d0 d0]\n}": (2, 23, "'+' is wanted, not d0"),
    "nest [2] (@x: f32[2]) {\n  %0 = f32 load @x[99999999999999999999]\n}": (2, 20, "no integer of 64 bits"),
    SOFTMAX.replace('form="below"', 'direction="below"'): (6, 29, "exponential takes no attribute direction"),
    SOFTMAX.replace('form="below"', "form=below"): (6, 34, "a string is wanted"),
    SOFTMAX.replace("reduce(%0, %1)", "reduce(%0)"): (4, 12, "a value and an initial value"),
    UPDATE.replace("TOTAL", "WHOLE"): (4, 50, "there is no order WHOLE"),
    SOFTMAX + "\n?": (12, 1, "'?' begins nothing"),
    SOFTMAX + "\n" + SOFTMAX.replace("load @x[6*d0", "load @x[7*d0"): (12, 1, "elements 0 to 26 of an array of 24"),
    SOFTMAX.replace('form="below"', 'form="none"'): (1, 1, "there is no such form"),
    'nest [] (@"\\x": f32[]) {}': (1, 10, "an escape in the string is wrong"),
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_nest_is_refused_with_its_place(text: str) -> None:
    line, column, reason = WRONG[text]
    with pytest.raises(LoopNestTextInvalid, match=re.escape(reason)) as caught:
        parse_nests(text)
    assert (caught.value.facts["line"], caught.value.facts["column"]) == (str(line), str(column))


@pytest.mark.parametrize("text", [SOFTMAX, UPDATE])
def test_changed_text_is_a_nest_or_refused(text: str, rng: np.random.Generator) -> None:
    pieces = re.findall(r"\w+|\s+|.", text)
    refused = 0
    for _ in range(500):
        changed = list(pieces)
        for _ in range(int(rng.integers(1, 4))):
            place, other = rng.integers(len(pieces), size=2)
            changed[place] = str(rng.choice(["", pieces[other], pieces[other] + pieces[place]]))
        try:
            for nest in parse_nests("".join(changed)):
                round_trips(nest)
        except LoopNestTextInvalid:
            refused += 1
    assert refused > 250


def test_one_nest_is_one() -> None:
    with pytest.raises(LoopNestTextInvalid, match="one nest is wanted, not 2"):
        parse_nest(f"{SOFTMAX}\n{SOFTMAX}")
