"""What torch.profiler shows of launches: read back from its own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from flagos_backend.frontends.torch.compile import profiling


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x @ w), -1)


def exported(listener: profile, path: Path) -> dict[str, Any]:
    listener.export_chrome_trace(str(path))
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def launches(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("name", "").startswith("flagos: ")]


@pytest.mark.parametrize("shapes", [False, True], ids=["by default", "with shapes"])
def test_a_launch_is_an_event(place: str, shapes: bool, tmp_path: Path) -> None:
    compiled = torch.compile(function, backend="flagos")
    x, w = torch.randn(64, 32, device=place), torch.randn(32, 48, device=place)
    compiled(x, w)
    with profile(record_shapes=shapes) as listener:
        found = compiled(x, w)
        compiled(x, w)
    torch.testing.assert_close(found, function(x, w))
    trace = exported(listener, tmp_path / "trace.json")
    first, second = launches(trace)
    assert first["name"] == second["name"] and first["dur"] > 0
    described = trace[first["name"]]
    assert described["flops"] >= 2 * 64 * 32 * 48
    assert described["bytes"] >= 4 * (64 * 32 + 32 * 48 + 64 * 48)
    [product] = [step for step in described["steps"] if step["kind"] == "product"]
    assert (product["flops"], product["operation"]) == (2 * 64 * 32 * 48, "mm")
    here = f"{__file__}:{function.__code__.co_firstlineno + 1}"
    assert product["source"] == described["source"] == here
    assert product["provider"] and product["kernel"] and product["bytes"] > 0
    assert all(step["measured_ns"] > 0 for step in described["steps"])
    if shapes:
        facts = {name: value for name, value in described.items() if value and name != "steps"}
        assert {name: first["args"].get(name) for name in facts} == facts
        assert first["args"]["Input Dims"] == [[64, 32], [32, 48]]
    else:
        assert "fingerprint" not in first["args"]


def test_each_trace_describes_its_programs(tmp_path: Path) -> None:
    compiled = torch.compile(function, backend="flagos")
    x, w = torch.randn(4, 3), torch.randn(3, 5)
    compiled(x, w)
    for number in range(2):
        with profile() as listener:
            compiled(x, w)
        trace = exported(listener, tmp_path / f"{number}.json")
        [event] = launches(trace)
        assert event["name"] in trace


def test_nobody_looks_while_no_profiler_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def observe(_self: Any, launch: Any, inputs: list[Any]) -> Any:
        seen.append(len(inputs))
        return launch(inputs)

    monkeypatch.setattr(profiling.Observer, "__call__", observe)
    compiled = torch.compile(function, backend="flagos")
    x, w = torch.randn(4, 3), torch.randn(3, 5)
    compiled(x, w)
    assert not seen
    with profile():
        compiled(x, w)
    assert seen == [2]
    compiled(x, w)
    assert seen == [2]


def test_an_error_of_a_launch_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_self: Any, _launch: Any, _inputs: list[Any]) -> Any:
        raise RuntimeError("no such device")

    compiled = torch.compile(function, backend="flagos")
    x, w = torch.randn(4, 3), torch.randn(3, 5)
    compiled(x, w)
    monkeypatch.setattr(profiling.Observer, "__call__", failing)
    with profile(), pytest.raises(RuntimeError, match="no such device"):
        compiled(x, w)


def test_names_that_would_break_the_file() -> None:
    assert profiling._plain('a"b\\c\nd\u2028é.py') == "a_b_c_d__.py"
