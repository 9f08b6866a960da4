"""Plans of accelerators, divided anywhere: generated kernels make results in their places, fill buffers in parts and
write over arguments. The oracle is the plan as it was; replays run on poisoned memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from flagos_backend.compile import accelerator_plan as plan
from flagos_backend.devices.target import Target
from flagos_backend.importer import import_module
from flagos_backend.ir.hlo import Module
from flagos_backend.ir.types import leaves
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator import segments
from support.against_xla import hlo_of_text, to_storage
from support.passes import for_accelerator
from support.poisoned_replays import PoisonedReplay, assert_same, breaking_anywhere

TARGET = Target("cpu", vendor="simulated", architecture="host", multiprocessors=2, warp_size=1)
RUN = Run()
LESS = "less { a = f32[] parameter(0) b = f32[] parameter(1) ROOT c = pred[] compare(a, b), direction=LT }\n"

PROGRAMS = {
    "a concatenation that several kernels fill": """
      e = f32[4,6] exponential(x)
      t = f32[4,6] sort(e), dimensions={1}, to_apply=less
      d = f32[4,5] dot(t, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      a = f32[4,5] tanh(d)
      c = f32[4,17] concatenate(a, e, t), dimensions={1}
      n = f32[4,17] negate(c)
      s = f32[4,17] sort(n), dimensions={1}, to_apply=less
      ROOT r = (f32[4,17], f32[4,17], f32[68]) tuple(s, c, f)
      f = f32[68] reshape(c)""",
    "arguments written over": """
      e = f32[4,6] exponential(x)
      s = f32[4,6] sort(e), dimensions={1}, to_apply=less
      m = f32[4,6] add(s, x)
      t = f32[4,6] sort(m), dimensions={1}, to_apply=less
      d = f32[4,5] dot(t, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      q = f32[6,5] negate(y)
      k = f32[6,5] sort(q), dimensions={1}, to_apply=less
      p = f32[6,5] multiply(k, y)
      ROOT r = (f32[4,5], f32[6,5], f32[4,6]) tuple(d, p, m)""",
    "views": """
      e = f32[4,6] exponential(x)
      h = f32[24] reshape(e)
      s = f32[24] sort(h), dimensions={0}, to_apply=less
      v = f32[6,4] reshape(s)
      w = f32[4,6] transpose(v), dimensions={1,0}
      z = f32[4,6] sort(w), dimensions={1}, to_apply=less
      ROOT r = (f32[4,6], f32[6,4], f32[24], f32[4,6]) tuple(z, v, s, w)""",
}  # fmt: skip


def divided_and_not(module: Module, donated: Sequence[int], arrays: Sequence[np.ndarray], seed: int) -> int:
    """Checks that both give the same bytes; returns the number of segments."""
    shapes = [leaf for parameter in module.entry.parameters for leaf in leaves(parameter.shape)]

    def arguments() -> list[torch.Tensor]:
        return [to_storage(array, shape) for array, shape in zip(arrays, shapes, strict=True)]

    with torch.inference_mode():
        built = plan.build(module.entry, donated, torch.device("cpu"), TARGET)
        expected = built.run(RUN, arguments())
        division = segments.divide(built, breaking_anywhere(seed, lambda part: PoisonedReplay(part, RUN)))
        for _ in range(2):
            results = division.plan.run(RUN, arguments())
            for ours, theirs in zip(results, expected, strict=True):
                assert_same(ours, theirs, f"seed {seed}\n{division}")
    return sum(part.segment is not None for part in division.parts)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MIN_STEPS", 1)
    monkeypatch.setattr(segments, "MAX_REFUSALS", 1000)


@pytest.mark.parametrize("what", PROGRAMS)
@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_programs_divided_anywhere(what: str, donated: tuple[int, ...], rng: np.random.Generator) -> None:
    lines = PROGRAMS[what].strip().splitlines()
    body = "\n".join(sorted(lines, key=lambda line: "ROOT" in line))
    text = f"{LESS}ENTRY main {{\n x = f32[4,6] parameter(0)\n y = f32[6,5] parameter(1)\n{body}\n}}"
    module = for_accelerator(import_module(hlo_of_text(text)))
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 6), (6, 5))]
    found = [divided_and_not(module, donated, arrays, int(rng.integers(1 << 31))) for _ in range(8)]
    assert max(found) > 1
