"""Random plans, divided into segments anywhere, whose replays run on poisoned memory: the same results as undivided."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from flagos_backend.compile.plan_builder import build_plan
from flagos_backend.ir.types import leaves
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator import segments
from flagos_backend.runtime.plan import Plan
from support.against_xla import to_storage
from support.poisoned_replays import PoisonedReplay, assert_same, breaking_anywhere
from tools.fuzz.program import Program, random_program

RUN = Run()


def _append_results(outcomes: list[list[torch.Tensor]], plan: Plan, program: Program) -> None:
    shapes = [leaf for parameter in program.module.entry.parameters for leaf in leaves(parameter.shape)]
    arguments = [to_storage(array, shape) for array, shape in zip(program.arguments(), shapes, strict=True)]
    with torch.inference_mode():
        outcomes.append(plan.run(RUN, arguments))


def test_random_programs_divided_anywhere_in_several_threads(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MIN_STEPS", 1)
    monkeypatch.setattr(segments, "MAX_REFUSALS", 1000)
    replayed = 0
    for seed in map(int, rng.integers(1 << 31, size=60)):
        program = random_program(seed)
        outcomes: list[list[torch.Tensor]] = []
        donated = [n for n in range(len(program.arguments())) if rng.random() < 0.5]
        with torch.inference_mode():
            plan = build_plan(program.module.entry, donated)
        _append_results(outcomes, plan, program)
        with torch.inference_mode():
            division = segments.divide(plan, breaking_anywhere(seed, lambda part: PoisonedReplay(part, RUN)))
        replayed += sum(part.segment is not None for part in division.parts)
        threads = [threading.Thread(target=_append_results, args=(outcomes, division.plan, program)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 4, f"seed {seed}"
        expected, *others = outcomes
        for results in others:
            for ours, theirs in zip(results, expected, strict=True):
                assert_same(ours, theirs, f"seed {seed}")
    assert replayed > 60
