"""Ctrl-C while compilers run: what waits ends, processes are killed, files are whole or not there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flagos_backend.bridge import describe_exception
from flagos_backend.errors import StatusCode
from flagos_backend.process import cache, interrupts, side_by_side, torch_loading
from plugin_abi import trial


@pytest.fixture(autouse=True)
def own_handler() -> Iterator[None]:
    """Python's handler, also where whoever started the tests ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def press_after(reached: threading.Event | threading.Barrier) -> None:
    reached.wait(60)
    press()


def test_what_runs_apart_goes_on_when_the_wait_for_it_ends() -> None:
    begun, go_on, ended = (threading.Event() for _ in range(3))

    def work() -> None:
        begun.set()
        go_on.wait(60)
        ended.set()

    threading.Thread(target=press_after, args=(begun,), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        interrupts.apart(work)
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(60)


def test_what_runs_apart_gives_its_result_or_error() -> None:
    assert interrupts.apart(lambda: threading.current_thread() is threading.main_thread()) is False
    with pytest.raises(ZeroDivisionError):
        interrupts.apart(lambda: 1 // 0)


def test_a_deferred_interrupt_comes_afterwards() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        press()
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Interrupted(list[int]):
    """Items: once the first is begun, Ctrl-C comes before the second is submitted."""

    def __init__(self, begun: threading.Event) -> None:
        super().__init__(range(8))
        self.begun = begun

    def __iter__(self) -> Iterator[int]:
        yield 0
        assert self.begun.wait(60)
        raise KeyboardInterrupt


def test_compilers_are_killed_where_ctrl_c_comes_before_all_are_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(side_by_side.THREADS, "2")
    monkeypatch.setattr(torch, "get_device_module", lambda device: _Devices)
    torch_loading.load()
    children: list[subprocess.Popen[bytes]] = []
    begun = threading.Event()

    def compile_kernel(number: int) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        children.append(child)
        begun.set()
        child.wait()

    with pytest.raises(KeyboardInterrupt):
        side_by_side.side_by_side(compile_kernel, _Interrupted(begun), torch.device("cpu"))
    assert [child.wait(60) for child in children] == [-signal.SIGKILL]


@pytest.mark.parametrize("threads", ["1", "2"])
def test_what_is_done_is_told_while_others_go_on(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(side_by_side.THREADS, threads)
    monkeypatch.setattr(torch, "get_device_module", lambda device: _Devices)
    torch_loading.load()
    told, seen = threading.Event(), []

    def compile_kernel(number: int) -> int:
        if number == 1:
            assert told.wait(60)
        return -number

    def tell(number: int) -> None:
        seen.append((number, threading.current_thread()))
        if number == 0:
            told.set()

    assert side_by_side.side_by_side(compile_kernel, range(4), torch.device("cpu"), tell) == [0, -1, -2, -3]
    assert sorted(number for number, _ in seen) == [0, 1, 2, 3]
    assert {thread for _, thread in seen} == {threading.current_thread()}


def test_compilers_that_are_processes_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(side_by_side.THREADS, "2")
    monkeypatch.setattr(torch, "get_device_module", lambda device: _Devices)
    torch_loading.load()
    both = threading.Barrier(3)
    children: list[subprocess.Popen[bytes]] = []
    begun: list[int] = []

    def compile_kernel(number: int) -> None:
        begun.append(number)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        children.append(child)
        both.wait(60)
        child.wait()

    threading.Thread(target=press_after, args=(both,), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        side_by_side.side_by_side(compile_kernel, range(8), torch.device("cpu"))
    assert [child.wait(60) for child in children] == [-signal.SIGKILL] * 2
    assert sorted(begun) == [0, 1], "what had not begun begins no more"


class _Devices:
    @staticmethod
    def device(device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_no_half_a_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    cache.replace(kept, b"before")
    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.replace(kept, b"after")
    with pytest.raises(KeyboardInterrupt):
        trial._keep(tmp_path, "verdict", None)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and kept.read_bytes() == b"before"


def test_an_interrupt_is_no_defect() -> None:
    code, message, payloads = describe_exception(KeyboardInterrupt())
    assert code == StatusCode.CANCELLED and message.endswith("[FLAGOS-409]")
    assert dict(payloads)["flagos.error"] == b"Interrupted"
