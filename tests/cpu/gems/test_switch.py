"""Turning FlagGems on and off: what is computed by whom, that nothing is left of it, and what wrong values get."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

from flagos_backend import environment
from flagos_backend.gems import follow_environment, reports, switch
from flagos_backend.kernels.flaggems import loading
from flagos_backend.torch.gems import gems


@pytest.fixture
def x(rng: np.random.Generator, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((4, 6))).to(torch.float32).to(device)


def flaggems(name: str) -> int:
    """How many calls of an operator FlagGems has computed."""
    return reports()[name].flaggems


def registered() -> dict[str, str]:
    """The kernels of the device, and PyTorch's own of the host, as the dispatcher prints them."""
    names = [name if name.startswith("aten::") else "" for name in torch._C._dispatch_get_all_op_names()]
    return {name: torch._C._dispatch_dump(name) for name in filter(None, names)}


def test_off_again_without_trace(x: torch.Tensor) -> None:
    x.exp()
    before = registered()
    with gems():
        assert registered() != before
        x.exp()
        assert flaggems("exp") == 1
    assert registered() == before and reports() == {}
    assert torch.equal(x.exp().cpu(), x.cpu().exp())


def test_off_again_after_an_error(x: torch.Tensor) -> None:
    before = registered()
    with pytest.raises(ZeroDivisionError), gems():
        raise ZeroDivisionError
    assert registered() == before


def test_the_innermost_counts(x: torch.Tensor) -> None:
    with gems() as outer:
        with gems(deny=["exp"]) as inner:
            x.exp(), x.sin()
            assert "exp" not in inner.reports() and flaggems("sin") == 1
        x.exp()
        assert outer.reports()["exp"].flaggems == 1 and outer.reports()["sin"].flaggems == 0


def test_those_that_end_in_another_order(x: torch.Tensor) -> None:
    before = registered()
    first, second = gems(allow=["exp"]), gems(allow=["sin"])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    x.sin()
    assert flaggems("sin") == 1
    second.__exit__(None, None, None)
    assert registered() == before


@pytest.mark.parametrize("name", ["lt.Scalar", "lt_scalar", "aten::lt.Scalar", "lt", "aten::lt"])
def test_lists_take_every_name(x: torch.Tensor, name: str) -> None:
    with gems(allow=[name]) as active:
        assert torch.equal((x < 0.5).cpu(), x.cpu() < 0.5) and flaggems("lt.Scalar") == 1
        assert "exp" not in active.reports()
    with gems(deny=[name]) as active:
        assert "lt.Scalar" not in active.reports() and "exp" in active.reports()


def test_lists_of_the_environment(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_FLAGOS_WHITELIST", "exp,silu_and_mul")
    with gems() as active:
        assert set(active.reports()) == {"exp"}
    monkeypatch.setenv("FLAGOS_FLAGOS_BLACKLIST", "exp")
    with gems() as active:
        assert "exp" not in active.reports() and "sin" in active.reports()


def test_what_is_preferred_computes(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGOS_PER_OP", "aten::exp=vendor")
    with gems() as active:
        x.exp(), x.sin()
        assert dict(active.reports()["exp"].native) == {"vendor is preferred": 1} and flaggems("sin") == 1


# ---- guards ----


@pytest.mark.parametrize(
    ("call", "name", "reason"),
    [
        (lambda x: x.double().exp(), "exp", "FlagGems' exp computes f64 in f32"),
        (lambda x: x[:0].exp(), "exp", "not made for arrays without elements"),
        (lambda x: x.to(torch.bfloat16).exp(), "exp", "the bits of bfloat16"),
        (lambda x: x.to(torch.complex64).exp(), "exp", "FlagGems has no c64"),
        (lambda x: x.to(torch.int64).mm(x.to(torch.int64).t()), "mm", "FlagGems' mm multiplies no integers"),
        (lambda x: torch.ops.aten.mul.Tensor(x, x[:1]), "mul.Tensor", "all operands for such as the first one"),
        (lambda x: x + torch.tensor(1.0), "add.Tensor", "on several devices"),
        (lambda x: x.to("cpu"), "_to_copy", "a device is named"),
    ],
)
def test_guards(x: torch.Tensor, call: Any, name: str, reason: str) -> None:
    with gems():
        found = call(x)
        assert flaggems(name) == 0 and any(reason in said for said in reports()[name].native), reports()[name]
    assert torch.equal(found.cpu(), call(x).cpu())


def test_results_lie_as_pytorch_has_them(rng: np.random.Generator, device: torch.device) -> None:
    images = torch.from_numpy(rng.standard_normal((2, 3, 4, 5))).float().to(memory_format=torch.channels_last)
    with gems():
        found = images.to(device).exp()
        assert flaggems("exp") == 1
    assert found.stride() == images.exp().stride() and found.is_contiguous(memory_format=torch.channels_last)


def test_deterministic_algorithms(x: torch.Tensor) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with gems():
            x.exp()
            assert flaggems("exp") == 0 and sum(reports()["exp"].native.values()) == 1
    finally:
        torch.use_deterministic_algorithms(False)


def test_equal_numbers_of_other_types_are_other_calls(x: torch.Tensor) -> None:
    integers = (x * 10).to(torch.int32)
    with gems():
        for number in (1, 1.0, True):
            found, expected = integers + number, integers.cpu() + number
            assert found.dtype == expected.dtype and torch.equal(found.cpu(), expected)


def test_wrong_calls_get_pytorchs_error(x: torch.Tensor) -> None:
    with gems(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x.mm(x)


def test_training(rng: np.random.Generator, device: torch.device) -> None:
    weight, inputs = (torch.from_numpy(rng.standard_normal(d)).float() for d in ((6, 3), (4, 6)))

    def gradient(place: torch.device, dtype: torch.dtype) -> torch.Tensor:
        w = weight.to(place, dtype).requires_grad_()
        torch.log_softmax((inputs.to(place, dtype) @ w).tanh(), -1).square().mean().backward()
        assert w.grad is not None
        return w.grad.cpu().double()

    with gems():
        found = gradient(device, torch.float32)
        assert all(flaggems(name) for name in ("mm", "tanh", "_log_softmax", "tanh_backward"))
    torch.testing.assert_close(found, gradient(torch.device("cpu"), torch.float64), rtol=1e-4, atol=1e-5)


def test_compiled_programs_keep_their_kernels(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen for a program is chosen, and calls of ATen are what it may be made of."""
    monkeypatch.setenv("FLAGOS_PREFER", "reference")
    with gems():
        compiled = torch.compile(lambda t: torch.softmax(t @ t.t(), -1).cumsum(0), backend="flagos")
        found = compiled(x)
        assert not any(report.flaggems for report in reports().values())
    host = x.cpu().double()
    expected = torch.softmax(host @ host.t(), -1).cumsum(0).float()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_other_threads(x: torch.Tensor) -> None:
    found: list[torch.Tensor] = []
    with gems():
        threads = [threading.Thread(target=lambda: found.append(x.exp())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert flaggems("exp") == 4
    for one in found:
        torch.testing.assert_close(one.cpu(), x.cpu().exp(), rtol=1e-5, atol=1e-6)


# ---- what goes wrong ----


def test_what_fails_is_computed_by_pytorch_and_said_once(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "flagos_backend")
    monkeypatch.setitem(loading.functions(), "exp", lambda t: 1 / 0)
    with gems():
        for _ in range(2):
            assert torch.equal(x.exp().cpu(), x.cpu().exp())
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "FlagGems' exp fails: ZeroDivisionError: division by zero. PyTorch's own kernel"
    )


def test_what_fails_is_an_error_where_strict(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAGOS_STRICT", "1")
    monkeypatch.setitem(loading.functions(), "exp", lambda t: 1 / 0)
    with gems(), pytest.raises(ZeroDivisionError):
        x.exp()


@pytest.mark.parametrize("wrong", [lambda t: t.half(), lambda t: t[:1].clone(), lambda t: (t.clone(), t.clone())])
def test_results_that_are_none_of_atens(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setitem(loading.functions(), "exp", wrong)
    with gems():
        assert torch.equal(x.exp().cpu(), x.cpu().exp()) and flaggems("exp") == 0


def test_results_do_not_share_memory(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading.functions(), "relu", lambda t: t)
    positive = x.abs()
    with gems():
        found = positive.relu()
        assert flaggems("relu") == 1
        found.zero_()
    assert positive.cpu().all()


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"allow": ["soft_max"]}, "allow has 'soft_max', which FlagGems does not compute; it computes softmax"),
        ({"deny": ["nonsense"]}, "deny has 'nonsense', which FlagGems does not compute; it computes "),
        ({"allow": "mm"}, r"allow is 'mm'; it takes a list of names: allow=\['mm'\]"),
        ({"allow": ["mm"], "deny": ["exp"]}, "allow or deny, not both"),
    ],
)
def test_wrong_lists(lists: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        gems(**lists)
    assert "\n" not in str(caught.value)


def test_what_flag_gems_has_patched_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.load(), "current_work_registrar", object())
    with pytest.raises(RuntimeError, match=r"flag_gems.enable\(\) has given PyTorch's operators"):
        gems().__enter__()


# ---- the environment ----


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"FLAGOS_GLOBAL_GEMS": "1"}, True),
        ({"FLAGOS_GLOBAL_GEMS": "0"}, False),
        ({"USE_FLAGGEMS": "1"}, True),
        ({"USE_FLAGGEMS": "0"}, False),
        ({"USE_FLAGGEMS": "1", "FLAGOS_GLOBAL_GEMS": "0"}, False),
        ({"USE_FLAGGEMS": "0", "FLAGOS_GLOBAL_GEMS": "1"}, False),
    ],
)
def test_who_asks_for_it(variables: dict[str, str], on: bool) -> None:
    assert switch.asked(variables) is on


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"FLAGOS_GLOBAL_GEMS": "1", "FLAGOS_PREFER": "cuda"}, "FLAGOS_PREFER holds 'cuda', which is not flagos, "),
        ({"FLAGOS_GLOBAL_GEMS": "1", "USE_FLAGGEMS": "0"}, "FLAGOS_GLOBAL_GEMS=1 does not count: USE_FLAGGEMS=0"),
        ({"USE_FLAGGEMS": "1", "FLAGOS_DEVICE": "cpu"}, "FlagGems has no kernels for the host"),
        (
            {"FLAGOS_GLOBAL_GEMS": "1", "FLAGOS_CONFIG": "/none.yaml"},
            "The file of FLAGOS_CONFIG, /none.yaml, ",
        ),
    ],
)
def test_why_not_is_one_line(
    variables: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(environment, "_said", set())
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    follow_environment()
    (record,) = caplog.records
    assert line in record.getMessage() and "\n" not in record.getMessage() and reports() == {}


def test_doctor_says_what_the_environment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "eager operators: off" in switch.describe()[0]
    monkeypatch.setenv("FLAGOS_GLOBAL_GEMS", "1")
    monkeypatch.setenv("FLAGOS_FLAGOS_WHITELIST", "exp,sin")
    on, count = switch.describe()
    assert on == "eager operators: on" and count.startswith("operators that it may compute: 2 of ")
    monkeypatch.setenv("FLAGOS_GLOBAL_GEMS", "perhaps")
    assert switch.describe() == ["wrong variable: FLAGOS_GLOBAL_GEMS is 'perhaps'; it can be 1 or 0"]
