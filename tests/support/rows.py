"""Programs over rows, what their plan says, and how close results have to be."""

from __future__ import annotations

import numpy as np

from cpu.native.harness import compile, get, put, run
from plugin_abi.host import Artifact, Context


def reducer(name: str, element: str, opcode: str) -> str:
    return f"""
{name} {{
  a = {element}[] parameter(0)
  b = {element}[] parameter(1)
  ROOT c = {element}[] {opcode}(a, b)
}}"""


def softmax(rows: int, columns: int, element: str) -> str:
    """softmax over the last dimension, in f32 for 16-bit types."""
    wide = "f64" if element == "f64" else "f32"
    return f"""{reducer("greatest", wide, "maximum")}{reducer("sum", wide, "add")}
ENTRY main {{
  x = {element}[{rows},{columns}] parameter(0)
  wide = {wide}[{rows},{columns}] convert(x)
  least = {wide}[] constant(-inf)
  zero = {wide}[] constant(0)
  top = {wide}[{rows}] reduce(wide, least), dimensions={{1}}, to_apply=greatest
  tops = {wide}[{rows},{columns}] broadcast(top), dimensions={{0}}
  shifted = {wide}[{rows},{columns}] subtract(wide, tops)
  e = {wide}[{rows},{columns}] exponential(shifted)
  total = {wide}[{rows}] reduce(e, zero), dimensions={{1}}, to_apply=sum
  totals = {wide}[{rows},{columns}] broadcast(total), dimensions={{0}}
  quotient = {wide}[{rows},{columns}] divide(e, totals)
  ROOT y = {element}[{rows},{columns}] convert(quotient)
}}"""


def explained(context: Context, text: str, *arguments: np.ndarray) -> tuple[list[np.ndarray], str]:
    """The results of a program, and what it became."""
    with compile(context, text) as executable:
        buffers = [put(context.devices[0].default_memory, a) for a in arguments]
        results = [get(buffer) for buffer in run(executable, *buffers)]
        return results, executable.artifact(Artifact.EXPLANATION).decode()


def assert_close(ours: np.ndarray, exact: np.ndarray, tolerance: float) -> None:
    ours = ours.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(exact))
    np.testing.assert_allclose(ours, exact, rtol=tolerance, atol=tolerance)
