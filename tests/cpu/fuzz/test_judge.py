"""What XLA rounds worse than flagos is no finding of the judge; one wrong element beside it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from jaxlib import _hlo

from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Module
from plugin_abi.host import Buffer, Executable
from tools.fuzz.verdict import Judge, Kind

Array = np.ndarray[Any, Any]

# Where a difference is XLA's: its complex sine loses digits, it rounds a sum of float16 after each addition, its tanh
# is short of 1, and it adds up the starts of gathers that are slices, unclamped.
_SINE = """ENTRY main {
  x = c64[64] parameter(0)
  ROOT y = c64[64] sine(x)
}"""
_SUM = """add {
  a = f16[] parameter(0)
  b = f16[] parameter(1)
  ROOT c = f16[] add(a, b)
}
ENTRY main {
  x = f16[2,3000] parameter(0)
  zero = f16[] constant(0)
  ROOT sums = f16[2] reduce(x, zero), dimensions={1}, to_apply=add
}"""
_SATURATED = """ENTRY main {
  x = f32[64] parameter(0)
  y = s16[64,31] parameter(1)
  saturated = f32[64] tanh(x)
  ones = s16[64] convert(saturated)
  product = s16[31] dot(ones, y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT both = (s16[64], s16[31]) tuple(ones, product)
}"""
_GATHERS = """ENTRY main {
  x = f32[1,31,1] parameter(0)
  start = s64[3] parameter(1)
  next = s64[1] parameter(2)
  window = f32[24] gather(x, start), offset_dims={0}, collapsed_slice_dims={0,2}, start_index_map={0,1,2},
    index_vector_dim=0, slice_sizes={1,24,1}
  ROOT last = f32[1] gather(window, next), offset_dims={0}, collapsed_slice_dims={}, start_index_map={0},
    index_vector_dim=0, slice_sizes={1}
}"""


def _sine_arguments(rng: np.random.Generator) -> list[Array]:
    return [(rng.uniform(-200, 200, 64) + 1j * rng.uniform(-80, 80, 64)).astype(np.complex64)]


def _sum_arguments(rng: np.random.Generator) -> list[Array]:
    return [rng.uniform(0, 0.5, (2, 3000)).astype(np.float16)]


def _saturated_arguments(rng: np.random.Generator) -> list[Array]:
    # Beyond 9.02 the nearest float is 1.
    return [rng.uniform(9.1, 20, 64).astype(np.float32), rng.integers(-30000, 30000, (64, 31)).astype(np.int16)]


def _gather_arguments(rng: np.random.Generator) -> list[Array]:
    x = rng.standard_normal((1, 31, 1)).astype(np.float32)
    return [x, np.array([0, rng.integers(20, 31), 0]), np.array([rng.integers(0, 20)])]


@dataclass(frozen=True)
class _Wrong:
    """An engine with one wrong element in its first output."""

    engine: Any
    element: int
    change: Callable[[Any], Any]

    def run(self, module: Module, arguments: Sequence[Array]) -> list[Array]:
        first, *others = self.engine.run(module, arguments)
        first = first.copy()
        first.reshape(-1)[self.element] = self.change(first.reshape(-1)[self.element])
        return [first, *others]


@pytest.mark.parametrize(
    ("text", "arguments", "change"),
    [
        pytest.param(_SINE, _sine_arguments, lambda x: x * np.float32(1 + 2**-15), id="complex sine"),
        pytest.param(_SUM, _sum_arguments, lambda x: x * np.float16(1.25), id="sum of float16"),
        pytest.param(_SATURATED, _saturated_arguments, lambda x: x + 1, id="tanh converted to integers"),
        pytest.param(_GATHERS, _gather_arguments, lambda x: np.nextafter(x, 9, dtype=np.float32) + 1, id="gathers"),
    ],
)
def test_what_xla_rounds_is_no_finding_and_one_wrong_element_is(
    text: str,
    arguments: Callable[[np.random.Generator], list[Array]],
    change: Callable[[Any], Any],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = import_module(_hlo.hlo_module_from_text(f"HloModule m\n{text}").as_serialized_hlo_module_proto())
    values = arguments(rng)
    judge = Judge()
    verdict = judge.judge(module, values)
    assert not verdict.is_failure and verdict.kind is not Kind.ORACLE_REFUSES, verdict.message
    element = int(rng.integers(1 if text is _GATHERS else 2))
    monkeypatch.setattr(judge, "_flagos", _Wrong(judge._flagos, element, change))
    assert judge.judge(module, values).kind is Kind.DIFFERENT


def test_an_argument_that_is_written_over_is_a_finding(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(_hlo.hlo_module_from_text(f"HloModule m\n{_SINE}").as_serialized_hlo_module_proto())
    execute = Executable.execute

    def written_over(executable: Executable, arguments: list[list[Buffer]], **options: Any) -> Any:
        (buffers,) = arguments
        changed = bytes(len(buffers[0].to_host()))
        done = execute(executable, arguments, **options)
        monkeypatch.setattr(Buffer, "to_host", lambda _: changed)
        return done

    monkeypatch.setattr(Executable, "execute", written_over)
    verdict = Judge().judge(module, _sine_arguments(rng))
    assert verdict.kind is Kind.CHANGED and verdict.is_failure
