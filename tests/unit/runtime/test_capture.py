"""Where the arrays of two captures lie, with graphs that record nothing: plans run on the host instead."""

from __future__ import annotations

import contextlib

import pytest
import torch

from flagos_backend.errors import CaptureRefused
from flagos_backend.importer import import_module
from flagos_backend.kernels.reference.registry import Run
from flagos_backend.runtime.accelerator import capture as capture_module
from flagos_backend.runtime.accelerator.capture import Captures, capture, reason_against
from flagos_backend.runtime.plan import Plan
from support.against_xla import hlo_of_text

TEXT = """
ENTRY main {
  x = f32[3,5] parameter(0)
  y = f32[512] parameter(1)
  z = f32[0] parameter(2)
  sum = f32[3,5] add(x, x)
  zero = s32[] constant(0)
  one = f32[1] constant({1})
  updated = f32[512] dynamic-update-slice(y, one, zero)
  ROOT both = (f32[3,5], f32[512], f32[0]) tuple(sum, updated, z)
}"""


class _Graph:
    """Stands for torch.cuda.CUDAGraph."""

    open = 0
    made = 0

    def __init__(self, keep_graph: bool = False) -> None:
        type(self).made += 1
        self.number = self.made

    def capture_begin(self, capture_error_mode: str) -> None:
        type(self).open += 1

    def capture_end(self) -> None:
        type(self).open -= 1

    def raw_cuda_graph(self) -> int:
        return self.number

    def pool(self) -> tuple[int, int]:
        return 0, self.number


@pytest.fixture
def host_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot() -> list[dict[str, object]]:
        return [
            {"device": 0, "segment_pool_id": (0, number), "address": 1000 * number, "total_size": 10}
            for number in range(_Graph.made + 1)
        ]

    monkeypatch.setattr(_Graph, "made", 0)
    monkeypatch.setattr(_Graph, "open", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: None, raising=False)


def captured(text: str) -> Captures:
    module = import_module(hlo_of_text(text))
    with torch.inference_mode():
        plan = Plan.build(module.entry, donated=[1])
        shapes = [parameter.shape for parameter in module.entry.parameters]
        return capture(plan, Run(device=torch.device("cpu", 0)), shapes)


@pytest.mark.usefixtures("host_graphs")
def test_every_array_moves_by_a_distance_of_its_own() -> None:
    captures = captured(TEXT)
    assert [num_bytes for _, _, num_bytes in captures.arrays] == [60, 2048, 0, 60, 2048, 0]
    distances = [second - first for first, second, _ in captures.arrays]
    assert len(set(distances)) == len(distances) and 0 not in distances
    assert all(address % 256 == captures.arrays[0][0] % 256 for pair in captures.arrays for address in pair[:2])


@pytest.mark.usefixtures("host_graphs")
def test_a_result_over_an_argument_is_told_from_one_that_is_copied() -> None:
    captures = captured(TEXT)
    assert captures.overwritten == (-1, 1, -1)


@pytest.mark.usefixtures("host_graphs")
def test_memory_of_the_captures_own_is_told_apart_by_their_pools() -> None:
    captures = captured(TEXT)
    assert captures.graphs == ((1, ((1000, 10),)), (2, ((2000, 10),)), (3, ((3000, 10),)))


@pytest.mark.usefixtures("host_graphs")
def test_a_capture_that_breaks_is_ended_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(*_: object) -> int:
        raise RuntimeError("not while capturing\nand more")

    monkeypatch.setattr(capture_module, "_settle", settle)
    with pytest.raises(CaptureRefused, match=r"RuntimeError: not while capturing\. It runs"):
        captured(TEXT)
    assert _Graph.open == 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("ROOT y = f32[3] add(x, x)", ""),
        ('ROOT y = f32[3] custom-call(x), custom_call_target="flagos.host_callback"', "calls the host"),
        ('ROOT y = f32[3] custom-call(x), custom_call_target="t", custom_call_has_side_effect=true', "a side effect"),
        ('ROOT y = f32[3] custom-call(x), custom_call_target="aten::native_dropout"', "draws from a generator"),
        ("ROOT y = f32[3] all-gather(x), replica_groups={{0}}, dimensions={0}", "waits for other devices"),
    ],
)
def test_what_is_not_captured(body: str, reason: str) -> None:
    module = import_module(hlo_of_text(f"ENTRY main {{\n  x = f32[3] parameter(0)\n  {body}\n}}"))
    found = reason_against(module, 1)
    assert reason in found and bool(reason) == bool(found)


def test_programs_of_too_many_steps_are_not_captured() -> None:
    module = import_module(hlo_of_text(TEXT))
    assert "more than" in reason_against(module, 10 * capture_module.MAX_STEPS)
