"""What is loaded beside the first program's compilation."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flagos_backend.devices.target import HOPPER
from flagos_backend.kernels.triton import compile_processes
from flagos_backend.kernels.vendor import dot
from flagos_backend.runtime.accelerator import early


class Chip(SimpleNamespace):
    """An accelerator that is not there."""

    def guard(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(early, "_begun", set())
    monkeypatch.setattr(early, "prepare_triton", lambda: None)
    monkeypatch.setattr(compile_processes, "start", lambda target: None)
    yield Chip(device=torch.device("cuda", 5), target=HOPPER)


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "flagos-load":
            thread.join()


def test_each_device_loads_once(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, torch.dtype]] = []
    monkeypatch.setattr(dot, "load_library", lambda device_type, dtype: loaded.append((device_type, dtype)))
    for _ in range(3):
        early.load_beside(chip)
    wait()
    assert loaded == [("cuda", torch.bfloat16), ("cuda", torch.float32)]
    early.load_beside(Chip(device=torch.device("cuda", 6), target=HOPPER))
    wait()
    assert len(loaded) == 4


def test_what_cannot_be_loaded_is_left_to_who_needs_it(
    chip: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(device_type: str, dtype: torch.dtype) -> None:
        raise RuntimeError("no handle")

    monkeypatch.setattr(dot, "load_library", fail)
    with caplog.at_level(logging.DEBUG, "flagos_backend"):
        early.load_beside(chip)
        wait()
    assert "cuda:5: not loaded ahead: no handle" in caplog.text


def test_a_device_over_host_memory_has_no_library(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dot, "load_library", lambda *_: pytest.fail("there is none"))
    chip.device = torch.device("cpu")
    early.load_beside(chip)
    wait()


def test_triton_is_prepared_beside_the_first_compilation(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver and the key of its cache, which the first kernels would wait for."""
    prepared: list[str] = []
    monkeypatch.setattr(dot, "load_library", lambda *_: None)
    monkeypatch.setattr(early, "prepare_triton", lambda: prepared.append(threading.current_thread().name))
    early.load_beside(chip)
    wait()
    assert prepared == ["flagos-load"]


def test_processes_that_compile_start_before_all_else(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr(dot, "load_library", lambda *_: None)
    monkeypatch.setattr(early, "prepare_triton", lambda: begun.append("triton"))
    monkeypatch.setattr(compile_processes, "start", begun.append)
    early.load_beside(chip)
    wait()
    assert begun == [("cuda", 90, 32), "triton"]


def test_no_process_compiles_for_a_device_over_host_memory(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes, "start", lambda target: pytest.fail("Triton's interpreter runs there"))
    chip.device = torch.device("cpu")
    early.load_beside(chip)
    wait()
