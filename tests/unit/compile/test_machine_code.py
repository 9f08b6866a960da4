"""Where machine code is kept: compiled once, and again where what is kept is not what was written."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from flagos_backend.compile import machine_code
from flagos_backend.compile.machine_code import MachineCode

_MODULE = """
define void @run0(ptr %slots) {
  %p = load ptr, ptr %slots
  %x = load i32, ptr %p
  %y = mul i32 %x, 3
  store i32 %y, ptr %p
  ret void
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine_code, "private_folder", lambda name: tmp_path)
    return tmp_path


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that LLVM compiles."""
    found: list[str] = []
    compile_module = machine_code._Processor.compile

    def counted(self: machine_code._Processor, text: str) -> bytes:
        found.append(text)
        return compile_module(self, text)

    monkeypatch.setattr(machine_code._Processor, "compile", counted)
    return found


def _tripled(number: int) -> int:
    code = MachineCode(_MODULE, (None, "run0"))
    assert code.addresses[0] == 0
    value = ctypes.c_int32(number)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.addresses[1])((ctypes.c_void_p * 1)(ctypes.addressof(value)))
    return value.value


def test_a_module_is_compiled_once(folder: Path, compiles: list[str]) -> None:
    assert [_tripled(n) for n in (5, 7)] == [15, 21]
    assert len(compiles) == 1 and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"x" + data[41:]]
)
def test_what_is_damaged_is_compiled_again(change: Callable[[bytes], bytes], folder: Path, compiles: list[str]) -> None:
    _tripled(5)
    (path,) = folder.iterdir()
    path.write_bytes(change(path.read_bytes()))
    assert _tripled(7) == 21 and len(compiles) == 2


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, compiles: list[str]) -> None:
    monkeypatch.setattr(machine_code, "private_folder", lambda name: None)
    assert [_tripled(n) for n in (5, 7)] == [15, 21]
    assert len(compiles) == 2


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_code.is_available()
    monkeypatch.setenv(machine_code.VARIABLE, "0")
    assert not machine_code.is_available()
