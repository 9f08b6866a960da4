"""The conformance suite of FlagGems (tools/conformance): a sample of it passes, and it sees what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from flagos_backend.kernels.flaggems import guards, loading
from support.flaggems import SIMULATED
from tools.conformance import flaggems, report
from tools.conformance.aten_calls import Call, load, save
from tools.conformance.flaggems_inputs import cases_of, functional, recorded
from tools.conformance.flaggems_worker import Runner
from tools.conformance.records import Status

OPERATORS = ("addcdiv", "count_nonzero", "index_add", "eq", "nn.functional.softplus", "nn.functional.gelu")


def runner(cases: dict[str, list[Call]]) -> Runner:
    return Runner(cases, SIMULATED, torch.device("cpu"))


@pytest.fixture
def sample(flag_gems):
    """Cases of a few operators, on fresh inputs."""
    seed = int(os.environ["FLAGOS_TEST_SEED"])
    calls = recorded(functional(), [op for op in op_db if op.name in OPERATORS], seed)
    return cases_of(calls, samples=20)


def test_a_sample_passes(sample):
    outcomes = {name: runner(sample)(name) for name in sample}
    assert not {n: message for n, (status, message) in outcomes.items() if status is Status.FAILED}
    for name in ("addcdiv float32", "softplus float32", "gelu_backward float16", "count_nonzero int64"):
        assert outcomes[name][0] is Status.PASSED, name
    assert outcomes["addcdiv float32"][1].startswith("refused in part")
    assert outcomes["softplus float64"] == (Status.REFUSED, "FlagGems' softplus computes f64 in f32")
    assert outcomes["gelu bfloat16"][0] is Status.SKIPPED


def test_it_finds_what_the_guards_are_for(sample, monkeypatch):
    monkeypatch.setattr(guards, "_GUARDS", ())
    for name, found in (
        ("addcdiv float32", "raises RuntimeError: out tensor at index 0 shape is invalid"),
        ("index_add int16", "raises ValueError: atomic_add does not support int16"),
        ("eq.Tensor int64", "differs of large integers"),
    ):
        status, message = runner(sample)(name)
        assert status is Status.FAILED and found in message, name


def test_it_sees_wrong_values_and_errors(sample, monkeypatch):
    exact = loading.functions()["softplus"]
    case = runner({"softplus": sample["softplus float32"]})
    assert case("softplus")[0] is Status.PASSED
    monkeypatch.setitem(loading.functions(), "softplus", lambda *args: exact(*args) * (1 + 1e-4))
    status, message = case("softplus")
    assert status is Status.FAILED and "differs: result 0" in message
    monkeypatch.setitem(loading.functions(), "softplus", lambda *args: 1 / 0)
    status, message = case("softplus")
    assert status is Status.FAILED and "raises ZeroDivisionError" in message


def test_it_sees_kernels_that_ignore_strides(flag_gems, draw, monkeypatch):
    monkeypatch.setitem(loading.functions(), "neg", lambda x: -x.as_strided(x.shape, (x.shape[1], 1)))
    case = runner({"neg": [Call("neg", (draw(3, 4).t().contiguous().t(),))]})
    assert case("neg")[0] is Status.PASSED, "they get what is dense"
    monkeypatch.setattr(guards, "contiguous", lambda function: function)
    assert case("neg")[0] is Status.FAILED


def test_calls_are_kept_in_files(tmp_path: Path, draw):
    arguments = (draw(2, 3).to(torch.uint16), [1, None], torch.preserve_format)
    save({"a": [Call("view", arguments, {"dtype": torch.float16})]}, str(tmp_path / "calls"))
    (call,) = load(str(tmp_path / "calls"))["a"]
    assert str(call) == "view(uint16[2,3], [1, None], torch.preserve_format, dtype=torch.float16)"
    assert torch.equal(call.arguments[0], arguments[0])


def test_the_suite_runs_in_workers(flag_gems, tmp_path: Path):
    chosen = {"samples": 2, "only": "float", "stride": 1, "offset": 0, "resume": False, "timeout": 60.0}
    results = flaggems.run(tmp_path / "out", operators="nn.functional.gelu", **chosen)
    statuses = {name: record.status for name, record in results.records.items()}
    assert statuses["gelu float32"] is statuses["gelu_backward float16"] is Status.PASSED
    assert statuses["gelu float64"] is Status.REFUSED
    (written, _) = report.publish([tmp_path / "out"], tmp_path)
    assert written.name == "flaggems_simulated.json"
    assert "| FlagGems' gelu computes f64 in f32 | 1 |" in written.with_suffix(".md").read_text()
