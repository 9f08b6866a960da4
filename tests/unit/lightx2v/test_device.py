"""Which device and which collectives PLATFORM=flagos means, and what wrong variables get as an answer."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flagos_backend.frontends.lightx2v import device, knobs
from flagos_backend.frontends.lightx2v.device import FlagosDevice


@pytest.mark.parametrize("found", [None, torch.device("cpu"), SimpleNamespace(type="flagos")])
def test_without_another_accelerator_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    assert FlagosDevice.get_device() == "cpu"
    assert FlagosDevice.is_available()


def test_the_accelerator_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert FlagosDevice.get_device() == "cuda"


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTX2V_FL_DEVICE", "abacus")
    with pytest.raises(RuntimeError, match=r"LIGHTX2V_FL_DEVICE is 'abacus'.*Unset it"):
        FlagosDevice.get_device()
    assert not FlagosDevice.is_available()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (knobs.GLOBAL_GEMS, "perhaps"),
        (knobs.DISABLE_FLAGCX, "2"),
        (knobs.COMPILE, "inductor"),
        (knobs.GEMS_UNUSED, "mm,soft max"),
        (knobs.DEVICE, "cuda:0"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=rf"^{name} .*in the environment"):
        FlagosDevice.init_device_env()


@pytest.mark.parametrize(
    ("text", "expected"), [("", True), (" 0 ", False), ("False", False), ("on", True), ("1", True)]
)
def test_yes_and_no(text: str, expected: bool) -> None:
    assert knobs.flag("X", default=True, variables={"X": text}) is expected


def test_flagcx_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flagcx", ModuleType("flagcx"))
    assert device.collective_backend("cuda") == "cpu:gloo,cuda:flagcx"
    assert device.collective_backend("cpu") == "gloo"
    monkeypatch.setenv("LIGHTX2V_FL_DISABLE_FLAGCX", "1")
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "hccl")
    assert device.collective_backend("npu") == "cpu:gloo,npu:hccl"
    assert device.collective_backend("cuda") == "gloo"


def test_flaggems_everywhere(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("LIGHTX2V_FL_GLOBAL_GEMS", "1")
    monkeypatch.setenv("LIGHTX2V_FL_GEMS_UNUSED", "mm, softmax")
    FlagosDevice.init_device_env()
    assert "LIGHTX2V_FL_GLOBAL_GEMS asks for FlagGems everywhere; nothing changes: " in caplog.text
    asked: list[object] = []

    class Gems:
        def __init__(self, deny: object) -> None:
            self.deny = deny

        def __enter__(self) -> None:
            asked.append(self.deny)

    monkeypatch.setattr("flagos_backend.gems.gems", Gems)
    FlagosDevice.init_device_env()
    assert asked == [["mm", "softmax"]]
