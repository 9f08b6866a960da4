"""FLAGCX_PATH: the library and the module for PyTorch are found as FlagOS' plugins find them."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from flagos_backend import environment
from flagos_backend.devices import flagcx


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for a folder in which FlagCX was built: any library that loads, and an empty module."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(environment, "_said", set())
    monkeypatch.delitem(sys.modules, "flagcx", raising=False)
    some = importlib.util.find_spec("_cffi_backend")
    assert some is not None and some.origin is not None
    (tmp_path / "build/lib").mkdir(parents=True)
    shutil.copy(some.origin, tmp_path / "build/lib/libflagcx.so")
    module = tmp_path / "plugin/torch/flagcx"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("HERE = True\n")
    (module / "_C.abi3.so").touch()
    return tmp_path


def is_loaded(library: Path) -> bool:
    return str(library) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("folder", ["lib", "build/lib"])
def test_library_and_module(built: Path, folder: str) -> None:
    if folder == "lib":
        (built / "build/lib").rename(built / "lib")
    assert flagcx.find({"FLAGCX_PATH": str(built)})
    assert is_loaded(built / folder / "libflagcx.so")
    assert importlib.import_module("flagcx").HERE


def test_without_it_nothing_changes(built: Path) -> None:
    before = list(sys.path)
    assert flagcx.find({}) is (importlib.util.find_spec("flagcx") is not None)
    assert sys.path == before


def test_an_installed_module_is_kept(built: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    installed = tmp_path_factory.mktemp("installed")
    (installed / "flagcx.py").write_text("INSTALLED = True\n")
    sys.path.insert(0, str(installed))
    importlib.invalidate_caches()
    assert flagcx.find({"FLAGCX_PATH": str(built)}) and is_loaded(built / "build/lib/libflagcx.so")
    assert importlib.import_module("flagcx").INSTALLED


def test_a_module_that_is_not_built_is_said_once(built: Path, caplog: pytest.LogCaptureFixture) -> None:
    (built / "plugin/torch/flagcx/_C.abi3.so").unlink()
    for _ in range(2):
        assert not flagcx.find({"FLAGCX_PATH": str(built)})
    assert [r.getMessage() for r in caplog.records] == [
        f"FLAGCX_PATH is '{built}', whose plugin/torch is not built: torch.distributed does without FlagCX"
    ]


@pytest.mark.parametrize(
    ("spoil", "reason"), [("remove", "has neither lib/libflagcx.so nor"), ("empty", "does not load")]
)
def test_a_wrong_path(built: Path, spoil: str, reason: str) -> None:
    library = built / "build/lib/libflagcx.so"
    library.unlink()
    if spoil == "empty":
        library.touch()
    with pytest.raises(RuntimeError, match=r"^FLAGCX_PATH") as caught:
        flagcx.find({"FLAGCX_PATH": str(built)})
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_not_with_rights_of_its_own(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flagcx, "is_privileged", lambda: True)
    flagcx.find({"FLAGCX_PATH": str(built)})
    assert not is_loaded(built / "build/lib/libflagcx.so")
