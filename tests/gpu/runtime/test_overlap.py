"""Collectives that are recorded beside what does not wait for them, on one device: what they are made of takes long, so
that whatever does not wait for it is wrong. The oracle is the same plan, run step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from flagos_backend.collectives.communicator import Combine, Rendezvous
from flagos_backend.compile import accelerator_plan as plan
from flagos_backend.devices.accelerator import TorchAccelerator
from flagos_backend.errors import CaptureRefused
from flagos_backend.ir.hlo import Module
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator.capture import Recording
from flagos_backend.runtime.accelerator.memory import GraphMemory
from flagos_backend.runtime.plan import Plan
from support.square_programs import DEVICES, Alike, Square

S = Square(256)
DEVICE = torch.device("cuda", 0)
# About a tenth of a millisecond, in which kernels of these sizes end by the dozen.
_CYCLES = 200_000
REPLAYS = 20


class Slow(Alike):
    """``breaks_at``: the collective, by number, that fails."""

    def __init__(self, breaks_at: int = -1) -> None:
        self._left = breaks_at

    def recorded(self, moves: Any) -> Slow:
        return self

    def exchange(self, rendezvous: Rendezvous, contribution: Any, combine: Combine) -> Any:
        if self._left == 0:
            raise RuntimeError("the transport is broken")
        self._left -= 1
        torch.cuda._sleep(_CYCLES)
        results = super().exchange(rendezvous, contribution, combine)
        torch.cuda._sleep(_CYCLES)
        return results


class Recorded:
    """A plan in a graph, with its temporaries in ``memory``, and arrays of its own."""

    def __init__(self, built: Plan, memory: GraphMemory, communicator: Slow) -> None:
        shapes = (*built.shapes_of(built.parameters), *built.result_shapes)
        self._arrays = [torch.empty(shape.dims, device=DEVICE) for shape in shapes]
        self._count = len(built.parameters)
        run = Run(num_partitions=DEVICES, device=DEVICE, communicator=communicator)
        self._recording = Recording(built, run, self._arrays, None, memory)
        self._recording.graph.instantiate()

    def __call__(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        for array, argument in zip(self._arrays, arguments, strict=False):
            array.copy_(argument)
        torch.cuda.synchronize()
        self._recording.graph.replay()
        torch.cuda.synchronize()
        over, own = self._recording.overwritten, self._arrays[self._count :]
        return [self._arrays[o] if o >= 0 else output for o, output in zip(over, own, strict=True)]


def built_of(module: Module, donated: Sequence[int]) -> Plan:
    return plan.build(module.entry, donated, DEVICE, TorchAccelerator("cuda", 0).target)


def drawn(rng: np.random.Generator) -> list[torch.Tensor]:
    return [torch.from_numpy(rng.standard_normal((S.size, S.size)).astype(np.float32)).to(DEVICE) for _ in range(2)]


def by_steps(built: Plan, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    run = Run(num_partitions=DEVICES, device=DEVICE, communicator=Alike())
    results = built.run(run, [argument.clone() for argument in arguments])
    torch.cuda.synchronize()
    return results


@pytest.mark.parametrize("donated", [(), (0, 1)])
@pytest.mark.parametrize("case", range(4))
def test_programs_of_chance(case: int, donated: Sequence[int], rng: np.random.Generator) -> None:
    with torch.inference_mode():
        built = built_of(S.module_of_chance(rng, 24), donated)
        by_steps(built, drawn(rng))
        recorded = Recorded(built, GraphMemory(DEVICE), Slow())
        for _ in range(REPLAYS):
            arguments = drawn(rng)
            expected = by_steps(built, arguments)
            for ours, theirs in zip(recorded(arguments), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("breaks_at", [0, 1])
def test_a_recording_that_breaks_leaves_nothing(breaks_at: int, rng: np.random.Generator) -> None:
    """Its stream, and the memory that other recordings share, are as they were."""
    with torch.inference_mode():
        built, memory = built_of(S.two_sums(), ()), GraphMemory(DEVICE)
        by_steps(built, drawn(rng))
        graphs = [Recorded(built, memory, Slow())]
        for _ in range(3):
            with pytest.raises(CaptureRefused, match="the transport is broken"):
                Recorded(built, memory, Slow(breaks_at))
            graphs.append(Recorded(built, memory, Slow()))
            for graph in graphs:
                arguments = drawn(rng)
                for ours, theirs in zip(graph(arguments), by_steps(built, arguments), strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
