"""The vLLM suite's tests, its table, and how flagos is found in the environment that has vLLM."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

from tools.conformance import vllm


def test_names_are_read_as_they_are_written() -> None:
    names = [name for which in ("first start", "second start", "inductor") for name in vllm.tests(which)]
    assert len(set(names)) == 3 * len(vllm.MODELS) * len(vllm.MODES)
    for name in names:
        model, mode, which = name.split(" ", 2)
        assert model in vllm.MODELS and int(mode.removeprefix("mode-")) in vllm.MODES
        assert name in vllm.tests(which)


def test_later_figures_win_and_what_did_not_run_is_a_dash(tmp_path: Path) -> None:
    runs = [
        {"name": "llama mode-3 first start", "start": 99.0, "rate": 1.0, "eager rate": 1.0},
        {"name": "llama mode-3 first start", "start": 20.0, "rate": 400.0, "eager rate": 300.0},
        {"name": "llama mode-3 second start", "start": 5.0, "rate": 410.0, "eager rate": 310.0},
        {"name": "gemma mode-1 inductor", "start": 8.0, "rate": 200.0, "eager rate": 100.0},
    ]
    (tmp_path / "figures.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    _, _, *rows = vllm.table(vllm.figures(tmp_path)).splitlines()
    assert [row.split() for row in rows] == [
        ["llama", "3", "20.00", "5.00", "0.25", "-", "400.00", "-", "-", "300.00"],
        ["gemma", "1", "-", "-", "-", "8.00", "-", "200.00", "-", "-"],
    ]


def test_another_environment_finds_this_flagos_alone(tmp_path: Path) -> None:
    vllm.link(tmp_path)
    vllm.link(tmp_path)  # as a second run does
    assert {path.name for path in tmp_path.iterdir()} == {"flagos_backend", "plugin_abi", "flagos-0.dist-info"}
    found = importlib.metadata.Distribution.at(tmp_path / "flagos-0.dist-info").entry_points
    (plugin,) = found.select(group="vllm.general_plugins")
    assert plugin.name == "flagos"
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {plugin.module} import {plugin.attr}"
    subprocess.run([sys.executable, "-S", "-P", "-c", program], check=True)
