"""Whatever goes wrong over one manifest or library is its own refusal: the backend beside it is loaded all the same."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plugin_abi import frameworks, loader, policy, search
from plugin_abi.errors import RefusalCode
from unit.plugin_abi.load_time import own_library, with_own
from unit.plugin_abi.plugins import Plugins

#: One of each kind that something could treat apart.
ERRORS = (
    *(errno.EIO, errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EMFILE),
)
#: What the host side calls on files: names of the module os.
OPERATIONS = ("stat", "lstat", "open", "fstat", "pread", "preadv", "scandir", "readlink", "access")


class Injection:
    """Counts the file operations on what lies in one folder, and lets one of them fail."""

    def __init__(self, folder: Path) -> None:
        self._folder = os.fsencode(folder)
        self._readlink = os.readlink
        self.count, self.fail_at, self.error = 0, -1, 0

    def _concerns(self, place: Any) -> bool:
        if isinstance(place, int):
            place = self._readlink(f"/proc/self/fd/{place}")
        return os.fsencode(place).startswith(self._folder)

    def _wrap(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(place: Any, *arguments: Any, **options: Any) -> Any:
            if not self._concerns(place):
                return operation(place, *arguments, **options)
            self.count += 1
            if self.count == self.fail_at:
                raise OSError(self.error, os.strerror(self.error), str(place))
            return operation(place, *arguments, **options)

        return wrapped

    @contextmanager
    def active(self, fail_at: int, error: int) -> Iterator[None]:
        self.count, self.fail_at, self.error = 0, fail_at, error
        with pytest.MonkeyPatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, self._wrap(getattr(os, name)))
            yield


def test_each_error_at_each_file_operation_is_the_refusal_of_its_own_entry(plugins: Plugins) -> None:
    """The first backend is sound and brings a dependency; each of its file operations fails in each way."""
    with_own(plugins, "10_first", own_library(plugins, "isolated"), folder="first", priority=1, resource_dir=".")
    plugins.add("50_sound")
    files = f"{plugins.folder}/first:{plugins.folder}/backend.d"
    environment = plugins.environment(FLAGOS_DRIVER_FILES=files, FLAGOS_TRIAL_LOAD="0")
    injection = Injection(plugins.folder / "first")

    def load(fail_at: int, error: int) -> loader.LoadResult:
        if error == ERRORS[0]:
            loader._state.backends.clear()
        with injection.active(fail_at, error):
            return loader.load(environment=environment)

    assert _name(load(0, 0)) == "10_first"
    count = injection.count
    assert count > 15
    refused = set()
    for fail_at in range(1, count + 1):
        for error in ERRORS:
            result = load(fail_at, error)
            codes = {refusal.code for refusal in result.refusals}
            # What is not asked again may not matter.
            assert _name(result) == ("50_sound" if codes else "10_first"), (fail_at, errno.errorcode[error])
            assert len(result.refusals) <= 1 and RefusalCode.CHECK_FAILED not in codes, result.refusals
            refused |= codes
    assert {RefusalCode.MANIFEST_UNREADABLE, RefusalCode.LIBRARY_UNREADABLE, RefusalCode.DEPENDENCY_MISSING} <= refused


def _name(result: loader.LoadResult) -> str | None:
    manifest = result.accepted.manifest if result.accepted is not None else None
    return manifest.path.stem if manifest is not None else None


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(errno.EIO, "injected"), RecursionError(), MemoryError(), ValueError("embedded null byte")),
        *(UnicodeEncodeError("utf-8", "\udc80", 0, 1, "surrogates"), KeyError("x"), AssertionError(), OverflowError()),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("place", ["read_manifest", "locate", "examine"])
def test_any_exception_over_one_entry_is_its_refusal(
    place: str, error: Exception, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that nobody thought of."""
    plugins.add("10_first", priority=1)
    plugins.add("50_sound")
    original = getattr(loader, place)

    def fail(what: Any, *rest: Any) -> Any:
        if "10_first" in str(getattr(what, "path", what)):
            raise error
        return original(what, *rest)

    monkeypatch.setattr(loader, place, fail)
    result = loader.load(environment=plugins.environment(FLAGOS_TRIAL_LOAD="0"))
    assert _name(result) == "50_sound"
    (refusal,) = result.refusals
    assert refusal.code is RefusalCode.CHECK_FAILED and type(error).__name__ in refusal.fact


LONG = "x" * 300


@pytest.mark.parametrize(
    "library",
    [f"./{LONG}", f"./{LONG}/lib.so", "./" + "a/" * 2000, f"/{LONG}", LONG, "./lib-50_sound.so/inside", "/dev/null"],
    ids=["long name", "in a long name", "long path", "absolute", "bare", "in a file", "device"],
)
def test_a_path_that_leads_nowhere_is_one_refusal(library: str, plugins: Plugins) -> None:
    plugins.add("10_first", library_path=library)
    plugins.add("50_sound")
    result = loader.load(environment=plugins.environment(FLAGOS_TRIAL_LOAD="0"))
    assert _name(result) == "50_sound"
    (refusal,) = result.refusals
    assert refusal.code in (RefusalCode.LIBRARY_NOT_FOUND, RefusalCode.LIBRARY_UNREADABLE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user whom a folder shuts out")
def test_a_folder_that_the_user_may_not_enter_takes_nothing_from_others(plugins: Plugins) -> None:
    """Manifest, library, dependency and resources in it, one after the other."""
    shut = plugins.folder / "shut"
    shut.mkdir()
    first = plugins.add("10_first", priority=1)
    outside = first.parent / "lib-10_first.so"
    (shut / "lib.so").write_bytes(outside.read_bytes())
    plugins.add("20_library", library_path=str(shut / "lib.so"), priority=2)
    plugins.add("30_resources", resource_dir=str(shut / "resources"), priority=3)
    (first.parent / "40_link.json").symlink_to(shut / "40.json")
    (shut / "40.json").write_text(first.read_text())
    for place in (*plugins.folder.parents, plugins.folder):
        if stat.S_IMODE(place.stat().st_mode) & 0o005 != 0o005 and place.owner() == "root" and "pytest" in str(place):
            place.chmod(0o755)
    shut.chmod(0o000)
    program = (
        "import os; from plugin_abi import loader; os.setgid(65534); os.setuid(65534)\n"
        "result = loader.load(); print(result.accepted.place, *(r.code.name for r in result.refusals))"
    )
    files = f"{first.parent}:{shut}"
    environment = plugins.environment(FLAGOS_DRIVER_FILES=files, FLAGOS_TRIAL_LOAD="0", FLAGOS_TEST_MARKER="")
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment.variables}, capture_output=True, text=True
    )
    place, *codes = done.stdout.split()
    assert place == str(outside), done.stderr
    assert sorted(codes) == ["LIBRARY_UNREADABLE", *["MANIFEST_UNREADABLE"] * 2, "RESOURCE_DIR_UNUSABLE"]


def test_a_package_that_cannot_be_asked_hides_no_other(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def __init__(self, name: str, value: str) -> None:
            self.name, self.value = name, value

    def find(name: str) -> Path | None:
        if name == "broken":
            raise RuntimeError("an import hook of somebody else")
        return frameworks.package_folder(name)

    entries = [Entry("a", "broken"), Entry("b", "json"), Entry("c", "..."), Entry("d", "")]
    monkeypatch.setattr(search.importlib.metadata, "entry_points", lambda group: entries)
    monkeypatch.setattr(search, "package_folder", find)
    assert Path(json.__file__).parent in search._announced_folders()

    def fail(group: str) -> list[Entry]:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "metadata of some package")

    monkeypatch.setattr(search.importlib.metadata, "entry_points", fail)
    assert search._announced_folders() == []


def test_the_frameworks_files_are_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of theirs that cannot be read is one whose facts are unknown."""

    def fail(path: Path) -> None:
        raise PermissionError(errno.EACCES, "injected", str(path))

    monkeypatch.setattr(frameworks, "open_elf", fail)
    found = frameworks.detect("torch")
    assert found is not None and found.compiler is None and found.version is not None
    assert policy.HOST_ABI is not None
