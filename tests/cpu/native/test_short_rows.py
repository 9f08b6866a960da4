"""Loops over short rows, several of which become one: against stock XLA and exact sums, at sizes that fit or do not."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context
from programs import run_on_xla
from support.against_xla import assert_same, hlo_of_text

_DTYPES = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "s32": np.int32, "u8": np.uint8}
# Rows, columns, and whether rows are joined.
_SIZES = [
    (2048, 16, True),
    (512, 10, True),
    (96, 63, True),
    (97, 16, False),
    (6, 8, False),
    (700, 3, True),
    (1, 16, False),
]
# Loops without reductions join longer rows.
_LOOP_SIZES = [*_SIZES, (512, 64, True), (60, 200, True), (60, 256, False)]


def _is_joined(explanation: str, rows: int, columns: int) -> bool:
    return f"over {rows}x{columns}:" not in explanation and "repeated" in explanation


@pytest.mark.parametrize("element", _DTYPES)
@pytest.mark.parametrize(("rows", "columns", "joined"), _LOOP_SIZES)
def test_what_repeats_in_every_row(
    rows: int, columns: int, joined: bool, element: str, context: Context, rng: np.random.Generator
) -> None:
    """Twice the array, and its sums with a row and with one element; a NaN where there can be one."""
    shape = f"{element}[{rows},{columns}]"
    text = f"""ENTRY main {{
  x = {shape} parameter(0)
  row = {element}[{columns}] parameter(1)
  one = {element}[] parameter(2)
  rows = {shape} broadcast(row), dimensions={{1}}
  ones = {shape} broadcast(one), dimensions={{}}
  a = {shape} multiply(x, rows)
  b = {shape} add(a, ones)
  c = {shape} maximum(b, rows)
  ROOT both = ({shape}, {shape}) tuple(b, c)
}}"""
    dtype = _DTYPES[element]
    x = (rng.standard_normal((rows, columns)) * 9).astype(dtype)
    row, one = (rng.standard_normal(columns) * 9).astype(dtype), np.asarray(3, dtype)
    if element not in ("s32", "u8"):
        row[0], x[-1, -1] = np.nan, np.inf
    # XLA rounds a product and a sum at once where it can.
    tolerance = {"f32": 1e-6, "f64": 1e-14, "bf16": 1e-2}.get(element)
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        explanation = executable.artifact(Artifact.EXPLANATION).decode()
        ours = [get(b) for b in run(executable, *(put(memory, a) for a in (x, row, one)))]
    assert _is_joined(explanation, rows, columns) == joined
    for mine, theirs in zip(ours, run_on_xla(hlo_of_text(text), (x, row, one)), strict=True):
        assert_same(mine, np.asarray(theirs), tolerance)


def _reduction(rows: int, columns: int, element: str, opcode: str, initial: str) -> str:
    return f"""
combine {{
  a = {element}[] parameter(0)
  b = {element}[] parameter(1)
  ROOT c = {element}[] {opcode}(a, b)
}}
ENTRY main {{
  x = {element}[{rows},{columns}] parameter(0)
  row = {element}[{columns}] parameter(1)
  rows = {element}[{rows},{columns}] broadcast(row), dimensions={{1}}
  y = {element}[{rows},{columns}] subtract(x, rows)
  first = {element}[] constant({initial})
  ROOT z = {element}[{columns}] reduce(y, first), dimensions={{0}}, to_apply=combine
}}"""


@pytest.mark.parametrize("element", ["f32", "f64"])
@pytest.mark.parametrize(("rows", "columns", "joined"), _SIZES)
def test_sums_over_rows(
    rows: int, columns: int, joined: bool, element: str, context: Context, rng: np.random.Generator
) -> None:
    x, row = (rng.standard_normal(s).astype(_DTYPES[element]) for s in ((rows, columns), columns))
    x[0, 0], x[-1, 1] = np.inf, np.nan
    memory = context.devices[0].default_memory
    with compile(context, _reduction(rows, columns, element, "add", "0")) as executable:
        assert _is_joined(executable.artifact(Artifact.EXPLANATION).decode(), rows, columns) == joined
        ours = get(run(executable, put(memory, x), put(memory, row))[0])
    # Sums of floats are kept in double; those of doubles may round at each step.
    bound = 2 if element == "f32" else rows / 2
    assert ours[0] == np.inf
    assert np.isnan(ours[1])
    for column in range(2, columns):
        terms = x[:, column] - row[column]
        assert abs(ours[column] - math.fsum(terms)) <= bound * np.spacing(np.abs(terms).sum())


@pytest.mark.parametrize(
    ("opcode", "initial"), [("maximum", "-inf"), ("minimum", "inf"), ("maximum", "0.5"), ("add", "2"), ("add", "-0")]
)
def test_how_reductions_begin(opcode: str, initial: str, context: Context, rng: np.random.Generator) -> None:
    """At most once, also where what they begin with is no identity; a sum of -0 stays -0."""
    x = np.round(rng.standard_normal((512, 16)) * 4).astype(np.float32)
    x[:, 0] = -0.0
    row = np.zeros(16, np.float32)
    text = _reduction(512, 16, "f32", opcode, initial)
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        ours = get(run(executable, put(memory, x), put(memory, row))[0])
    (theirs,) = run_on_xla(hlo_of_text(text), (x, row))
    assert ours.tobytes() == np.asarray(theirs).tobytes()


def test_an_array_that_is_given_up_is_overwritten(context: Context, rng: np.random.Generator) -> None:
    text = """HloModule scaled, input_output_alias={ {}: (0, {}, must-alias) }
ENTRY main {
  x = f32[512,16] parameter(0)
  row = f32[16] parameter(1)
  rows = f32[512,16] broadcast(row), dimensions={1}
  ROOT y = f32[512,16] multiply(x, rows)
}"""
    x, row = (rng.standard_normal(s).astype(np.float32) for s in ((512, 16), 16))
    memory = context.devices[0].default_memory
    with compile(context, text) as executable:
        ours = get(run(executable, put(memory, x), put(memory, row))[0])
    np.testing.assert_array_equal(ours, x * row)
