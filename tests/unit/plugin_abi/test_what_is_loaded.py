"""What was checked is what enters the process, its dependencies included, and it goes by its own path there."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from plugin_abi import dynamic_load, loader, trial
from plugin_abi.errors import Refusal, RefusalCode
from plugin_abi.policy import Library
from unit.plugin_abi.load_time import SOURCES, own_library, with_own
from unit.plugin_abi.plugins import Plugins


def _when_checked(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Change files between the checks and the load."""
    judge = trial.Trial.judge

    def judge_and_change(*arguments: object) -> Refusal | None:
        outcome = judge(*arguments)  # type: ignore[arg-type]
        change()
        return outcome

    monkeypatch.setattr(trial.Trial, "judge", judge_and_change)


def _evil(plugins: Plugins) -> Path:
    return plugins.toolchain.build(flags=("-DMINIMAL_CONSTRUCTOR",))


def _renamed(new: Path, place: Path) -> Callable[[], None]:
    def change() -> None:
        shutil.copy(new, place.with_name("new"))
        place.with_name("new").replace(place)

    return change


def test_a_library_that_is_replaced_after_the_checks_does_not_run(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = plugins.add("50_sound")
    library = manifest.parent / "lib-50_sound.so"
    _when_checked(monkeypatch, _renamed(_evil(plugins), library))
    result = loader.load(environment=plugins.environment())
    assert result.accepted is not None, result.refusals
    assert library.read_bytes() == _evil(plugins).read_bytes()
    assert {what for what, _ in plugins.ran()} == {"entry"}


def test_a_link_that_leads_elsewhere_after_the_checks_counts_for_nothing(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = plugins.add("50_sound", library_path="./link.so")
    link = manifest.parent / "link.so"
    link.symlink_to("lib-50_sound.so")
    shutil.copy(_evil(plugins), manifest.parent / "evil.so")

    def retarget() -> None:
        link.unlink()
        link.symlink_to("evil.so")

    _when_checked(monkeypatch, retarget)
    backend = loader.load(environment=plugins.environment()).accepted
    assert backend is not None
    assert backend.place == _file_of(backend.address) == str(manifest.parent / "lib-50_sound.so")
    assert {what for what, _ in plugins.ran()} == {"entry"}


@pytest.mark.parametrize("soname", [False, True], ids=["by file name", "by soname"])
@pytest.mark.parametrize("run_path", ["$ORIGIN", "absolute"])
def test_a_dependency_that_is_replaced_after_the_checks_does_not_run(
    soname: bool, run_path: str, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"checked-{'so' if soname else 'file'}-{run_path.strip('$')}"
    dependency = own_library(plugins, name, soname=soname)
    evil = own_library(plugins, f"evil-{name}", "-DAT_LOAD_CONSTRUCTOR", f"-Wl,-soname,{dependency.name}")
    folder = str(plugins.folder / "backend.d") if run_path == "absolute" else run_path
    manifest = with_own(plugins, "50_own", dependency, run_path=folder)
    _when_checked(monkeypatch, _renamed(evil, manifest.parent / dependency.name))
    # It would end the process.
    result = loader.load(environment=plugins.environment())
    assert result.accepted is not None, result.refusals


def test_a_library_that_is_overwritten_is_refused(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = plugins.add("40_written")
    plugins.add("50_sound")
    evil, library = _evil(plugins).read_bytes(), manifest.parent / "lib-40_written.so"
    _when_checked(monkeypatch, lambda: library.write_bytes(evil) and None)
    result = loader.load(environment=plugins.environment())
    assert result.accepted is not None and result.accepted.place.endswith("lib-50_sound.so")
    assert [refusal.code for refusal in result.refusals] == [RefusalCode.LIBRARY_CHANGED]
    assert "constructor" not in {what for what, _ in plugins.ran()}


def _grants_leases(folder: Path) -> bool:
    place = folder / "leased"
    place.touch()
    with place.open() as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return False
    return True


def test_a_writer_waits_while_the_linker_reads(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last look at the file until it is loaded nobody writes to it; the dependency is held alike."""
    if not _grants_leases(plugins.folder):
        pytest.skip("this file system grants no leases")
    manifest = with_own(plugins, "50_own", own_library(plugins, "held"))
    files = [manifest.parent / name for name in ("lib-50_own.so", "lib-held.so")]
    writers = []
    load = dynamic_load.load

    def load_beside_writers(*arguments: object) -> ctypes.CDLL:
        program = "import sys; file = open(sys.argv[1], 'ab'); file.write(b'written')"
        writers.extend(subprocess.Popen([sys.executable, "-c", program, str(file)]) for file in files)
        with pytest.raises(subprocess.TimeoutExpired):
            writers[-1].wait(1)
        assert not any(file.read_bytes().endswith(b"written") for file in files)
        return load(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dynamic_load, "load", load_beside_writers)
    assert loader.load(environment=plugins.environment()).accepted is not None
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert all(file.read_bytes().endswith(b"written") for file in files)


def test_a_verdict_is_not_kept_for_bytes_that_were_overwritten(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = plugins.add()
    library = manifest.parent / "lib-50_minimal.so"

    def overwrite(*_: object) -> None:
        library.write_bytes(_evil(plugins).read_bytes())

    monkeypatch.setattr(trial, "_try", overwrite)
    refusal = loader.check(manifest, environment=plugins.environment())
    assert refusal is not None and refusal.code is RefusalCode.LIBRARY_CHANGED
    assert list((plugins.folder / "home/.cache/flagos/loader").iterdir()) == []


def test_renames_every_millisecond_let_nothing_refused_run(plugins: Plugins) -> None:
    """The library and its dependency change places with ones that end the process; whichever is read is judged."""
    dependency = own_library(plugins, "restless")
    evil = own_library(plugins, "restless-evil", "-DAT_LOAD_CONSTRUCTOR")
    manifest = with_own(plugins, "50_own", dependency)
    library = manifest.parent / "lib-50_own.so"
    bad = plugins.toolchain.build(SOURCES, ("-DAT_LOAD_CONSTRUCTOR",))
    program = """
import os, shutil, sys, threading, time
from pathlib import Path
from plugin_abi import loader
place, pairs = Path(sys.argv[1]), list(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
def restless():
    count = 0
    while True:
        count += 1
        for name, other in pairs:
            shutil.copy(other if count % 2 else place / (name + ".good"), place / "next")
            os.replace(place / "next", place / name)
        time.sleep(0.001)
for name, _ in pairs:
    shutil.copy(place / name, place / (name + ".good"))
threading.Thread(target=restless, daemon=True).start()
codes = set()
for _ in range(25):
    loader._state.backends.clear()
    result = loader.load()
    codes |= {refusal.code.name for refusal in result.refusals} or {"accepted"}
print(*sorted(codes))
os._exit(0)
"""
    changes = (library.name, str(bad), dependency.name, str(evil))
    variables = {**os.environ, **plugins.environment(FLAGOS_TRIAL_LOAD="0").variables}
    done = subprocess.run(
        [sys.executable, "-c", program, str(manifest.parent), *changes], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done
    assert set(done.stdout.split()) <= {"accepted", "STATIC_INITIALIZER", "LIBRARY_NOT_FOUND"}


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _file_of(address: int) -> str:
    """What dladdr tells a library that looks for its own files."""
    symbol = _Symbol()
    assert ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(symbol)) != 0
    return os.fsdecode(symbol.file)


def test_a_library_finds_its_own_path(plugins: Plugins) -> None:
    """So do debuggers, which read the same name, and dlopen by the path gives the library that is there."""
    dependency = own_library(plugins, "located")
    manifest = with_own(plugins, "50_own", dependency)
    backend = loader.load(environment=plugins.environment()).accepted
    assert backend is not None
    assert _file_of(backend.address) == backend.place == str(manifest.parent / "lib-50_own.so")
    for path in (backend.place, str(manifest.parent / dependency.name)):
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def test_dependencies_of_dependencies_are_found_beside_them(plugins: Plugins) -> None:
    """Each run path is its owner's; the linker itself is left nothing to look for."""
    folder = plugins.folder / "backend.d" / "below"
    folder.mkdir(parents=True)
    lowest = own_library(plugins, "lowest")
    link = (f"-L{lowest.parent}", "-Wl,--no-as-needed", f"-l:{lowest.name}", "-Wl,-rpath,$ORIGIN/below")
    middle = own_library(plugins, "middle", *link)
    manifest = with_own(plugins, "50_own", middle, "-Wl,--allow-shlib-undefined")
    shutil.copy(lowest, folder)
    assert loader.check(manifest, environment=plugins.environment()) is None
    assert loader.load(environment=plugins.environment()).accepted is not None


def test_dependencies_that_need_each_other_are_refused(plugins: Plugins) -> None:
    first = own_library(plugins, "first")
    link = (f"-L{first.parent}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN")
    second = own_library(plugins, "second", *link, f"-l:{first.name}")
    first.unlink()
    circular = own_library(plugins, "first", *link, f"-l:{second.name}")
    manifest = with_own(plugins, "50_own", circular)
    shutil.copy(second, manifest.parent)
    circular.unlink()
    refusal = loader.check(manifest, environment=plugins.environment())
    assert refusal is not None and refusal.code is RefusalCode.UNCHECKED_LOAD
    assert "lib-first.so" in refusal.fact and "lib-second.so" in refusal.fact


def test_the_files_stay_open_for_what_was_loaded(plugins: Plugins) -> None:
    """A closed descriptor's number would mean another file."""
    plugins.add()
    assert loader.load(environment=plugins.environment()).accepted is not None
    _, library = loader._state.libraries[-1]
    assert isinstance(library, Library)
    assert Path(f"/proc/self/fd/{library.file.descriptor}").readlink() == library.path
