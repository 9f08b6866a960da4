"""Scalar functions run element by element on arrays, with an independent result for each element."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.errors import UnsupportedOpcode
from flagos_backend.importer import import_module
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.kernels.reference.scalar_functions import scalar_function
from support.against_xla import hlo_of_text

TEXT = """
f { a = f32[] parameter(0)
  b = f32[] parameter(1)
  two = f32[] constant(2)
  less = pred[] compare(a, b), direction=LT
  d = f32[] multiply(a, two)
  ROOT r = f32[] select(less, d, b) }
ENTRY e { x = f32[3] parameter(0)
  ROOT r = f32[3] map(x, x), dimensions={0}, to_apply=f }"""


def test_works_on_arrays() -> None:
    module = import_module(hlo_of_text(TEXT))
    function = scalar_function(module.entry.root.called[0])
    a, b = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([3.0, 4.0, 2.0])
    (result,) = function(Run(), [a, b])
    assert result.tolist() == [2.0, 4.0, 2.0]


@pytest.mark.parametrize("selector", ["pred[] compare(a, b), direction=LT", "s32[] convert(a)"])
def test_each_element_keeps_its_own_branch(selector: str, rng: np.random.Generator) -> None:
    branch_names = "true_computation=first, false_computation=second"
    if selector.startswith("s32"):
        branch_names = "branch_computations={first, second, first}"
    text = f"""
    first {{ p = (f32[], f32[]) parameter(0)
      x = f32[] get-tuple-element(p), index=0
      y = f32[] get-tuple-element(p), index=1
      s = f32[] subtract(x, y)
      ROOT t = (f32[], f32[]) tuple(s, x) }}
    second {{ p = (f32[], f32[]) parameter(0)
      x = f32[] get-tuple-element(p), index=0
      y = f32[] get-tuple-element(p), index=1
      m = f32[] multiply(x, y)
      ROOT t = (f32[], f32[]) tuple(y, m) }}
    f {{ a = f32[] parameter(0)
      b = f32[] parameter(1)
      t = (f32[], f32[]) tuple(a, b)
      c = {selector}
      r = (f32[], f32[]) conditional(c, {", ".join(["t"] * branch_names.count("first") + ["t"])}), {branch_names}
      u = f32[] get-tuple-element(r), index=0
      v = f32[] get-tuple-element(r), index=1
      ROOT w = f32[] add(u, v) }}
    ENTRY e {{ x = f32[40] parameter(0)
      y = f32[40] parameter(1)
      ROOT r = f32[40] map(x, y), dimensions={{0}}, to_apply=f }}"""
    module = import_module(hlo_of_text(text))
    function = scalar_function(module.entry.root.called[0])
    a, b = (torch.from_numpy(rng.uniform(-2, 4, 40).astype(np.float32)) for _ in range(2))
    first, second = (a - b) + a, b + a * b
    number = a.to(torch.int32)
    mask = a < b if selector.startswith("pred") else number != 1  # out of range: the last, which is the first again
    (result,) = function(Run(), [a, b])
    torch.testing.assert_close(result, torch.where(mask, first, second))


def test_a_result_that_depends_on_no_argument_is_a_scalar() -> None:
    text = """
    f { a = f32[] parameter(0)
      ROOT two = f32[] constant(2) }
    ENTRY e { x = f32[3] parameter(0)
      ROOT r = f32[3] map(x), dimensions={0}, to_apply=f }"""
    module = import_module(hlo_of_text(text))
    (result,) = scalar_function(module.entry.root.called[0])(Run(), [torch.ones(3)])
    assert result.shape == () and result.item() == 2


def test_a_loop_runs_each_element_as_long_as_it_needs(rng: np.random.Generator) -> None:
    """Steps of the Collatz iteration."""
    text = """
    body { p = (s32[], s32[]) parameter(0)
      n = s32[] get-tuple-element(p), index=0
      k = s32[] get-tuple-element(p), index=1
      one = s32[] constant(1)
      two = s32[] constant(2)
      three = s32[] constant(3)
      half = s32[] divide(n, two)
      m = s32[] multiply(n, three)
      odd = s32[] add(m, one)
      rest = s32[] and(n, one)
      isodd = pred[] compare(rest, one), direction=EQ
      next = s32[] select(isodd, odd, half)
      k2 = s32[] add(k, one)
      ROOT t = (s32[], s32[]) tuple(next, k2) }
    condition { p = (s32[], s32[]) parameter(0)
      n = s32[] get-tuple-element(p), index=0
      one = s32[] constant(1)
      ROOT r = pred[] compare(n, one), direction=GT }
    f { n = s32[] parameter(0)
      zero = s32[] constant(0)
      t = (s32[], s32[]) tuple(n, zero)
      w = (s32[], s32[]) while(t), condition=condition, body=body
      ROOT k = s32[] get-tuple-element(w), index=1 }
    ENTRY e { x = s32[50] parameter(0)
      ROOT r = s32[50] map(x), dimensions={0}, to_apply=f }"""
    numbers = rng.integers(1, 1000, 50)

    def collatz(n: int) -> int:
        return 0 if n == 1 else 1 + collatz(3 * n + 1 if n % 2 else n // 2)

    (result,) = build_plan(import_module(hlo_of_text(text)).entry).run(
        Run(), [torch.from_numpy(numbers.astype(np.int32))]
    )
    assert result.tolist() == [collatz(int(n)) for n in numbers]


def test_an_array_instruction_is_refused_by_name() -> None:
    text = """
    f { a = f32[] parameter(0)
      b = f32[] parameter(1)
      i = f32[4] broadcast(a), dimensions={}
      s = f32[1] slice(i), slice={[0:1]}
      q = f32[] reshape(s)
      ROOT r = f32[] add(q, b) }
    ENTRY e { x = f32[3] parameter(0)
      z = f32[] constant(0)
      ROOT r = f32[] reduce(x, z), dimensions={0}, to_apply=f }"""
    with pytest.raises(UnsupportedOpcode, match=r"broadcast.*scalar function"):
        build_plan(import_module(hlo_of_text(text)).entry)
