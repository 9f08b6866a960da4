"""Streams that the native side makes, where it drives the device; torch's elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flagos_backend.devices import streams


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's module, whose streams say where they come from."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("torch's", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))


DEVICE = torch.device("cuda", 1)


@pytest.mark.parametrize("made", [0, 77])
def test_a_stream_is_the_drivers_where_it_makes_one(monkeypatch: pytest.MonkeyPatch, made: int) -> None:
    asked: list[int] = []
    monkeypatch.setattr(streams, "_make", lambda ordinal: asked.append(ordinal) or made)
    assert streams.own_stream(DEVICE) == (made or "torch's", DEVICE)
    assert asked == [1]


def test_without_the_native_side_streams_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_make", None)
    assert streams.own_stream(DEVICE) == ("torch's", DEVICE)


def test_other_drivers_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_make", lambda ordinal: pytest.fail("asks CUDA"))
    module = SimpleNamespace(Stream=lambda device: "theirs")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert streams.own_stream(torch.device("xpu", 0)) == "theirs"
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm's devices have the same name
    assert streams.own_stream(DEVICE) == "theirs"
